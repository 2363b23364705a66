"""Sinks into databases under kills, zombies, retried tasks and restarts, on a Spark Connect server."""

from itertools import product

import pytest

from dagster_unified.connectors import DatabaseSink, DeliveryGuarantee, PostgresSink
from dagster_unified.testing.connectors import SinkTarget, check_epochs, check_partitions
from tests.connectors.sql.support import rows, staging_tables
from tests.connectors.support import write
from tests.connectors.test_kit import UPSERT
from tests.depth import NIGHTLY, SEED

KILLS = 36 if NIGHTLY else 4
DATABASES = ("another", "duckdb", "mariadb", "postgres", "sqlite")
MODES = {
    "append": {"partition_column": "of_partition"},
    "overwrite": {"mode": "overwrite", "partition_column": "of_partition"},
    "upsert": UPSERT,
}
SERVERS = {}
"""The databases' servers by the URLs of their databases, since targets are pickled."""


class Table(SinkTarget):
    def __init__(self, url, sink, **options):
        self.url, self.kind, self.options = url, sink, options
        self.locks_others_out = sink is DatabaseSink  # nobody can take a lock from a process that is stopped

    def sink(self):
        return self.kind("entries", self.url, **self.options)

    def rows(self):
        return rows(self.url, 'SELECT "key", version, text FROM entries')


class ServersTable(Table):
    def restart(self):
        SERVERS[self.url].restart()


def table(database, options, request, folder):
    if database in ("duckdb", "sqlite"):
        return Table(f"{database}:///{folder}/entries.db", DatabaseSink, **options)
    if database == "another":  # as any database whose transactions are not known; this one keeps them
        url = request.getfixturevalue("postgres").replace("postgresql:", "postgresql+psycopg:")
        return Table(url, DatabaseSink, **options, delivery_guarantee=DeliveryGuarantee.AT_LEAST_ONCE)
    url = request.getfixturevalue(database)
    SERVERS[url] = request.getfixturevalue(f"{database}_server")
    return ServersTable(url, PostgresSink if database == "postgres" else DatabaseSink, **options)


@pytest.mark.spark
@pytest.mark.rotates("kits")
@pytest.mark.parametrize(("database", "mode", "check"), product(DATABASES, MODES, (check_epochs, check_partitions)))
def test_nothing_is_lost_and_nothing_is_there_twice_whoever_is_killed(request, server, tmp_path, database, mode, check):
    target = table(database, MODES[mode], request, tmp_path)
    faults = check(target, server, SEED, KILLS)
    assert faults.kills >= KILLS
    assert not NIGHTLY or (faults.zombies and (faults.restarts or type(target) is Table))
    if database == "postgres":
        write(PostgresSink("after", target.url), [(1, "another table")], record=tuple[int, str])
        assert staging_tables(target.url) == []
