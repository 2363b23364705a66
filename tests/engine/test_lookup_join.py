"""Lookups in a small table, and a table that changes.

Catalyst's broadcast join in both modes, against what the harness gives.
"""

import itertools
import os
import subprocess
import sys
import time
from functools import partial
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from upath import UPath

from dagster_unified.api import Pipeline
from dagster_unified.connectors import CollectionSource, CsvSource, DeltaSink, FileSink, ParquetSource, RateSource
from dagster_unified.engine import connect_server
from dagster_unified.engine.events import EpochCommitted
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.engine.streaming.sources import LookupTables
from dagster_unified.errors import PipelineError, RecordTypeError
from dagster_unified.testing import run_pipeline
from tests.orchestration.test_connect_server import port_without_server
from tests.support import MODES, committed


class Flight(NamedTuple):
    n: int
    origin: str | None


class Airport(NamedTuple):
    faa: str
    name: str
    lat: float


class Located(NamedTuple):
    n: int
    name: str | None
    lat: float | None


class Found(NamedTuple):
    name: str
    n: int


FLIGHTS = [Flight(1, "JFK"), Flight(2, "XXX"), Flight(3, None), Flight(4, "LGA")]
AIRPORTS = [Airport("JFK", "Kennedy", 40.6), Airport("LGA", "La Guardia", 40.7), Airport("LGA", "again", 0.0)]
LOCATED = [(1, "Kennedy", 40.6), (2, None, None), (3, None, None), (4, "La Guardia", 40.7), (4, "again", 0.0)]


def table(records=AIRPORTS):
    return CollectionSource(records, Airport, "airports")


def located(stream, source=None):
    return stream.lookup_join(source or table(), {"origin": "faa"}, {"name": "name", "lat": "lat"}, Located)


def test_the_harness_and_batch_join_alike(run_on_spark, spark, tmp_path):
    def build(sink):
        pipeline = Pipeline("p")
        sink(located(pipeline.from_collection(FLIGHTS, Flight)), "left")
        sink(
            pipeline.from_collection(FLIGHTS, Flight, "others").lookup_join(
                table(), {"origin": "faa"}, {"name": "name"}, Found, how="inner"
            ),
            "inner",
        )
        return pipeline

    pipeline = build(lambda s, name: s.print(name))
    inner = [("Kennedy", 1), ("La Guardia", 4), ("again", 4)]
    for mode in ("BATCH", "STREAMING"):
        result = run_pipeline(pipeline, mode).sinks
        assert sorted(result["left"], key=str) == sorted(LOCATED, key=str)
        assert sorted(result["inner"]) == inner
    run_on_spark(build(lambda s, name: s.sink_to(FileSink(str(tmp_path / name), name=name))))
    assert sorted(map(str, map(tuple, spark.read.parquet(str(tmp_path / "left")).collect()))) == sorted(
        map(str, LOCATED)
    )
    assert sorted(map(tuple, spark.read.parquet(str(tmp_path / "inner")).collect())) == inner


class Point(NamedTuple):
    n: int
    lat: float | None


@pytest.mark.a_day(1)
@MODES
def test_nan_is_no_key_of_a_lookup(run_in, mode):
    """Spark holds it equal to itself, and keyed operators refuse it."""
    pipeline = Pipeline("p")
    points = pipeline.from_collection([Point(1, 40.6), Point(2, None), Point(3, float("nan"))], Point)
    points.lookup_join(table(), {"lat": "lat"}, {"name": "name"}, Found, how="inner").name("near").print()
    words = (
        r"p: .*operator 'near': the key 'lat' is nan, which equals nothing; filter such records out before lookup_join"
    )
    for run in (run_in[mode], lambda harnessed: run_pipeline(harnessed, mode)):
        with pytest.raises(RecordTypeError, match=words):
            run(pipeline)


def rows(path):
    return sorted((tuple(r.values()) for r in DeltaTable(str(path)).to_pyarrow_table().to_pylist()), key=str)


PLACES = ("at the source", "before a key", "between keys", "at the sink")


def test_streaming_joins_wherever_it_stands(run_on_spark, run_streaming, tmp_path):
    def placed(pipeline, place):
        stream = pipeline.from_collection(FLIGHTS, Flight, f"flights {place}")
        if place != "at the source":
            stream = stream.map(lambda f: f, Flight)
        if place in ("between keys", "at the sink"):
            stream = stream.key_by("n").reduce(lambda a, b: b)
        stream = located(stream)
        return stream if place == "at the sink" else stream.key_by("n").reduce(lambda a, b: min(a, b))

    for mode, run in (("batch", run_on_spark), ("streaming", run_streaming)):
        pipeline = Pipeline("p")
        for place in PLACES:
            placed(pipeline, place).sink_to(DeltaSink(str(tmp_path / mode / place), mode="append", name=place))
        run(pipeline)
    for place in PLACES:
        batch, found = rows(tmp_path / "batch" / place), rows(tmp_path / "streaming" / place)
        assert (
            [r for r in found if r[0] != 4]
            == [r for r in batch if r[0] != 4]
            == sorted((r for r in LOCATED if r[0] != 4), key=str)
        )
        assert {r for r in found if r[0] == 4} >= {r for r in batch if r[0] == 4}


def written(path, folder, number, records):
    (path / folder).mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist([r._asdict() for r in records]), path / folder / f".{number}")
    os.rename(path / folder / f".{number}", path / folder / f"{number}.parquet")


@pytest.mark.a_day(1)
@pytest.mark.parametrize("keyed", [True, False])
def test_a_table_that_changes_is_seen_by_the_micro_batches_after(spark, tmp_path, monkeypatch, keyed):
    write = partial(written, tmp_path)
    write("airports", 0, AIRPORTS[:1])
    write("flights", 0, [Flight(1, "JFK"), Flight(2, "LGA")])
    pipeline = Pipeline("p")
    stream = located(
        pipeline.from_source(ParquetSource(str(tmp_path / "flights"), Flight, monitor=True)),
        ParquetSource(str(tmp_path / "airports"), Airport),
    )
    stream = stream.key_by("n").reduce(lambda a, b: b) if keyed else stream
    stream.sink_to(DeltaSink(str(tmp_path / "out"), mode="append", name="out"))
    epochs: list[EpochCommitted] = []
    job = StreamingJob(
        pipeline.plan({"execution.checkpointing.dir": str(tmp_path / "checkpoints")}),
        spark,
        Start("one"),
        committed(epochs),
    )
    listed = []
    refresh = LookupTables.refresh

    def listening(tables):
        refresh(tables)
        listed.append((tmp_path / "airports/1.parquet").exists())

    monkeypatch.setattr(LookupTables, "refresh", listening)
    changed, asked = [], []

    def stopped():
        if not changed and sum(e.rows_in for e in epochs) >= 2:
            changed.append(write("airports", 1, AIRPORTS[1:2]))
        if not asked and any(listed):
            asked.append(write("flights", 1, [Flight(3, "LGA")]))
        return sum(e.rows_in for e in epochs) >= 3

    job.run(stopped)
    assert rows(tmp_path / "out") == [(1, "Kennedy", 40.6), (2, None, None), (3, "La Guardia", 40.7)]
    assert not [table.name for table in spark.catalog.listTables() if table.name.startswith("lookup_")]


@pytest.mark.spark
@pytest.mark.rotates("clusters")
def test_a_table_that_changes_is_seen_through_connect_also_by_a_job_that_goes_on_with_the_query(tmp_path):
    numbers = itertools.count(1)

    def until_found(job, origin, name):
        """A flight after another, until one has found a table's new row."""
        end = time.monotonic() + 240
        table = tmp_path / "out"
        while not (table / "_delta_log").exists() or name not in {row[1] for row in rows(table)}:
            assert job.poll() is None, job.communicate()
            assert time.monotonic() < end
            number = next(numbers)
            written(tmp_path, "flights", number, [Flight(number, origin)])
            time.sleep(0.5)

    written(tmp_path, "airports", 0, AIRPORTS[:1])
    written(tmp_path, "flights", 0, [Flight(0, "JFK"), Flight(-1, "LGA")])
    with port_without_server() as port:
        address = connect_server.ensure(port, "local[2]", {"spark.sql.shuffle.partitions": "2"})
        command, pipe = [sys.executable, "-m", "tests.engine.lookup_job", str(tmp_path)], subprocess.PIPE
        environment = {**os.environ, "SPARK_REMOTE": address}
        killed = subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)
        try:
            until_found(killed, "JFK", "Kennedy")
            assert (-1, None, None) in rows(tmp_path / "out")
            written(tmp_path, "airports", 1, AIRPORTS[1:2])
            until_found(killed, "LGA", "La Guardia")
        finally:
            killed.kill()
        job = subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)
        try:
            written(tmp_path, "airports", 2, [Airport("EWR", "Newark", 40.7)])
            until_found(job, "EWR", "Newark")
            (tmp_path / "stop").touch()
            assert job.communicate(timeout=120)[0].splitlines() == ["goes on with main", "views []"]
        finally:
            job.kill()


def test_listing_files_again_leaves_what_is_cached(spark, tmp_path):
    computed = tmp_path / "computed"

    def noted(batches):
        for batch in batches:
            with computed.open("a") as file:
                file.write(f"{batch.num_rows}\n")
            yield batch

    written(tmp_path, "airports", 0, AIRPORTS[:1])
    table = spark.read.parquet(str(tmp_path / "airports"))
    cached = table.mapInArrow(noted, table.schema).persist()
    try:
        assert cached.count() == 1
        tables = LookupTables(spark, UPath(tmp_path), "main", 1)
        read = tables(table)
        written(tmp_path, "airports", 1, AIRPORTS[1:2])
        tables.refresh()
        assert cached.count() == 1
        assert computed.read_text() == "1\n"
    finally:
        cached.unpersist()
    assert read.count() == 2
    tables.drop()


def test_a_table_of_one_query_is_not_that_of_another(spark, tmp_path):
    """A job that is stopped leaves the tables of others, and one that starts anew does not find an earlier one's."""

    def tables(name):
        return LookupTables(spark, UPath(tmp_path), name, 1)

    first, other, again = tables("main"), tables("other"), tables("main")
    first(spark.range(1)), other(spark.range(2))
    assert again(spark.range(3)).count() == 3
    again.drop()
    other.refresh()
    other.drop()
    assert not [table.name for table in spark.catalog.listTables() if table.name.startswith("lookup_")]


class Origin(NamedTuple):
    origin: str
    name: str


class Strict(NamedTuple):
    n: int
    name: str


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"on": "origin"}, PipelineError, "table 'airports': no field 'origin'"),
        ({"on": {"org": "faa"}}, PipelineError, "no field 'org' in .*did you mean 'origin'"),
        ({"on": {"n": "faa"}}, RecordTypeError, "field 'n' is a int64 and the table's 'faa' a string"),
        ({"on": {}}, PipelineError, "on is a field that both have"),
        ({"on": ["origin"]}, PipelineError, "on is a field that both have"),
        ({"columns": {"n": "name"}}, PipelineError, "the stream has a field 'n' already"),
        ({"columns": {"named": "name"}}, RecordTypeError, "field 'named' is not in output_type"),
        ({"columns": ["name"]}, PipelineError, r"columns= says which .* and is \['name'\]"),
        ({}, PipelineError, "no field 'lat'"),
        (
            {"output_type": Strict},
            RecordTypeError,
            "field 'name' is None where nothing is found.*or use how='inner'",
        ),
        (
            {"columns": {"name": "lat"}, "output_type": Strict},
            RecordTypeError,
            "field 'name' is a double, and output_type says string",
        ),
        (
            {"output_type": Origin, "how": "inner"},
            RecordTypeError,
            "field 'origin' may be None before, and output_type does not allow that",
        ),
        ({"table": RateSource(1, "r")}, PipelineError, "expected a bounded source"),
        (
            {"table": CsvSource("/tmp/x.csv", Airport, on_malformed="drop"), "columns": {}, "output_type": Flight},
            PipelineError,
            "use on_malformed='fail'",
        ),
    ],
)
def test_errors_while_the_graph_is_built(changed, error, message):
    stream = Pipeline("p").from_collection(FLIGHTS, Flight)
    given = {"table": table(), "on": {"origin": "faa"}, "columns": {"name": "name"}, "output_type": Located, **changed}
    with pytest.raises(error, match=rf"operator 'lookup_join': .*{message}"):
        stream.lookup_join(**given)


def test_a_dict_is_not_looked_up():
    class Tagged(NamedTuple):
        tags: dict[str, int]
        name: str

    stream = Pipeline("p").from_collection([], Tagged)
    with pytest.raises(PipelineError, match="operator 'lookup_join': field 'tags' has a dict, which Spark does not"):
        stream.lookup_join(CollectionSource([], Tagged, "t"), "tags", {"named": "name"}, Located)
