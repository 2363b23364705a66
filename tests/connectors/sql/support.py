"""Real databases: what is asked of them beside the library, and what a source reads of them without Spark."""

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import duckdb
import psycopg

from dagster_unified.connectors import DatabaseSink, DatabaseSource, DeliveryGuarantee, PostgresSink, PostgresSource
from dagster_unified.connectors.protocol.frame import Malformed
from tests.servers.mariadb import connected


def opened(url):
    """A connection that commits each statement by itself where the database has that."""
    kind, _, path = url.partition(":///")
    if kind.startswith("postgresql"):
        return closing(psycopg.connect(url.replace("+psycopg", ""), autocommit=True))
    if kind.startswith(("mariadb", "mysql")):
        return closing(connected(url))
    return closing((duckdb if kind == "duckdb" else sqlite3).connect(path))


def rows(url, query):
    with opened(url) as database, closing(database.cursor()) as cursor:
        cursor.execute(query)
        return list(cursor.fetchall())


def execute(url, *statements):
    with opened(url) as database, closing(database.cursor()) as cursor:
        for statement in statements:
            cursor.execute(statement)
        database.commit()


def staging_tables(url, schema="dagster_unified"):
    found = rows(url, f"SELECT tablename FROM pg_tables WHERE schemaname = '{schema}' AND tablename <> 'commits'")
    return [name for (name,) in found]


def planned(source):
    """The splits of a BATCH run."""
    reading = source.with_fixed_range()
    if isinstance(source, PostgresSource):
        reading._in_snapshot = True
    return reading.splits(reading._range.start, reading._range.end)


def read(source, splits):
    """The records of splits, and what is malformed."""
    found = []
    for split in splits:
        for batch in source.read_split(split):
            found += [batch] if isinstance(batch, Malformed) else source.records.from_batch(batch)
    return found


def everything(source):
    return read(source, planned(source))


class Sale(NamedTuple):
    id: int
    order: str
    amount: float | None = None


MANY = [Sale(n, f"shop {n % 100}", n / 2) for n in range(20_000)]
"""More than travel with a committable, so that they are staged in a table or in files."""


@dataclass(frozen=True)
class Database:
    """A real database, as the library's connectors for it know it."""

    url: str
    sink_kind: type[DatabaseSink] | type[PostgresSink] = DatabaseSink
    exactly_once: bool = True

    @property
    def is_postgres(self):
        return self.sink_kind is PostgresSink

    def sink(self, table="sales", **given):
        if not self.exactly_once:
            given["delivery_guarantee"] = DeliveryGuarantee.AT_LEAST_ONCE
        return self.sink_kind(table, self.url, **given)

    def source(self, table, record, **given):
        return (PostgresSource if self.is_postgres else DatabaseSource)(table, record, self.url, **given)

    def rows(self, query="SELECT * FROM sales ORDER BY id"):
        return rows(self.url, query)

    def left(self):
        """What is staged and was not removed."""
        return staging_tables(self.url) if self.is_postgres else []
