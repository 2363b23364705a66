"""PostgreSQL, against Spark's JDBC connector: a million rows of four columns.

Appended exactly-once against the JDBC writer with `reWriteBatchedInserts`, which promises nothing; read in one snapshot
against the partitioned JDBC reader, which has none; and the commit of an epoch of a thousand upserts.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import psycopg
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.bars import Bar, Measurement, Options
from dagster_unified.connectors import PostgresSink, PostgresSource
from dagster_unified.connectors.protocol.commits import Commit, WriteAttempt, WriteIdentity, WriterTask
from dagster_unified.engine import session
from dagster_unified.engine.commit import SinkCommits, WriteContext
from dagster_unified.engine.dataframe.passes import small_rows
from dagster_unified.engine.shipping import by_value_afresh
from dagster_unified.records import record_type
from tests.servers.postgres import PostgresServer, folder_of_programs

ROWS = 1_000_000
EPOCHS, UPSERTS = 60, 1_000
DRIVER = "org.postgresql:postgresql:42.7.4"
JARS = Path(sys.prefix) / "spark-jdbc"
COLUMNS = "(id bigint, name text, x float8, at timestamptz)"


class Flight(NamedTuple):
    id: int
    name: str
    x: float
    at: datetime


def measure(options: Options) -> tuple[list[Bar], list[Measurement]]:
    programs = folder_of_programs()
    if programs is None:
        raise RuntimeError("no PostgreSQL server here (Debian: apt-get install postgresql)")
    server = PostgresServer(programs).start()
    try:
        rates = _against_jdbc(server, options.rounds)
        milliseconds = _commit_milliseconds(server.url())
    finally:
        server.remove()
    best = {m.name: m.best for m in rates}
    return [
        Bar("connectors.postgres_append_vs_jdbc", best["PostgreSQL append"] / best["JDBC append"], 1.0),
        Bar("connectors.postgres_read_vs_jdbc", best["PostgreSQL read"] / best["JDBC read"], 0.9),
        Bar("connectors.postgres_upsert_commit_ms", milliseconds, 80, at_most=True),
    ], rates


def _against_jdbc(server: PostgresServer, rounds: int) -> list[Measurement]:
    spark = session.start("local[2]", config={"spark.driver.memory": "3g", "spark.jars": driver()})
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        try:
            rows = _rows(spark, folder)
            variants: dict[str, Callable[[], object]] = {
                "PostgreSQL append": lambda: _append(rows, server.url()),
                "JDBC append": lambda: _jdbc_append(rows, server),
                "PostgreSQL read": lambda: _read(spark, server.url()),
                "JDBC read": lambda: _jdbc_read(spark, server),
            }
            seconds: dict[str, list[float]] = {name: [] for name in variants}
            for number in range(rounds + 1):  # the first round warms up
                for name, run in variants.items():
                    _emptied(server.url())
                    begun = time.perf_counter()
                    run()
                    if number:
                        seconds[name].append(time.perf_counter() - begun)
                    _check(server.url(), name)
        finally:
            spark.stop()
    return [
        Measurement(name, ROWS / min(taken) / 1e6, tuple(round(ROWS / one / 1e6, 3) for one in taken))
        for name, taken in seconds.items()
    ]


def _rows(spark: SparkSession, folder: str) -> DataFrame:
    numbers = spark.range(0, ROWS, 1, 2)
    name = F.concat(F.lit("aircraft-"), F.col("id") % 5000)
    made = numbers.select(
        "id", name.alias("name"), (F.col("id") * 0.5).alias("x"), F.timestamp_micros("id").alias("at")
    )
    made.write.mode("overwrite").parquet(f"{folder}/rows")
    return spark.read.parquet(f"{folder}/rows")


def _append(rows: DataFrame, url: str) -> None:
    sink: PostgresSink[Any] = PostgresSink("written", url).bound_to(record_type(Flight))
    with closing(SinkCommits(sink)) as commits, small_rows(rows.sparkSession):  # as in a stage of BATCH
        identity = WriteIdentity("bench", "written", f"run-{uuid4().hex}")
        commits.write(rows, [WriteContext(identity, "stage", ship=by_value_afresh)])


def _read(spark: SparkSession, url: str) -> None:
    _unkept(PostgresSource("flights", Flight, url, parallelism=2).read(spark))


def _jdbc(server: PostgresServer, table: str, parameters: str = "") -> dict[str, str]:
    return {
        "url": f"jdbc:postgresql://127.0.0.1:{server.port}/postgres{parameters}",
        "user": "postgres",
        "dbtable": table,
        "driver": "org.postgresql.Driver",
    }


def _jdbc_append(rows: DataFrame, server: PostgresServer) -> None:
    options = _jdbc(server, "written", "?reWriteBatchedInserts=true")
    rows.write.format("jdbc").options(**options, batchsize="10000").mode("append").save()


def _jdbc_read(spark: SparkSession, server: PostgresServer) -> None:
    ranges = {"partitionColumn": "id", "lowerBound": "0", "upperBound": str(ROWS), "numPartitions": "2"}
    options = {**_jdbc(server, "flights"), **ranges, "fetchsize": "50000"}
    _unkept(spark.read.format("jdbc").options(**options).load())


def _unkept(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def _emptied(url: str) -> None:
    """A table to write to, and one to read from."""
    with psycopg.connect(url, autocommit=True) as client:
        client.execute(f"CREATE TABLE IF NOT EXISTS written {COLUMNS}".encode())
        client.execute("TRUNCATE written")
        if client.execute("SELECT to_regclass('flights')").fetchone() == (None,):
            client.execute(f"CREATE TABLE flights {COLUMNS}".encode())
            client.execute(
                f"INSERT INTO flights SELECT n, 'aircraft-' || n % 5000, n * 0.5, to_timestamp(n / 1e6)"
                f" FROM generate_series(0, {ROWS - 1}) n".encode()
            )
            client.execute("VACUUM ANALYZE flights")
        client.execute("CHECKPOINT")


def _check(url: str, name: str) -> None:
    if "append" in name:
        with psycopg.connect(url) as client:
            found = client.execute("SELECT count(*), sum(id), count(DISTINCT name) FROM written").fetchone()
        if found != (ROWS, ROWS * (ROWS - 1) // 2, 5000):
            raise AssertionError(f"{name} wrote {found}")


def _commit_milliseconds(url: str) -> float:
    """The median of what the commit of an epoch of upserts takes, in a table of a million rows."""
    with psycopg.connect(url, autocommit=True) as client:
        client.execute("CREATE TABLE held AS SELECT * FROM flights")
        client.execute("ALTER TABLE held ADD PRIMARY KEY (id)")
    sink: PostgresSink[Any] = PostgresSink("held", url, mode="upsert", key="id").bound_to(record_type(Flight))
    taken = []
    with closing(sink.committer(sink.records.schema)) as committer:
        for epoch in range(EPOCHS):
            first = epoch * UPSERTS // 2  # half of them are there
            records = [Flight(ROWS - n + first, "changed", 0.0, datetime(2024, 1, 1)) for n in range(UPSERTS)]
            attempt = WriteAttempt(WriteIdentity("bench", "held", "job", epoch=epoch), uuid4().hex, "stage")
            committer.begin([attempt])
            with closing(sink.writer(WriterTask(attempt, 0, 0))) as writer:
                writer.write(sink.records.to_batch(records))
                staged = list(writer.prepare_commit())
            begun = time.perf_counter()
            committer.commit([Commit(attempt, staged)])
            taken.append(time.perf_counter() - begun)
            committer.clean_up([attempt], True)
    return statistics.median(taken[5:]) * 1000


def driver() -> str:
    """The JDBC driver, from Maven Central."""
    if not list(JARS.glob("*.jar")):
        command = ["mvn", "-q", "dependency:copy", f"-Dartifact={DRIVER}", f"-DoutputDirectory={JARS}"]
        subprocess.run(command, check=True, cwd=os.sep)
    return ",".join(map(str, JARS.glob("*.jar")))
