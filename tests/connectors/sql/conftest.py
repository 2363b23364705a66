import pytest

from dagster_unified.connectors import PostgresSink
from tests.connectors.sql.support import Database


@pytest.fixture(params=["duckdb", "mariadb", "postgres", "sqlite", "another", "another of MySQL's kind"])
def database(request, tmp_path):
    if request.param in ("duckdb", "sqlite"):
        return Database(f"{request.param}:///{tmp_path}/shop.db")
    url = request.getfixturevalue("postgres" if request.param in ("postgres", "another") else "mariadb")
    if request.param == "postgres":
        return Database(url, PostgresSink)
    if request.param == "mariadb":
        return Database(url)
    other = url.replace("postgresql:", "postgresql+psycopg:").replace("mariadb+", "mysql+")
    return Database(other, exactly_once=False)  # as any database whose transactions are not known
