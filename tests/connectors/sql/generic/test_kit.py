"""The sink under kills, zombies and retried tasks, on a Spark Connect server."""

from itertools import product

import pytest

from dagster_unified.connectors import DatabaseSink, DeliveryGuarantee
from dagster_unified.testing.connectors import SinkTarget, check_epochs, check_partitions, spark_connect_server
from tests.connectors.sql.generic.test_sink import rows
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
    locks_others_out = True  # nobody can take a lock from a process that is stopped

    def __init__(self, url, options):
        self.url, self.options = url, options

    def sink(self):
        return DatabaseSink("entries", self.url, **self.options)

    def rows(self):
        return rows(self.url, 'SELECT "key", version, text FROM entries')


class ServersTable(Table):
    def restart(self):
        _SERVERS[self.url].restart()


@pytest.fixture(scope="module")
def spark_server():
    with spark_connect_server(free_port()) as address:
        yield address


@pytest.mark.spark
@pytest.mark.rotates("kits")
@pytest.mark.parametrize(
    ("kind", "mode", "check"),
    product(("duckdb", "mariadb", "sqlite", "another"), MODES, (check_epochs, check_partitions)),
)
def test_nothing_is_lost_and_nothing_is_there_twice_whoever_is_killed(
    request, spark_server, tmp_path, kind, mode, check
):
    if kind == "mariadb":
        mariadb = request.getfixturevalue("mariadb")
        _SERVERS[mariadb] = request.getfixturevalue("mariadb_server")
        target = ServersTable(mariadb, MODES[mode])
    elif kind == "another":  # as any database whose transactions are not known; this one keeps them
        url = request.getfixturevalue("postgres").replace("postgresql:", "postgresql+psycopg:")
        target = Table(url, {**MODES[mode], "delivery_guarantee": DeliveryGuarantee.AT_LEAST_ONCE})
    else:
        target = Table(f"{kind}:///{tmp_path}/entries.db", MODES[mode])
    faults = check(target, spark_server, SEED, KILLS)
    assert faults.kills >= KILLS
    assert not NIGHTLY or (faults.zombies and (faults.restarts or kind != "mariadb"))
