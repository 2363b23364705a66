"""The sink under kills, zombies, retried tasks and restarts of a real server, on a Spark Connect server."""

from itertools import product

import pytest

from dagster_unified.connectors.sql.postgres import PostgresSink
from dagster_unified.testing.connectors import SinkTarget, check_epochs, check_partitions, spark_connect_server
from tests.connectors.sql.postgres.support import rows, staging_tables, write
from tests.depth import NIGHTLY, SEED
from tests.ports import free_port

KILLS = 36 if NIGHTLY else 4
MODES = {
    "append": {"partition_column": "of_partition"},
    "overwrite": {"mode": "overwrite", "partition_column": "of_partition"},
    "upsert": {"mode": "upsert", "key": "key"},
}
_SERVERS = {}


class Table(SinkTarget):
    def __init__(self, url, options):
        self.url, self.options = url, options

    def sink(self):
        return PostgresSink("entries", self.url, **self.options)

    def rows(self):
        return rows(self.url, "SELECT key, version, text FROM entries")

    def restart(self):
        _SERVERS[self.url].restart()


@pytest.fixture(scope="module")
def spark_server():
    with spark_connect_server(free_port()) as address:
        yield address


@pytest.mark.spark
@pytest.mark.rotates("kits")
@pytest.mark.parametrize(("mode", "check"), product(MODES, (check_epochs, check_partitions)))
def test_nothing_is_lost_and_nothing_is_there_twice_whoever_is_killed(
    spark_server, postgres_server, postgres, mode, check
):
    _SERVERS[postgres] = postgres_server
    target = Table(postgres, MODES[mode])
    faults = check(target, spark_server, SEED, KILLS)
    assert faults.kills >= KILLS
    assert not NIGHTLY or (faults.zombies and faults.restarts)
    write(PostgresSink("after", postgres), [(1, "another table")], record=tuple[int, str])
    assert staging_tables(postgres) == []
