import pytest


@pytest.fixture(params=["duckdb", "mariadb", "sqlite"])
def url(request, tmp_path):
    if request.param == "mariadb":
        return request.getfixturevalue("mariadb")
    return f"{request.param}:///{tmp_path}/shop.db"
