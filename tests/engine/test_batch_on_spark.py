"""BATCH on Spark: equals the harness, ships user code, and what bad input leads to."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagster_unified.api import (
    OutputTag,
    Pipeline,
    ProcessFunction,
    WatermarkStrategy,
)
from dagster_unified.api import functions as F
from dagster_unified.connectors import CsvSource, DeltaSink, FileSink, ForeachSink, JsonSource, ParquetSource
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.malformed import in_batch
from dagster_unified.errors import MalformedInputError, PipelineError, RecordTypeError, UserFunctionError
from dagster_unified.graph.nodes import SourceNode
from dagster_unified.testing import run_pipeline
from tests.depth import examples
from tests.engine.test_streaming_parity import KEYED, STATELESS, Gaps
from tests.support import MODES, Event, run_stages


class Total(NamedTuple):
    key: str
    total: int
    count: int


def event_time(pipeline, events):
    strategy = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(seconds=10)).with_timestamp_assigner("at")
    return pipeline.from_collection(events, Event, "events").assign_timestamps_and_watermarks(strategy)


ALARM = OutputTag("alarm", str)


def by_value(event: Event) -> tuple[str, bool]:
    return (event.key, event.value % 2 == 0)


def add(a: Event, b: Event) -> Event:
    return Event(a.key, max(a.at, b.at), a.value + b.value)


OPERATIONS = {
    **STATELESS,
    "rebalance": lambda s: s.rebalance(),
    "gaps": KEYED["gaps"],
    "batches by key": KEYED["since"],
    "max_by": lambda s: s.key_by("key").max_by("at"),
    "reduce": lambda s: s.key_by("key").reduce(add),
    "computed key": lambda s: s.key_by(by_value).reduce(add),
}


def collected(spark, folder):
    return Counter(tuple(r) for r in spark.read.parquet(str(folder)).collect())


@settings(max_examples=examples(4), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    operations=st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=4),
    # No two events of a key at one time: their order would not be defined.
    events=st.lists(
        st.builds(Event, st.sampled_from("abc"), st.integers(0, 300), st.integers(0, 9)),
        max_size=20,
        unique_by=lambda e: (e.key, e.at),
    ),
    mode=st.sampled_from(["ALL_EDGES_BLOCKING", "ALL_EXCHANGES_BLOCKING", "ALL_EXCHANGES_PIPELINED"]),
)
def test_batch_on_spark_equals_the_harness(spark, tmp_path, operations, events, mode):
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    pipeline = Pipeline("generated")
    stream = event_time(pipeline, events)
    for name in operations:
        stream = OPERATIONS[name](stream)
    stream.map(lambda e: e, Event).sink_to(FileSink(str(folder / "out"), name="out"))
    run_stages(pipeline.plan({"execution.batch-shuffle-mode": mode}), spark, folder)
    assert collected(spark, folder / "out") == Counter(map(tuple, run_pipeline(pipeline, "BATCH").only()))


def test_a_stage_with_side_outputs_and_two_sinks_materializes_once(spark, run_on_spark, tmp_path):
    class Split(ProcessFunction):
        def process_element(self, value: Event, ctx) -> Iterable[Event]:
            ctx.output(ALARM, value.key) if value.value > 5 else None
            yield value

    pipeline = Pipeline("fan_out")
    main = event_time(pipeline, [Event("a", 1, 1), Event("b", 2, 9)]).process(Split()).name("split")
    main.sink_to(FileSink(str(tmp_path / "all"), name="all"))
    main.get_side_output(ALARM).sink_to(FileSink(str(tmp_path / "alarms"), name="alarms"))
    main.key_by("key").agg(F.sum("value").alias("total"), F.count("*").alias("count"), output_type=Total).sink_to(
        FileSink(str(tmp_path / "totals"), name="totals")
    )
    first, last = run_on_spark(pipeline)
    assert [s.rows for s in first.streams] == [2, 1]
    assert (last.rows, set(first.sinks)) == (2, {"all", "alarms"})
    assert collected(spark, tmp_path / "all") == Counter([("a", 1, 1), ("b", 2, 9)])
    assert collected(spark, tmp_path / "alarms") == Counter([("b",)])
    assert collected(spark, tmp_path / "totals") == Counter([("a", 1, 1), ("b", 9, 1)])


def test_empty_input_gives_empty_output(spark, run_on_spark, tmp_path):
    pipeline = Pipeline("empty")
    event_time(pipeline, []).key_by("key").process(Gaps()).key_by(by_value).reduce(add).sink_to(
        FileSink(str(tmp_path / "out"), name="out")
    )
    assert [m.rows for m in run_on_spark(pipeline)] == [0, 0, 0]
    assert collected(spark, tmp_path / "out") == Counter()


def test_exchanges_keep_all_records_broadcast_multiplies_them_and_partition_custom_places_them(
    spark, run_on_spark, tmp_path
):
    class Where(ProcessFunction):
        def open(self, context):
            self.here = context.get_index_of_this_subtask()

        def process_element(self, value, ctx) -> Iterable[tuple[int, int]]:
            yield value, self.here

    pipeline = Pipeline("exchange")
    numbers = pipeline.from_collection(list(range(50)))
    custom = numbers.partition_custom(lambda key, n: (key * 7) % n, lambda v: v, key_type=int)
    custom.process(Where()).set_parallelism(4).sink_to(FileSink(str(tmp_path / "custom"), name="custom"))
    exchanges = {"rebalance": 3, "shuffle": 3, "rescale": 3, "global_": 1, "broadcast": 3}
    for name, partitions in exchanges.items():
        same = getattr(numbers, name)().map_batches(
            lambda b: pa.RecordBatch.from_arrays([b.column(0)], names=["value"]), int
        )
        same.set_parallelism(partitions).sink_to(FileSink(str(tmp_path / name), name=name))
    run_on_spark(pipeline)
    for name in exchanges:
        copies = 3 if name == "broadcast" else 1
        assert collected(spark, tmp_path / name) == Counter({(n,): copies for n in range(50)})
    assert collected(spark, tmp_path / "custom") == Counter({(n, (n * 7) % 4): 1 for n in range(50)})


def test_a_function_that_raises_is_named_with_stage_operator_line_and_record(run_on_spark, tmp_path):
    def halve(event: Event) -> Event:
        return Event(event.key, event.at, event.value // 0)

    pipeline = Pipeline("failing")
    event_time(pipeline, [Event("a", 1, 1)]).map(halve).sink_to(FileSink(str(tmp_path / "out"), name="out"))
    with pytest.raises(UserFunctionError) as caught:
        run_on_spark(pipeline)
    message = str(caught.value)
    assert message.startswith(
        "failing: stage 'out', operator 'halve': ZeroDivisionError: integer division or modulo by zero, at "
    )
    assert f"{__file__}:" in message
    assert message.endswith("in halve, on Event(key='a', at=1, value=1)")


class Row(NamedTuple):
    name: str
    size: int
    note: str | None


def csv(tmp_path, on_malformed):
    file = tmp_path / "rows.csv"
    file.write_text("name,size,note\na,1,x\nb,many,y\nc,3,\n")
    pipeline = Pipeline("files")
    pipeline.from_source(CsvSource(str(file), Row, on_malformed=on_malformed)).sink_to(
        FileSink(str(tmp_path / "out"), name="out")
    )
    return pipeline


def test_a_malformed_row_fails_the_run_with_file_and_line(run_on_spark, tmp_path):
    with pytest.raises(MalformedInputError, match=r"source 'rows': .*rows\.csv, line 3: .*: b,many,y; fix the file"):
        run_on_spark(csv(tmp_path, "fail"))


@pytest.mark.parametrize(
    ("on_malformed", "counter"), [("drop", "malformed rows dropped"), ("divert", "malformed rows diverted")]
)
def test_malformed_rows_are_dropped_or_diverted_and_counted(spark, run_on_spark, tmp_path, on_malformed, counter):
    (manifest,) = run_on_spark(csv(tmp_path, on_malformed))
    assert collected(spark, tmp_path / "out") == Counter([("a", 1, "x"), ("c", 3, None)])
    assert manifest.counters == {counter: 1}
    pipeline = csv(tmp_path, on_malformed).plan()
    (source,) = [n for n in pipeline.graph.nodes if isinstance(n, SourceNode)]
    kept = in_batch(IntermediateStore(str(tmp_path / "store")), "files", source)
    row = {"partition": "all", "file": f"{tmp_path}/rows.csv", "line": 3, "content": "b,many,y"}
    found = [{k: v for k, v in r.items() if k != "reason"} for r in kept.table(9).to_pylist()]
    assert (kept.rows(), found) == ((1, [row]) if on_malformed == "divert" else (0, []))


def test_a_diverted_row_says_its_line_and_a_run_without_any_leaves_none(run_on_spark, tmp_path):
    pipeline = csv(tmp_path, "divert")
    source = pipeline.graph().node(0)
    kept = in_batch(IntermediateStore(str(tmp_path / "store")), "files", source)
    (tmp_path / "rows.csv").write_text('name,size,note\na,b,x\na,1,x\n"c",,\nd,,007\na,b,x\n')
    (manifest,) = run_on_spark(pipeline)
    assert sorted((r["line"] or 0, r["content"]) for r in kept.table(9).to_pylist()) == [
        (2, "a,b,x"),
        (4, '"c",,'),
        (5, "d,,007"),
        (6, "a,b,x"),
    ]
    assert manifest.diverted == {source.uid: 4}
    (tmp_path / "rows.csv").write_text("name,size,note\na,1,x\n")
    (manifest,) = run_on_spark(pipeline)
    assert (manifest.diverted, kept.rows(), kept.table(9).num_rows) == ({source.uid: 0}, 0, 0)


def test_a_null_key_is_an_error_that_shows_the_record(run_on_spark, tmp_path):
    pipeline = Pipeline("nulls")
    rows = pipeline.from_collection([Row("a", 1, None)], Row, "rows")
    rows.key_by("note").reduce(lambda a, b: a).name("first").sink_to(FileSink(str(tmp_path / "out"), name="out"))
    with pytest.raises(RecordTypeError, match=r"operator 'first': the key 'note' is None for .*'name': 'a'"):
        run_on_spark(pipeline)


def test_a_native_null_key_is_an_error_too(run_on_spark, tmp_path):
    pipeline = Pipeline("nulls")
    rows = pipeline.from_collection([Row("a", 1, None)], Row, "rows")
    rows.key_by("note").agg(F.sum("size").alias("total"), output_type=tuple_of_note).sink_to(
        FileSink(str(tmp_path / "out"), name="out")
    )
    with pytest.raises(RecordTypeError, match="operator 'agg': a key is None"):
        run_on_spark(pipeline)


class tuple_of_note(NamedTuple):
    note: str
    total: int


def test_both_modes_read_the_same_of_the_names_of_folders(spark, run_on_spark, run_streaming, tmp_path):
    names = ["a/b", "a+b", "a b", "ü", "100%", "a=b"]
    rows = [(name, number) for number, name in enumerate(names)]
    spark.createDataFrame(rows, "name string, size long").write.partitionBy("name").json(str(tmp_path / "in"))
    for run, mode in ((run_on_spark, "BATCH"), (run_streaming, "STREAMING")):
        pipeline = Pipeline("named")
        source = pipeline.from_source(JsonSource(str(tmp_path / "in"), Row, name="in"))
        source.sink_to(FileSink(str(tmp_path / mode), name="out"))
        run(pipeline)
        found = spark.read.parquet(str(tmp_path / mode)).select("name", "size").collect()
        assert sorted(map(tuple, found)) == sorted(rows)


@pytest.mark.parametrize("line", ['{"name": "a"}{"name": "b"}', '{"name": "a"}, {"name": "b"}', '{"name": "a"} and'])
def test_json_with_several_objects_on_its_first_line_is_an_error(run_on_spark, tmp_path, line):
    (tmp_path / "in.json").write_text(f"{line}\n")
    pipeline = Pipeline("lines")
    pipeline.from_source(JsonSource(str(tmp_path / "in.json"), Row)).print()
    with pytest.raises(PipelineError, match=r"the first line of .*in\.json goes on behind its first object, with '"):
        run_on_spark(pipeline)


@pytest.mark.a_day(1)
@MODES
def test_files_beside_folders_that_tell_columns_are_an_error(run_in, tmp_path, mode):
    (tmp_path / "in/size=2").mkdir(parents=True)
    for name in ("a", "size=2/b", "size=2/c"):
        (tmp_path / f"in/{name}.json").write_text('{"name": "a", "size": 1, "note": null}\n')
    pipeline = Pipeline("mixed")
    pipeline.from_source(JsonSource(str(tmp_path / "in"), Row)).print()
    with pytest.raises(PipelineError, match=r"in/a\.json and .*in/size=2/b\.json lie in folders of different columns"):
        run_in[mode](pipeline)


def test_a_missing_file_or_column_says_so(spark, run_on_spark, tmp_path):
    pipeline = Pipeline("missing")
    pipeline.from_source(ParquetSource(str(tmp_path / "nowhere"), Row)).print()
    with pytest.raises(PipelineError, match=r"there are no files at .*nowhere"):
        run_on_spark(pipeline)
    spark.range(3).write.parquet(str(tmp_path / "ids"))
    pipeline = Pipeline("missing")
    pipeline.from_source(ParquetSource(str(tmp_path / "ids"), Row)).print()
    with pytest.raises(PipelineError, match=r"no column 'name' in .*; it has id"):
        run_on_spark(pipeline)


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import author_module
from dagster_unified.engine import session
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.engine.batch.intermediates import IntermediateStore
if len(sys.argv) > 3:
    from pyspark.sql import SparkSession
    spark = session.prepared(SparkSession.builder.remote(sys.argv[3]).getOrCreate())
else:
    spark = session.start("local[1]", config={"spark.sql.shuffle.partitions": "1"})
plan = author_module.pipeline(sys.argv[2] + "/out").plan()
run_all(Run(plan, spark, IntermediateStore(sys.argv[2] + "/store"), "run", "run"))
print(sorted(tuple(r) for r in spark.read.parquet(sys.argv[2] + "/out").collect()))
spark.stop()
"""

AUTHOR = """
from __future__ import annotations
from datetime import datetime, timezone
from typing import Iterable, NamedTuple
from dagster_unified.api import KeyedProcessFunction, Pipeline, ValueStateDescriptor
from dagster_unified.connectors import FileSink

class Visit(NamedTuple):
    who: str
    at: datetime

FACTOR = 10

def helper(n): return n * FACTOR

class Count(KeyedProcessFunction):
    def open(self, context): self.n = context.get_state(ValueStateDescriptor("last", Visit))
    def process_element(self, value: Visit, ctx) -> Iterable[tuple[str, int]]:
        self.n.update(value)
        yield self.n.value().who, helper(value.at.year)

def pipeline(out):
    p = Pipeline("shipped")
    visits = p.from_collection([Visit("x", datetime(2020, 1, 1, tzinfo=timezone.utc))], Visit)
    visits.key_by("who").process(Count()).sink_to(FileSink(out, name="out"))
    return p
"""


@pytest.mark.spark
@pytest.mark.rotates("processes")
@pytest.mark.parametrize("remote", [(), ("local[1]",)], ids=["classic", "connect"])
def test_user_code_reaches_workers_that_cannot_import_it(tmp_path, remote):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "author_module.py").write_text(AUTHOR)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "code"), str(tmp_path), *remote],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().splitlines()[-1] == "[('x', 20200)]"


class Named(NamedTuple):
    id: str
    number: int


class Number(NamedTuple):
    number: int


def named(number: Number) -> Named:
    return Named(uuid4().hex, number.number)


@pytest.mark.a_day(1)
@pytest.mark.parametrize("lost", [False, True])
def test_an_attempt_after_a_sink_has_failed_writes_what_was_computed_before(run_on_spark, tmp_path, lost):
    away, taken = tmp_path / "away", tmp_path / "taken"

    def take(row: Named) -> None:
        if away.exists():
            raise OSError("the service is away")
        with taken.open("a") as file:
            file.write(f"{row.id}\n")

    (tmp_path / "numbers.json").write_text('{"number": 1}\n{"number": 2}\n{"number": 3}\n')
    pipeline = Pipeline("ids")
    numbers = pipeline.from_source(JsonSource(f"{tmp_path}/*.json", Number, name="numbers"))
    rows = numbers.map(named).name("named")
    rows.sink_to(DeltaSink(f"{tmp_path}/table", mode="upsert" if lost else "append", key="number" if lost else ()))
    rows.sink_to(ForeachSink(take, name="service"))
    away.touch()
    with pytest.raises(UserFunctionError, match="the service is away"):
        run_on_spark(pipeline)
    away.unlink()
    (tmp_path / "later.json").write_text('{"number": 4}\n')  # which is another run's
    if lost:
        for file in (tmp_path / "store").rglob("part-*.parquet"):
            file.unlink()
    run_on_spark(pipeline)
    ids = DeltaTable(f"{tmp_path}/table").to_pyarrow_table()["id"].to_pylist()
    assert len(ids) == 3
    assert sorted(ids) == sorted(taken.read_text().split()) or lost
    assert not list((tmp_path / "store").rglob("prepared.json"))
    assert len(list((tmp_path / "store").rglob("data-*"))) == 1
