import pytest

from dagster_unified.testing.connectors import spark_connect_server
from tests.ports import free_port
from tests.servers.mariadb import mariadb, mariadb_server  # noqa: F401


@pytest.fixture(scope="module")
def server():
    """The address of a Spark Connect server."""
    with spark_connect_server(free_port()) as address:
        yield address
