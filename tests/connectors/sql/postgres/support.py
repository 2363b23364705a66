"""Writes to a PostgreSQL sink as the engine does, with the tasks in this process instead of Spark's."""

from contextlib import ExitStack, closing

import msgspec
import psycopg

from dagster_unified.connectors.protocol.commits import WriteIdentity, WriterTask
from dagster_unified.engine.commit import SinkCommits, WriteContext
from dagster_unified.records import record_type


class LocalCommits(SinkCommits):
    """The engine's commits of a sink, given the records of each task instead of a DataFrame."""

    def __init__(self, sink, record):
        records = record_type(record)
        super().__init__(_staged_here(sink.bound_to(records)))

    def _open(self, frame):
        if self._committer is None:
            self._committer = self.sink.committer(self.sink.records.schema)
        return self._committer


def _staged_here(sink):
    sink.stage = lambda tasks, attempts, ship: [stage(sink, tasks, attempt) for attempt in attempts]
    return sink


def stage(sink, tasks, attempt, retry=0):
    """The committables of an attempt, whose tasks have these records."""
    found = []
    for number, records in enumerate(tasks):
        with ExitStack() as opened:
            writer = opened.enter_context(closing(sink.writer(WriterTask(attempt, number, retry))))
            for first in range(0, len(records), 10_000):
                writer.write(sink.records.to_batch(records[first : first + 10_000]))
            found += [msgspec.msgpack.encode(committable) for committable in writer.prepare_commit()]
    return [msgspec.msgpack.decode(encoded, type=sink.committable) for encoded in found]


def identity(execution="run", partition="all", uid="sink", **more):
    return WriteIdentity("p", uid, execution, partition, **more)


def write(sink, *tasks, record=None, before_commit=lambda: None, **who):
    """The result of one write by a job of its own."""
    first = next(task[0] for task in tasks if task) if record is None else None
    with closing(LocalCommits(sink, record or type(first))) as commits:
        (result,) = commits.write(tasks, [WriteContext(identity(**who), "stage", before_commit)])
    return result


def rows(url, query):
    with psycopg.connect(url) as connection:
        return connection.execute(query).fetchall()


def execute(url, *statements):
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


def staging_tables(url, schema="dagster_unified"):
    found = rows(url, f"SELECT tablename FROM pg_tables WHERE schemaname = '{schema}' AND tablename <> 'commits'")
    return [name for (name,) in found]
