"""Local-global column aggregates on Spark: what Spark's own gives, and savepoints of both modes."""

import math
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import NamedTuple
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from dagster_unified.api import (
    KeyedProcessFunction,
    Pipeline,
    SlidingEventTimeWindows,
    TumblingEventTimeWindows,
    WatermarkStrategy,
)
from dagster_unified.api import functions as F
from dagster_unified.connectors import DeltaSink, FileSink, ParquetSource
from dagster_unified.engine.events import SavepointTaken
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.errors import RecordTypeError, StateError
from dagster_unified.records import record_type
from dagster_unified.state import Savepoint
from tests.depth import rotated
from tests.operators.support import ms
from tests.operators.test_partials import Reading
from tests.support import Event, committed, run_stages, streaming

AT = datetime(2026, 1, 1, tzinfo=UTC)


class Summary(NamedTuple):
    sensor: str
    records: int
    numbers: int
    total: int | None
    mean: float | None
    mean_price: Decimal | None
    least: int | None
    doubled: int | None
    share: float | None
    price: Decimal | None
    first: datetime | None
    label: str | None
    good: bool | None
    high: int
    ratio: float | None


COLUMNS = [
    F.count("*").alias("records"),
    F.count("number").alias("numbers"),
    F.sum("number").alias("total"),
    F.avg("number").alias("mean"),
    F.avg("price").alias("mean_price"),
    F.min("number").alias("least"),
    F.max(F.col("number") * 2 + 1).alias("doubled"),
    F.max("share").alias("share"),
    F.sum("price").alias("price"),
    F.min("at").alias("first"),
    F.max("label").alias("label"),
    F.bool_and("good").alias("good"),
    F.count_if(F.col("number") > 2).alias("high"),
    (F.sum("number") / F.count("*")).alias("ratio"),
]
READINGS = [
    Reading("a", 1, 1.5, Decimal("10.25"), AT, "x", True),
    Reading("a", None, math.nan, None, AT - timedelta(days=30_000), None, None),
    Reading("a", 5, 2.5, Decimal("0.10"), None, "é", False),
    Reading("b", None, None, None, None, None, None),
    Reading("c", 3, math.nan, Decimal("-1"), AT, "", True),
    Reading("b", None, None, None, None, None, None),
    Reading("c", 4, -1.0, Decimal("3"), AT, "z", True),
]


def rows(path):
    return sorted(map(repr, DeltaTable(str(path)).to_pyarrow_table().to_pylist()))


def stream(pipeline, spark, tmp_path, kept, **options):
    epochs = []
    options = {**streaming(tmp_path, 3), "state.native-aggregates": kept, **options}
    seen = committed(epochs)
    StreamingJob(pipeline.plan(options), spark, Start("job"), seen).run()
    return epochs


def batch(pipeline, spark, tmp_path, **options):
    plan = pipeline.plan({"execution.runtime-mode": "BATCH", "pipeline.max-parallelism": 2, **options})
    run_id = uuid4().hex
    run_stages(plan, spark, tmp_path, run_id)


def write(folder, name, table):
    folder.mkdir(exist_ok=True)
    pq.write_table(table, folder / f"{name}.parquet")


def test_every_aggregate_gives_what_sparks_own_state_gives(spark, tmp_path):
    table = pa.Table.from_pylist([r._asdict() for r in READINGS], schema=schema_of(Reading))
    for number in range(len(READINGS)):
        write(tmp_path / "in", f"{number}", table.slice(number, 1))

    def summarized(where):
        pipeline = Pipeline("p")
        readings = pipeline.from_source(ParquetSource(str(tmp_path / "in"), Reading, max_files_per_trigger=3))
        readings.key_by("sensor").agg(*COLUMNS, output_type=Summary).sink_to(
            DeltaSink(str(tmp_path / where), mode="upsert", key="sensor")
        )
        return pipeline

    for kept in ("SPARK", "PORTABLE"):
        stream(summarized(kept), spark, tmp_path / f"job {kept}", kept)
    batch(summarized("left"), spark, tmp_path, **{"execution.savepoint.path": str(tmp_path / "savepoint")})
    assert rows(tmp_path / "SPARK") == rows(tmp_path / "PORTABLE") == rows(tmp_path / "left")
    assert len(rows(tmp_path / "SPARK")) == 3


def schema_of(python):
    return record_type(python).schema


class Hour(NamedTuple):
    key: str
    window_start: datetime
    window_end: int
    total: int
    half: float


def in_windows(tmp_path, where, assigner, **source):
    pipeline = Pipeline("p")
    strategy = WatermarkStrategy.for_bounded_out_of_orderness(ms(5)).with_timestamp_assigner("at")
    events = pipeline.from_source(ParquetSource(str(tmp_path / "in"), Event, max_files_per_trigger=1, **source))
    hours = events.assign_timestamps_and_watermarks(strategy).key_by("key").window(assigner)
    columns = [F.sum("value").alias("total"), (F.sum(F.col("value") / 2)).alias("half")]
    hours.agg(*columns, output_type=Hour).uid("hours").sink_to(DeltaSink(str(tmp_path / where), mode="append"))
    return pipeline


FIRST = [Event("a", 1, 1), Event("b", 3, 2), Event("a", 12, 4)]
SECOND = [Event("a", 2, 50), Event("a", 33, 8), Event("b", 14, 16), Event("b", 25, 32)]
THIRD = [Event("a", 1, 1000), Event("b", 34, 64), Event("a", 26, 128)]


def events_in(folder, *batches, start=0):
    for number, events in enumerate(batches, start):
        write(folder, f"{number}", pa.Table.from_pylist([e._asdict() for e in events], schema=schema_of(Event)))


@pytest.mark.parametrize(
    "assigner",
    rotated([TumblingEventTimeWindows.of(ms(10)), SlidingEventTimeWindows.of(ms(10), ms(5))], 1),
    ids=lambda assigner: type(assigner).__name__,
)
def test_windows_close_and_drop_late_records_as_with_sparks_own_state(spark, tmp_path, assigner):
    events_in(tmp_path / "in", FIRST, SECOND, THIRD)
    late = {}
    for kept in ("SPARK", "PORTABLE"):
        epochs = stream(in_windows(tmp_path, kept, assigner), spark, tmp_path / f"job {kept}", kept)
        late[kept] = sum(e.metrics.counters.get("late records", 0) for e in epochs)
    assert rows(tmp_path / "SPARK") == rows(tmp_path / "PORTABLE")
    assert late["PORTABLE"] > 0


# Savepoints


class Total(NamedTuple):
    key: str
    total: int
    mean: float


class Latest(KeyedProcessFunction[str, Total, Total]):
    def process_element(self, value, ctx) -> list[Total]:
        return [value]


def totals(tmp_path, where, **source):
    pipeline = Pipeline("p")
    events = pipeline.from_source(ParquetSource(str(tmp_path / "in"), Event, name="events", **source))
    columns = [F.sum("value").alias("total"), F.avg("value").alias("mean")]
    found = events.key_by("key").agg(*columns, output_type=Total).uid("totals")
    found.key_by("key").process(Latest()).uid("latest").sink_to(
        DeltaSink(str(tmp_path / where), mode="upsert", key="key")
    )
    return pipeline


def test_state_goes_from_batch_to_streaming_to_batch(spark, tmp_path):
    events_in(tmp_path / "in", FIRST)
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    batch(totals(tmp_path, "out"), spark, tmp_path, **{"execution.savepoint.path": one})
    assert Savepoint.read(one).keyed_state("totals").sort_by("key").to_pylist()
    events_in(tmp_path / "in", SECOND, start=1)
    stream(
        totals(tmp_path, "out"), spark, tmp_path, "AUTOMATIC",
        **{"execution.state-recovery.path": one, "execution.savepoint.path": two},
    )  # fmt: skip
    events_in(tmp_path / "in", THIRD, start=2)
    batch(totals(tmp_path, "out"), spark, tmp_path / "last", **{"execution.state-recovery.path": two})
    values = {key: [e.value for e in FIRST + SECOND + THIRD if e.key == key] for key in "ab"}
    expected = [{"key": k, "total": sum(v), "mean": sum(v) / len(v)} for k, v in values.items()]
    assert DeltaTable(str(tmp_path / "out")).to_pyarrow_table().sort_by("key").to_pylist() == expected


def test_open_windows_go_from_batch_to_streaming(spark, tmp_path):
    assigner = TumblingEventTimeWindows.of(ms(10))
    events_in(tmp_path / "in", FIRST)
    one = str(tmp_path / "one")
    batch(in_windows(tmp_path, "out", assigner, name="events"), spark, tmp_path, **{"execution.savepoint.path": one})
    events_in(tmp_path / "in", SECOND, THIRD, start=1)
    stream(
        in_windows(tmp_path, "out", assigner, name="events"), spark, tmp_path, "AUTOMATIC",
        **{"execution.state-recovery.path": one},
    )  # fmt: skip
    stream(in_windows(tmp_path, "whole", assigner, name="events"), spark, tmp_path / "whole job", "SPARK")
    assert rows(tmp_path / "out") == rows(tmp_path / "whole")


def test_a_job_that_runs_takes_savepoints_of_aggregates(spark, tmp_path):
    events_in(tmp_path / "in", FIRST)
    options = {
        "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
        "pipeline.max-parallelism": 3,
        "execution.savepoint.interval": "1 ms",
    }
    taken = []
    made = totals(tmp_path, "out", monitor=True)
    job = StreamingJob(made.plan(options), spark, Start("job"))
    job.observe = lambda event: taken.append(event) if isinstance(event, SavepointTaken) else None
    job.run(lambda: bool(taken))
    assert [one.error for one in taken] == [""]
    (rows,) = [Savepoint.read(str(path.parent)).rows("totals") for path in tmp_path.rglob("savepoints/*/manifest.json")]
    assert sorted((row["key"], row["value"]["sum_value"], row["value"]["count_value"]) for row in rows) == [
        ("a", 5, 2),
        ("b", 2, 1),
    ]


def test_a_checkpoint_of_one_kind_of_state_is_not_taken_for_the_other(spark, tmp_path):
    events_in(tmp_path / "in", FIRST)
    assigner = TumblingEventTimeWindows.of(ms(10))
    made = in_windows(tmp_path, "out", assigner, monitor=True)
    options = {
        "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
        "pipeline.max-parallelism": 3,
    }
    job = StreamingJob(made.plan({**options, "state.native-aggregates": "SPARK"}), spark, Start("job"))
    done = []
    job.observe = committed(done)
    job.run(lambda: bool(done))
    with pytest.raises(StateError, match="the stateful operators are hours, and the checkpoint has"):
        StreamingJob(made.plan({**options, "state.native-aggregates": "PORTABLE"}), spark, Start("job")).run()


class Numbered(NamedTuple):
    key: str
    at: int
    number: int


class Summed(NamedTuple):
    key: str
    total: int


def summed(numbers, path):
    pipeline = Pipeline("sums")
    at = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
    rows = [Numbered("a", n, number) for n, number in enumerate(numbers)]
    keyed = pipeline.from_collection(rows, Numbered, "rows").assign_timestamps_and_watermarks(at).key_by("key")
    windows = keyed.window(TumblingEventTimeWindows.of(timedelta(seconds=1)))
    totals = windows.agg(F.sum("number").alias("total"), output_type=Summed).name("op")
    totals.sink_to(FileSink(str(path), name="out"))
    return pipeline


def test_a_sum_that_overflows_names_operator_and_field_in_every_mode(run_on_spark, run_streaming, tmp_path):
    pipeline = summed([2**63 - 1, 1], tmp_path / "beyond")
    message = r"operator 'op': (field 'total'|sum\(number\)) is larger than its type holds"
    with pytest.raises(RecordTypeError, match=message):
        run_on_spark(pipeline)
    with pytest.raises(RecordTypeError, match=message):
        run_streaming(pipeline, {"execution.checkpointing.dir": str(tmp_path / "spark")})
    local_global = {
        "state.native-aggregates": "PORTABLE",
        "execution.checkpointing.dir": str(tmp_path / "local-global"),
    }
    with pytest.raises(RecordTypeError, match=message):
        run_streaming(pipeline, local_global)


@pytest.mark.parametrize("numbers", [[2**63 - 1, 1, -5], [-(2**63), -1, 1], [-(2**63)], [2**62, -3, 2**62]])
def test_a_windows_sum_that_passes_64_bits_comes_back_in_every_mode(run_on_spark, run_streaming, tmp_path, numbers):
    kept = {name: {"state.native-aggregates": name} for name in ("PORTABLE", "SPARK")}
    for name, options in kept.items():
        checkpoints = {"execution.checkpointing.dir": str(tmp_path / f"checkpoints of {name}")}
        run_streaming(summed(numbers, tmp_path / name), options | checkpoints)
    run_on_spark(summed(numbers, tmp_path / "BATCH"))
    for name in (*kept, "BATCH"):
        assert pq.read_table(tmp_path / name).column("total").to_pylist() == [sum(numbers)]
