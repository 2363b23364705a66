"""STREAMING from and to every connector, and the options that change what a stream gives."""

import asyncio
import json
import os
import time
from collections.abc import Iterable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from dagster_unified.api import (
    AsyncDataStream,
    AsyncFunction,
    KeyedBroadcastProcessFunction,
    KeyedProcessFunction,
    MapStateDescriptor,
    Pipeline,
    TumblingEventTimeWindows,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from dagster_unified.api import functions as F
from dagster_unified.connectors import (
    DeltaSink,
    FileSink,
    ForeachSink,
    JsonSource,
    ParquetSource,
    Rate,
    RateSource,
    StructuredSource,
)
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.errors import (
    MalformedInputError,
    PipelineError,
    RecordTypeError,
    StateError,
    UnsupportedError,
    UserFunctionError,
)
from tests.connectors.log_source import Event, LogSource, append
from tests.support import MODES, Sale, file_rows, table_rows

SALES = [Sale("a", 1), Sale("b", 2), Sale("a", 3), Sale("b", 4), Sale("a", 5)]


def files(folder: Path, *contents: Iterable[Sale]) -> Path:
    folder.mkdir()
    for number, records in enumerate(contents):
        file = folder / f"{number}.json"
        file.write_text("".join(f"{json.dumps(r._asdict())}\n" for r in records))
        os.utime(file, (number, number))  # files are taken in the order of their age
    return folder


# Sources


@pytest.mark.a_day(1)
@MODES
def test_json_files_whose_malformed_rows_are_diverted_or_dropped(run_in, tmp_path, mode):
    folder = files(tmp_path / "in", SALES[:2], SALES[2:])
    (folder / "2.json").write_text('{"shop": "c", "amount": "many"}\n')
    pipeline = Pipeline("sales")
    for on_malformed in ("divert", "drop"):
        source = JsonSource(str(folder), Sale, name=f"sales to {on_malformed}", on_malformed=on_malformed)
        pipeline.from_source(source).sink_to(FileSink(str(tmp_path / on_malformed)))
    run_in[mode](pipeline)
    for on_malformed in ("divert", "drop"):
        assert file_rows(tmp_path / on_malformed) == sorted(tuple(s) for s in SALES)
    (kept,) = [f for f in tmp_path.rglob("*.parquet") if "malformed" in str(f) and pq.read_table(f).num_rows]
    (row,) = pq.read_table(kept, partitioning=None).select(["file", "line", "content", "reason"]).to_pylist()
    assert row.pop("file").endswith("/in/2.json")
    assert row == {
        "line": 1,
        "content": '{"shop": "c", "amount": "many"}',
        "reason": "cannot be read as Sale(shop: string, amount: int64):"
        " field 'amount' is \"many\", not a whole number of 64 bits",
    }


def test_a_native_aggregate_leaves_out_malformed_rows_that_another_stream_of_the_source_keeps(run_streaming, tmp_path):
    folder = files(tmp_path / "in", SALES)
    (folder / "1.json").write_text('{"shop": "c", "amount": "many"}\n')
    pipeline = Pipeline("p")
    sales = pipeline.from_source(JsonSource(str(folder), Sale, name="sales", on_malformed="divert"))
    totals = sales.key_by("shop").agg(F.sum("amount").alias("amount"), output_type=Sale)
    totals.sink_to(DeltaSink(str(tmp_path / "totals"), mode="upsert", key="shop"))
    with pytest.raises(
        UnsupportedError,
        match=(
            "only native aggregates read it, which STREAMING cannot run; use on_malformed='fail', or aggregate with"
            " reduce"
        ),
    ):
        run_streaming(pipeline, start=Start("before", fresh=True))
    sales.sink_to(FileSink(str(tmp_path / "out")))
    run_streaming(pipeline, start=Start("after", fresh=True))
    assert sorted(DeltaTable(str(tmp_path / "totals")).to_pyarrow_table().to_pylist(), key=str) == [
        {"shop": "a", "amount": 9},
        {"shop": "b", "amount": 6},
    ]
    assert [pq.read_table(f).num_rows for f in tmp_path.rglob("*.parquet") if "malformed" in str(f)] == [1]


def test_a_missing_column_is_an_error_and_not_null(run_in, tmp_path):
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"shop": ["a"]}), tmp_path / "in/0.parquet")
    for mode in ("BATCH", "STREAMING"):
        pipeline = Pipeline("p")
        pipeline.from_source(ParquetSource(str(tmp_path / "in"), Sale, name="sales")).print()
        with pytest.raises(PipelineError, match=r"source 'sales': no column 'amount' in .*; it has shop"):
            run_in[mode](pipeline)


def streamed_until(job: StreamingJob, look):
    deadline = time.monotonic() + 600
    job.start()
    try:
        while not look():
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        job.stop()


def planned(pipeline, tmp_path, **options):
    return pipeline.plan(
        {"execution.checkpointing.dir": str(tmp_path / "checkpoints"), "pipeline.max-parallelism": 2, **options}
    )


def test_the_rate_source_counts(spark, tmp_path):
    pipeline = Pipeline("p")
    odd = pipeline.from_source(RateSource(rows_per_second=50)).filter(lambda r: r.value % 2 == 1)
    odd.map(lambda r: Rate(r.timestamp, r.value), Rate).sink_to(FileSink(str(tmp_path / "out")))
    streamed_until(
        StreamingJob(planned(pipeline, tmp_path), spark, Start("one")),
        lambda: (tmp_path / "out").exists() and len(file_rows(tmp_path / "out")) > 20,
    )
    values = sorted(value for _, value in file_rows(tmp_path / "out"))
    assert values == list(range(1, 2 * len(values), 2))


class Tick(NamedTuple):
    value: int


def test_any_structured_source(spark, tmp_path):
    pipeline = Pipeline("p")
    source = StructuredSource("rate-micro-batch", Tick, {"rowsPerBatch": "7", "numPartitions": "1"}, name="ticks")
    pipeline.from_source(source).key_by(lambda t: t.value % 2, key_type=int).reduce(
        lambda a, b: Tick(a.value + b.value)
    ).sink_to(FileSink(str(tmp_path / "out")))
    job = StreamingJob(
        planned(pipeline, tmp_path, **{"execution.checkpointing.interval": "100ms"}), spark, Start("one")
    )
    streamed_until(job, lambda: job.activity()[0] >= 3)
    assert {0, 0 + 2, 0 + 2 + 4, 1, 1 + 3, 1 + 3 + 5} <= {value for (value,) in file_rows(tmp_path / "out")}


def test_a_structured_source_without_a_column_says_which_there_are(spark, tmp_path):
    pipeline = Pipeline("p")
    pipeline.from_source(StructuredSource("rate", Sale, name="ticks")).sink_to(FileSink(str(tmp_path / "out")))
    with pytest.raises(PipelineError, match="source 'ticks': rate gives no column 'shop'; it gives timestamp, value"):
        StreamingJob(planned(pipeline, tmp_path), spark, Start("one")).run()


# Sinks


class Lines:
    """Appends to a file of its own for each partition that it is opened in."""

    def __init__(self, folder: Path):
        self.folder = folder

    def open(self):
        import uuid

        self.file = (self.folder / uuid.uuid4().hex).open("w")

    def __call__(self, sale: Sale):
        if sale.amount == 0:
            raise ValueError("nothing sold")
        self.file.write(f"{sale.shop} {sale.amount}\n")

    def close(self):
        self.file.close()


@pytest.mark.a_day(1)
@MODES
def test_a_function_is_called_with_every_record(run_in, tmp_path, mode):
    (tmp_path / "out").mkdir()
    pipeline = Pipeline("p")
    pipeline.from_collection(SALES).sink_to(ForeachSink(Lines(tmp_path / "out"), name="lines"))
    run_in[mode](pipeline)
    assert sorted("".join(f.read_text() for f in (tmp_path / "out").iterdir()).splitlines()) == sorted(
        f"{s.shop} {s.amount}" for s in SALES
    )


@pytest.mark.a_day(1)
@MODES
def test_a_function_that_fails_names_the_record(run_in, tmp_path, mode):
    (tmp_path / "out").mkdir()
    pipeline = Pipeline("p")
    pipeline.from_collection([Sale("a", 0)]).sink_to(ForeachSink(Lines(tmp_path / "out"), name="lines"))
    with pytest.raises(
        UserFunctionError,
        match=(
            r"p: stage '.*', sink 'lines': ValueError: nothing sold, at .* in __call__, on Sale\(shop='a', amount=0\)"
        ),
    ):
        run_in[mode](pipeline)


# Operators that reach a worker


class Doubled(AsyncFunction):
    async def async_invoke(self, value: Sale) -> list[Sale]:
        await asyncio.sleep(0)
        return [Sale(value.shop, 2 * value.amount)]


class Both(NamedTuple):
    shop: str
    first: int
    second: int


@pytest.mark.a_day(1)
@MODES
def test_asynchronous_calls_and_a_join(run_in, tmp_path, mode):
    pipeline = Pipeline("p")
    at = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(seconds=1)).with_timestamp_assigner("amount")
    sales = pipeline.from_collection(SALES).assign_timestamps_and_watermarks(at)
    doubled = AsyncDataStream.unordered_wait(sales, Doubled(), timedelta(seconds=9))
    windows = (
        sales.join(doubled)
        .where("shop")
        .equal_to("shop")
        .window(TumblingEventTimeWindows.of(timedelta(milliseconds=4)))
    )
    windows.apply(lambda a, b: Both(a.shop, a.amount, b.amount), Both).sink_to(FileSink(str(tmp_path / "out")))
    run_in[mode](pipeline)
    assert file_rows(tmp_path / "out") == [
        ("a", 1, 2),
        ("a", 1, 6),
        ("a", 3, 2),
        ("a", 3, 6),
        ("a", 5, 10),
        ("b", 2, 4),
        ("b", 4, 8),
    ]


# Options


def test_one_update_per_key_and_micro_batch(run_streaming, tmp_path):
    folder = files(tmp_path / "in", SALES[:3], SALES[3:])
    for value, expected in (
        ("false", [("a", 4), ("a", 9), ("b", 2), ("b", 6)]),
        ("true", [("a", 1), ("a", 4), ("a", 9), ("b", 2), ("b", 6)]),
    ):
        pipeline = Pipeline(f"updates_{value}")
        sales = pipeline.from_source(JsonSource(str(folder), Sale, max_files_per_trigger=1))
        sales.key_by("shop").sum("amount").sink_to(DeltaSink(str(tmp_path / value), mode="append"))
        run_streaming(pipeline, {"execution.incremental-updates": value})
        assert table_rows(tmp_path / value) == expected


def test_the_hashmap_backend(run_streaming, tmp_path):
    hashmap = {"state.backend.type": "hashmap"}
    pipeline = Pipeline("native")
    totals = pipeline.from_collection(SALES).key_by("shop").agg(F.sum("amount").alias("amount"), output_type=Sale)
    totals.sink_to(DeltaSink(str(tmp_path / "out"), mode="upsert", key="shop"))
    run_streaming(pipeline, hashmap)
    assert table_rows(tmp_path / "out") == [
        ("a", 9),
        ("b", 6),
    ]
    pipeline = Pipeline("p")
    pipeline.from_collection(SALES).key_by("shop").sum("amount").sink_to(FileSink(str(tmp_path / "files")))
    with pytest.raises(
        UnsupportedError,
        match=(
            r"p: operator 'sum' keeps its state in Spark's transformWithState, which only has rocksdb; leave"
            r" state.backend.type out"
        ),
    ):
        run_streaming(pipeline, hashmap)


def test_batch_ignores_the_state_backend(run_on_spark, tmp_path):
    pipeline = Pipeline("p")
    totals = pipeline.from_collection(SALES).key_by("shop").reduce(lambda a, b: a._replace(amount=a.amount + b.amount))
    totals.sink_to(DeltaSink(str(tmp_path / "out"), mode="append"))
    run_on_spark(pipeline, {"state.backend.type": "hashmap"})
    rows = DeltaTable(str(tmp_path / "out")).to_pyarrow_table().to_pylist()
    assert sorted(tuple(row.values()) for row in rows) == [("a", 9), ("b", 6)]


TOTAL = ValueStateDescriptor("total", int)


class TotalsWhenAsked(KeyedBroadcastProcessFunction):
    """Collects over its keys what it then emits."""

    def open(self, runtime_context):
        self.total = runtime_context.get_state(TOTAL)

    def process_element(self, value: Sale, ctx) -> Iterable[Sale]:
        self.total.update((self.total.value() or 0) + value.amount)
        return []

    def process_broadcast_element(self, value: Sale, ctx) -> Iterable[Sale]:
        found = []
        ctx.apply_to_keyed_state(TOTAL, lambda shop, total: found.append(Sale(shop, total.value())))
        yield Sale(f"asked {value.shop}", 0)
        yield from found


def test_what_a_broadcast_record_finds_out_about_the_keys_comes_from_every_key_group(run_streaming, tmp_path):
    sales = files(tmp_path / "sales", [Sale(shop, 1) for shop in "abcdefgh"], [Sale("a", 5)])
    asking = files(tmp_path / "asking", [Sale("first", 0)], [Sale("second", 0)])
    pipeline = Pipeline("p")
    stream = pipeline.from_source(JsonSource(str(sales), Sale, max_files_per_trigger=1, name="sales"))
    rules = pipeline.from_source(JsonSource(str(asking), Sale, max_files_per_trigger=1, name="asking"))
    asked = stream.key_by("shop").connect(rules.broadcast(MapStateDescriptor("rules", str, int)))
    asked.process(TotalsWhenAsked()).sink_to(DeltaSink(str(tmp_path / "out"), mode="append"))
    run_streaming(pipeline)
    rows = DeltaTable(str(tmp_path / "out")).to_pyarrow_table().to_pylist()
    expected = [("asked first", 0), ("asked second", 0), *((shop, 1) for shop in "abcdefgh")]
    assert sorted(tuple(row.values()) for row in rows) == sorted(expected)


class Number(NamedTuple):
    n: int


class Remembers(KeyedProcessFunction):
    """Each number with the one before it."""

    def open(self, context):
        self.last = context.get_state(ValueStateDescriptor("last", int))

    def process_element(self, value: Number, context) -> Iterable[tuple[int, int | None]]:
        yield value.n, self.last.value()
        self.last.update(value.n)


def test_of_a_collection_that_has_grown_a_job_reads_the_rest(spark, tmp_path):
    (tmp_path / "more").mkdir()
    options = {"execution.runtime-mode": "STREAMING", "execution.checkpointing.dir": str(tmp_path / "checkpoints")}

    def written():
        place = str(tmp_path / "out")
        rows = DeltaTable(place).to_pyarrow_table().to_pylist() if DeltaTable.is_deltatable(place) else []
        return sorted((row["f0"], row["f1"]) for row in rows)

    def run(*numbers, fresh=False):
        pipeline = Pipeline("grown")
        given = pipeline.from_collection([Number(n) for n in numbers], Number, name="numbers")
        unbounded = pipeline.from_source(JsonSource(str(tmp_path / "more"), Number, name="more", monitor=True))
        remembered = given.union(unbounded).key_by(lambda n: 0, key_type=int).process(Remembers()).uid("remembers")
        remembered.sink_to(DeltaSink(str(tmp_path / "out"), name="out"))
        job = StreamingJob(pipeline.plan(options), spark, Start("test", fresh=fresh))
        assert job.run(lambda: len(written()) >= len(numbers), 0.1) == "stopped"
        return written()

    assert run(1, 2) == [(1, None), (2, 1)]
    assert run(1, 2, 3, 4) == [(1, None), (2, 1), (3, 2), (4, 3)]
    for changed in ([1], [1, 2, 5, 4], [0, 1, 2, 3, 4]):
        with pytest.raises(StateError, match=r"source 'numbers': it cannot go on after the first . records: it does"):
            run(*changed)
    assert run(1, 2, 3, 4, 5) == [(1, None), (2, 1), (3, 2), (4, 3), (5, 4)]
    assert run(5, 6, 7, 8, 9, 10, fresh=True)[0] == (5, None)


def test_a_bounded_job_that_has_finished_begins_anew(run_streaming, tmp_path):
    def run(*numbers):
        pipeline = Pipeline("again")
        given = pipeline.from_collection([Number(n) for n in numbers], Number, name="numbers")
        remembered = given.key_by(lambda n: 0, key_type=int).process(Remembers()).uid("remembers")
        remembered.sink_to(DeltaSink(str(tmp_path / "out"), name="out"))
        run_streaming(pipeline)
        rows = DeltaTable(str(tmp_path / "out")).to_pyarrow_table().to_pylist()
        return sorted((row["f0"], row["f1"]) for row in rows)

    assert run(1, 2) == [(1, None), (2, 1)]
    assert run(1, 2, 3) == [(1, None), (2, 1), (3, 2)]
    assert run(4) == [(4, None)]


def test_an_epoch_that_was_planned_of_another_kind_of_source_is_one_sentence(run_streaming, tmp_path):
    (tmp_path / "logs").mkdir()
    append(tmp_path / "logs", "a", Event("a", 1, 0), "no event")
    logs = Pipeline("p")
    logs.from_source(LogSource(tmp_path / "logs")).print("out")
    with pytest.raises(MalformedInputError):
        run_streaming(logs)
    given = Pipeline("p")
    given.from_collection([Event("a", 1, 0)], Event, name="log").print("out")
    with pytest.raises(StateError, match=r"^p: the checkpoint has an epoch that was planned, .* start without state"):
        run_streaming(given)


@pytest.mark.a_day(1)
@MODES
def test_a_null_that_no_function_has_seen_does_not_reach_a_sink(run_in, tmp_path, mode):
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"shop": ["a", "b"], "amount": [1, None]}), tmp_path / "in" / "1.parquet")
    pipeline = Pipeline("p")
    sales = pipeline.from_source(ParquetSource(str(tmp_path / "in"), Sale)).where("shop is not null")
    sales.sink_to(DeltaSink(str(tmp_path / "out"), name="out"))
    with pytest.raises(RecordTypeError, match=r"^p: sink 'out': field 'amount' of Sale is null, and its type does not"):
        run_in[mode](pipeline)


class Met(NamedTuple):
    at: datetime
    times: list[datetime]


class Zones(KeyedProcessFunction):
    """Gives, when a timer fires, which zones the times have that it knows of: of the key, of state, of the record."""

    def open(self, context):
        self.last = context.get_state(ValueStateDescriptor("last", Met))

    def process_element(self, value: Met, ctx) -> Iterable[str]:
        self.last.update(value)
        ctx.timer_service().register_event_time_timer(1)
        yield f"record {value.at.tzinfo!r} {value.times[0].tzinfo!r}"

    def on_timer(self, timestamp, ctx) -> Iterable[str]:
        last = self.last.value()
        yield f"timer {ctx.get_current_key().tzinfo!r} {last.at.tzinfo!r} {last.times[0].tzinfo!r}"


@pytest.mark.a_day(1)
@MODES
def test_times_in_utc_have_one_zone_wherever_they_come_from(run_in, tmp_path, mode):
    noon = datetime(2024, 1, 1, 12, tzinfo=timezone.utc)
    pipeline = Pipeline("p")
    met = pipeline.from_collection([Met(noon, [noon])], Met).key_by("at").process(Zones())
    met.sink_to(DeltaSink(str(tmp_path / "out"), name="out"))
    run_in[mode](pipeline)
    utc = "datetime.timezone.utc"
    found = DeltaTable(str(tmp_path / "out")).to_pyarrow_table()["value"].to_pylist()
    assert sorted(found) == [f"record {utc} {utc}", f"timer {utc} {utc} {utc}"]
