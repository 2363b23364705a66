"""Several partitions in one Spark job give what each of them gives by itself."""

import shutil
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dagster import DailyPartitionsDefinition, StaticPartitionsDefinition
from deltalake import DeltaTable

from dagster_unified.api import (
    BroadcastProcessFunction,
    KeyedProcessFunction,
    MapStateDescriptor,
    OutputTag,
    Pipeline,
    ProcessFunction,
    TumblingEventTimeWindows,
    ValueStateDescriptor,
    WatermarkStrategy,
    iterations,
)
from dagster_unified.api import functions as F
from dagster_unified.connectors import CollectionSource, CsvSource, DeltaSink, FileSink, ForeachSink, ParquetSource
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.engine.batch.stage import run_partitions
from dagster_unified.engine.events import StageFinished
from dagster_unified.errors import MalformedInputError, PipelineError, UserFunctionError
from dagster_unified.graph.options import Configuration
from dagster_unified.graph.plan import plan
from dagster_unified.orchestration.partitions import slice_of
from tests.depth import rotated
from tests.support import Event, table_rows

DAYS = ("2024-01-01", "2024-01-02", "2024-01-03", "2024-01-04")
"""The third has no events."""

PARTITIONS = DailyPartitionsDefinition(DAYS[0], end_date="2024-01-05")
HOUR = 3_600_000
BEGIN = 1_704_067_200_000


class Total(NamedTuple):
    key: str
    value: int


class Numbered(NamedTuple):
    key: str
    value: int
    number: int


class Counted(NamedTuple):
    key: str
    window_start: int
    value: int


def event(key, day, hour, value):
    return Event(key, BEGIN + (24 * day + hour) * HOUR, value)


EVENTS = [
    event(k, d, h, v)
    for v, (k, d, h) in enumerate(
        [
            ("a", 0, 1),
            ("b", 0, 2),
            ("a", 0, 23),
            ("a", 1, 0),
            ("c", 1, 5),
            ("b", 3, 3),
            ("a", 3, 4),
            ("b", 3, 9),
            ("a", 3, 5),
        ]
    )
]
LARGE = OutputTag("large", Total)


def events_of(pipeline, name="events"):
    strategy = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(hours=1)).with_timestamp_assigner("at")
    source = CollectionSource(EVENTS, Event, name).partitioned_by("at")
    return pipeline.from_source(source).assign_timestamps_and_watermarks(strategy)


class Calls:
    """Numbers what it sees: a second partition must not go on from the first."""

    def __init__(self):
        self.calls = 0

    def __call__(self, total):
        self.calls += 1
        return Total(f"{total.key} {self.calls}", total.value)


class Split(ProcessFunction):
    def process_element(self, value, ctx):
        yield Total(value.key, value.value)
        if value.value > 3:
            yield LARGE, Total(f"large {value.key}", ctx.timestamp())


class Chain(KeyedProcessFunction):
    """A timer sets the next: how long that goes on depends on the last event time, which is the partition's own."""

    def open(self, context):
        self.fired = context.get_state(ValueStateDescriptor("fired", int))

    def process_element(self, value, ctx):
        ctx.timer_service().register_event_time_timer(value.at + HOUR)

    def on_timer(self, timestamp, ctx):
        self.fired.update((self.fired.value() or 0) + 1)
        yield Total(ctx.get_current_key(), timestamp + self.fired.value())
        ctx.timer_service().register_event_time_timer(timestamp + HOUR)


class Above(BroadcastProcessFunction):
    RULES = MapStateDescriptor("rules", str, int)

    def process_element(self, value, ctx):
        if value.value >= (ctx.get_broadcast_state(self.RULES).get("least") or 0):
            yield Total(value.key, value.value)

    def process_broadcast_element(self, value, ctx):
        ctx.get_broadcast_state(self.RULES).put("least", value.value)


def add(a, b):
    return Total(a.key, a.value + b.value)


def totals(stream):
    return stream.map(lambda e: Total(e.key, e.value), output_type=Total)


def mapped(pipeline):
    return totals(events_of(pipeline)).key_by("key").reduce(add).global_().map(Calls(), output_type=Total)


def timers(pipeline):
    return events_of(pipeline).rebalance().key_by("key").process(Chain(), output_type=Total)


def by_a_function(pipeline):
    return totals(events_of(pipeline)).key_by(lambda t: t.key < "b", key_type=bool).reduce(add)


def native(pipeline):
    columns = events_of(pipeline).where("value > 0").select("key", "value", output_type=Total)
    return (
        columns.key_by("key")
        .agg(F.sum("value").alias("value"), output_type=Total)
        .map(lambda t: Total(t.key, t.value * 10), output_type=Total)
    )


def native_keyed_by_a_function(pipeline):
    return (
        events_of(pipeline)
        .select("key", "value", output_type=Total)
        .key_by(lambda t: t.value % 2, key_type=int)
        .reduce(add)
    )


def native_windows(pipeline):
    return (
        events_of(pipeline)
        .key_by("key")
        .window(TumblingEventTimeWindows.of(timedelta(hours=4)))
        .agg(F.sum("value").alias("value"), output_type=Counted)
    )


def windows(pipeline):
    return (
        totals(events_of(pipeline)).key_by("key").window(TumblingEventTimeWindows.of(timedelta(hours=48))).reduce(add)
    )


def united(pipeline):
    return totals(events_of(pipeline).union(events_of(pipeline, "others"))).key_by("key").reduce(add)


def routed(pipeline):
    return (
        totals(events_of(pipeline))
        .partition_custom(lambda key, count: ord(key) % count, "key")
        .map(lambda t: t, output_type=Total)
        .set_parallelism(2)
    )


def broadcast(pipeline):
    rules = totals(events_of(pipeline, "rules")).where("value >= 3").broadcast(Above.RULES)
    return totals(events_of(pipeline)).connect(rules).process(Above(), output_type=Total)


def looked_up(pipeline):
    table = CollectionSource([Total("a", 7), Total("b", 8)], Total, "names")
    found = totals(events_of(pipeline)).lookup_join(table, "key", {"number": "value"}, Numbered, how="inner")
    return found.map(lambda n: Total(n.key, n.value * n.number), output_type=Total)


class Halving(iterations.IterationBody):
    """Halves values until nothing is left of them, and gives each that it comes by."""

    def process(self, variables, data):
        halved = variables[0].key_by("key").map(lambda t: Total(t.key, t.value // 2), output_type=Total)
        return iterations.IterationBodyResult([halved.filter(lambda t: t.value > 0)], [halved])


def iterated(pipeline):
    """Rounds in each partition, between a stage before them and one behind."""
    (found,) = iterations.iterate_bounded_streams_until_termination(
        [totals(events_of(pipeline)).key_by("key").reduce(add)], [], Halving()
    )
    return found.key_by("key").reduce(add)


class Range:
    """Runs a pipeline's partitions, by themselves or together, each with its tables in a folder."""

    def __init__(self, spark, folder, partitions=PARTITIONS, options=None):
        self.spark, self.folder, self.partitions, self.options = spark, folder, partitions, options or {}
        self.store = IntermediateStore(str(folder / "store"))

    def runs(self, pipeline, keys, run_id="run"):
        options = Configuration.of({"execution.runtime-mode": "BATCH", **self.options})
        parts = [slice_of(self.partitions, key) for key in keys]
        return [
            Run(
                plan(pipeline.graph().bounded_to(part), options),
                self.spark,
                self.store,
                run_id,
                f"{run_id}+{part.key}",
                part.name,
            )
            for part in parts
        ]

    def together(self, pipeline, keys, run_id="run"):
        runs = self.runs(pipeline, keys, run_id)
        finds = [lambda region, run=run: self.store.find(run.address(region)) for run in runs]
        return {region.name: run_partitions(runs, region.name, finds) for region in runs[0].plan.regions}

    def one_by_one(self, pipeline, keys, run_id="run"):
        each = [run_all(run) for run in self.runs(pipeline, keys, run_id)]
        return {manifests[0].stage: list(manifests) for manifests in zip(*each, strict=True)}


def told(manifests):
    """What manifests say of what was made, whatever folder and moment it was made in."""
    return {
        stage: [
            (m.partition, m.rows, [(s.uid, s.tag, s.rows) for s in m.streams], m.last_event_times, m.counters)
            for m in found
        ]
        for stage, found in manifests.items()
    }


def files(path):
    """The rows of every partition of a file sink."""
    return {
        p.name: sorted(tuple(r.values()) for f in p.glob("*.parquet") for r in pq.ParquetFile(f).read().to_pylist())
        for p in path.glob("partition=*")
    }


def written(build, path):
    pipeline = Pipeline("ranges")
    build(pipeline).sink_to(FileSink(str(path), name="out"))
    return pipeline


BUILDS = [
    mapped,
    timers,
    by_a_function,
    native,
    native_keyed_by_a_function,
    native_windows,
    windows,
    united,
    routed,
    broadcast,
    looked_up,
    iterated,
]


@pytest.mark.parametrize("build", rotated(BUILDS, 3))
def test_a_range_in_one_spark_job_gives_what_its_partitions_give_by_themselves(spark, tmp_path, build):
    alone = Range(spark, tmp_path / "a").one_by_one(written(build, tmp_path / "a" / "out"), DAYS)
    together = Range(spark, tmp_path / "b").together(written(build, tmp_path / "b" / "out"), DAYS)
    assert files(tmp_path / "a" / "out") == files(tmp_path / "b" / "out")
    assert len(files(tmp_path / "b" / "out")) == len(DAYS)
    assert any(files(tmp_path / "b" / "out").values())
    assert told(alone) == told(together)
    if build not in (broadcast, iterated):  # whose stages run one partition after another
        assert {m.together for found in together.values() for m in found} == {len(DAYS)}


def test_without_stages_timers_follow_each_partitions_own_last_event_time(spark, tmp_path):
    options = {"execution.batch-shuffle-mode": "ALL_EXCHANGES_PIPELINED"}
    Range(spark, tmp_path / "a", options=options).one_by_one(written(timers, tmp_path / "a" / "out"), DAYS)
    Range(spark, tmp_path / "b", options=options).together(written(timers, tmp_path / "b" / "out"), DAYS)
    assert files(tmp_path / "a" / "out") == files(tmp_path / "b" / "out")


def test_several_streams_and_sinks_of_one_stage(spark, tmp_path):
    def build(folder):
        pipeline = Pipeline("ranges")
        split = events_of(pipeline).process(Split(), output_type=Total)
        split.sink_to(FileSink(str(folder / "all"), name="all"))
        split.get_side_output(LARGE).sink_to(DeltaSink(str(folder / "large"), name="large"))
        split.get_side_output(LARGE).key_by("key").reduce(add).sink_to(
            DeltaSink(str(folder / "sums"), name="sums", mode="upsert", key="key")
        )
        return pipeline

    alone = Range(spark, tmp_path / "a").one_by_one(build(tmp_path / "a"), DAYS)
    together = Range(spark, tmp_path / "b").together(build(tmp_path / "b"), DAYS)
    assert files(tmp_path / "a" / "all") == files(tmp_path / "b" / "all")
    for table in ("large", "sums"):
        assert table_rows(tmp_path / "a" / table) == table_rows(tmp_path / "b" / table) != []
    assert [[m.rows for m in alone[stage]] for stage in alone] == [
        [m.rows for m in together[stage]] for stage in together
    ]


def into_table(folder, build=lambda totals: totals, **sink):
    pipeline = Pipeline("ranges")
    build(totals(events_of(pipeline))).sink_to(DeltaSink(str(folder / "table"), name="table", **sink))
    return pipeline


@pytest.mark.a_day(1)
@pytest.mark.parametrize(
    "sink", [{"mode": "append"}, {"mode": "overwrite"}, {"mode": "overwrite", "partition_by": "key"}]
)
def test_a_delta_table_has_a_range_in_one_transaction_and_each_partition_can_be_replaced(spark, tmp_path, sink):
    def build():
        return into_table(tmp_path, **sink)

    ranges = Range(spark, tmp_path)
    ranges.together(build(), DAYS)
    first = table_rows(tmp_path / "table")
    assert first == sorted((e.key, e.value) for e in EVENTS)
    assert DeltaTable(str(tmp_path / "table")).version() == 1
    ranges.together(build(), DAYS)  # the same execution again
    assert (table_rows(tmp_path / "table"), DeltaTable(str(tmp_path / "table")).version()) == (first, 1)
    ranges.one_by_one(build(), DAYS[1:2], run_id="again")
    ranges.together(build(), DAYS[1:], run_id="once-more")
    assert table_rows(tmp_path / "table") == first


def test_an_upsert_of_a_range_keeps_of_a_key_what_its_last_partition_has(spark, tmp_path):
    Range(spark, tmp_path).together(into_table(tmp_path, mode="upsert", key="key"), DAYS)
    assert table_rows(tmp_path / "table") == [("a", 8), ("b", 7), ("c", 4)]
    assert DeltaTable(str(tmp_path / "table")).version() == 1


def test_a_range_of_which_some_partitions_were_written_writes_the_others(spark, tmp_path):
    ranges = Range(spark, tmp_path)
    ranges.one_by_one(into_table(tmp_path, mode="append"), DAYS[:1])
    ranges.together(into_table(tmp_path, mode="append"), DAYS)
    assert table_rows(tmp_path / "table") == sorted((e.key, e.value) for e in EVENTS)


def test_a_partition_that_fails_is_named_by_its_record_and_those_before_it_are_finished(spark, tmp_path):
    def check(total):
        if total.value == 4:
            raise ValueError("no such thing")
        return total

    pipeline = written(lambda p: totals(events_of(p)).map(check, output_type=Total), tmp_path / "out")
    with pytest.raises(UserFunctionError, match=r"no such thing.* \(in partition 2024-01-02\)$"):
        Range(spark, tmp_path).together(pipeline, DAYS)
    assert files(tmp_path / "out") == {"partition=2024-01-01": [("a", 0), ("a", 2), ("b", 1)]}
    assert not list((tmp_path / "store").glob("*/*/2024-01-02/*/data-*"))


def test_intermediates_that_are_lost_are_made_again_for_their_partitions(spark, tmp_path):
    made = []

    def observe(event):
        if isinstance(event, StageFinished) and event.reason:
            made.append((event.stage, event.manifest.partition, event.manifest.together))

    ranges, pipeline = Range(spark, tmp_path), written(mapped, tmp_path / "out")
    ranges.together(pipeline, DAYS)
    whole = files(tmp_path / "out")
    first, second, last = (region.name for region in ranges.runs(pipeline, DAYS)[0].plan.regions)
    for day in (*DAYS[:2], DAYS[3]):
        shutil.rmtree(tmp_path / "store" / "ranges" / first / day)
    runs = [replace(run, observe=observe, execution=f"again {run.partition}") for run in ranges.runs(pipeline, DAYS)]
    asked = []

    def finding(run):
        return lambda region: asked.append(region.name) or ranges.store.find(run.address(region))

    finds = [finding(run) for run in runs]
    run_partitions(runs, second, finds)
    assert made == [(first, DAYS[0], 2), (first, DAYS[1], 2), (first, DAYS[3], 1)]
    asked.clear()
    run_partitions(runs, last, finds)
    assert set(asked) == {second}, "what a stage does not read is not asked for: each question is one to a database"
    assert files(tmp_path / "out") == whole


class Sale(NamedTuple):
    shop: str
    day: str
    amount: int


LINES = ["north,2024-01-01,1", "north,2024-01-02,2", "south,2024-01-02,many", "south,2024-01-04,8", "south,never,16"]


@pytest.mark.a_day(1)
@pytest.mark.parametrize("kept", ["drop", "divert"])
def test_malformed_rows_are_counted_for_every_partition_that_they_may_belong_to(spark, tmp_path, kept):
    (tmp_path / "in.csv").write_text("shop,day,amount\n" + "\n".join(LINES) + "\n")

    def build(path):
        pipeline = Pipeline("ranges")
        source = CsvSource(str(tmp_path / "in.csv"), Sale, name="sales", on_malformed=kept).partitioned_by("day")
        pipeline.from_source(source).map(lambda s: Total(s.shop, s.amount), output_type=Total).sink_to(
            FileSink(str(path), name="out")
        )
        return pipeline

    alone = Range(spark, tmp_path / "a").one_by_one(build(tmp_path / "a" / "out"), DAYS)
    together = Range(spark, tmp_path / "b").together(build(tmp_path / "b" / "out"), DAYS)
    assert files(tmp_path / "a" / "out") == files(tmp_path / "b" / "out")
    assert told(alone) == told(together)
    assert next(iter(together["out"][0].counters.values())) == 2

    def bad(at):
        return [len(pq.read_table(f).to_pylist()) for f in sorted(at.glob("store/*/~malformed/*/partition=2024-01-04"))]

    assert bad(tmp_path / "a") == bad(tmp_path / "b") == ([2] if kept == "divert" else [])


def test_a_malformed_row_that_is_to_fail_the_run_fails_it(spark, tmp_path):
    (tmp_path / "in.csv").write_text("shop,day,amount\n" + "\n".join(LINES) + "\n")
    pipeline = Pipeline("ranges")
    pipeline.from_source(CsvSource(str(tmp_path / "in.csv"), Sale, name="sales").partitioned_by("day")).print()
    with pytest.raises(MalformedInputError, match="line 4"):
        Range(spark, tmp_path).together(pipeline, DAYS)


SHOPS = StaticPartitionsDefinition(["north", "south"])
BY_SHOP = {"partition=north": [("north", 1)], "partition=south": [("south", 2)]}


def of_shops(source, folder):
    pipeline = Pipeline("ranges")
    pipeline.from_source(source).map(lambda s: Total(s.shop, s.amount), output_type=Total).sink_to(
        FileSink(str(folder / "out"), name="out")
    )
    return pipeline


@pytest.mark.a_day(1)
@pytest.mark.parametrize("folder", ["in", "für alle, 100%", "in/../other"])
def test_files_of_a_path_template(spark, tmp_path, folder):
    for shop, amount in (("north", 1), ("south", 2)):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / folder / shop).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / shop / "1.csv").write_text(f"shop,day,amount\n{shop},2024-01-01,{amount}\n")
    pipeline = of_shops(CsvSource(f"{tmp_path}/{folder}/{{key}}/*.csv", Sale, name="sales"), tmp_path)
    Range(spark, tmp_path, SHOPS).together(pipeline, ["north", "south"])
    assert files(tmp_path / "out") == BY_SHOP


@pytest.mark.a_day(1)
@pytest.mark.parametrize("amounts", [pa.int64(), pa.int32()])
def test_parquet_files_of_which_each_partition_has_a_schema_of_its_own(spark, tmp_path, amounts):
    for shop, amount, kind in (("north", 1, pa.int64()), ("south", 2, amounts)):
        pq.write_table(
            pa.table({"shop": [shop], "day": ["2024-01-01"], "amount": pa.array([amount], kind)}),
            tmp_path / f"{shop}.parquet",
        )
    Range(spark, tmp_path, SHOPS).together(
        of_shops(ParquetSource(f"{tmp_path}/{{key}}.parquet", Sale, name="sales"), tmp_path), ["north", "south"]
    )
    assert files(tmp_path / "out") == BY_SHOP


def test_a_partition_without_its_file_is_named_and_those_before_it_are_finished(spark, tmp_path):
    (tmp_path / "north.csv").write_text("shop,day,amount\nnorth,2024-01-01,1\n")
    with pytest.raises(PipelineError, match=r"there are no files at .*south.csv for partition south"):
        Range(spark, tmp_path, SHOPS).together(
            of_shops(CsvSource(f"{tmp_path}/{{key}}.csv", Sale, name="sales"), tmp_path), ["north", "south"]
        )
    assert files(tmp_path / "out") == {"partition=north": [("north", 1)]}


def test_a_path_template_that_names_folders_reads_what_spark_reads_of_them(spark, tmp_path):
    for shop, amount in (("north", 1), ("south", 2)):
        (tmp_path / "in" / shop / "_temporary" / "0").mkdir(parents=True)
        (tmp_path / "in" / shop / "1.csv").write_text(f"shop,day,amount\n{shop},2024-01-01,{amount}\n")
        (tmp_path / "in" / shop / "_temporary" / "0" / "2.csv").write_text(f"shop,day,amount\n{shop},2024-01-01,64\n")
    Range(spark, tmp_path, SHOPS).together(
        of_shops(CsvSource(f"{tmp_path}/in/{{key}}", Sale, name="sales"), tmp_path), ["north", "south"]
    )
    assert files(tmp_path / "out") == BY_SHOP


def test_a_path_template_and_a_field_bound_a_source_together(spark, tmp_path):
    (tmp_path / "2024-01.csv").write_text("shop,day,amount\na,2024-01-30,1\na,2024-01-31,2\n")
    (tmp_path / "2024-02.csv").write_text("shop,day,amount\na,2024-02-01,4\na,2024-02-02,8\n")
    source = CsvSource(f"{tmp_path}/{{start:%Y-%m}}.csv", Sale, name="sales").partitioned_by("day")
    Range(spark, tmp_path, DailyPartitionsDefinition("2024-01-01")).together(
        of_shops(source, tmp_path), ["2024-01-31", "2024-02-01"]
    )
    assert files(tmp_path / "out") == {"partition=2024-01-31": [("a", 2)], "partition=2024-02-01": [("a", 4)]}


def test_a_window_function_in_sql_sees_one_partition(spark, tmp_path):
    def numbered(pipeline):
        return events_of(pipeline).select(
            "key", "cast(row_number() over (order by value) as bigint) as value", output_type=Total
        )

    Range(spark, tmp_path).together(written(numbered, tmp_path / "out"), DAYS)
    assert [value for _, value in files(tmp_path / "out")[f"partition={DAYS[3]}"]] != []
    assert {min((v for _, v in found), default=1) for found in files(tmp_path / "out").values()} == {1}


def test_a_sink_that_fails_for_one_partition_is_not_written_again_for_those_before_it(spark, tmp_path):
    calls = tmp_path / "calls"

    def tell(total):
        if total.value == 4:
            raise ValueError("no such thing")
        with calls.open("a") as file:
            file.write(f"{total.value}\n")

    pipeline = Pipeline("ranges")
    totals(events_of(pipeline)).sink_to(ForeachSink(tell, name="told"))
    with pytest.raises(UserFunctionError, match="no such thing"):
        Range(spark, tmp_path).together(pipeline, DAYS)
    assert sorted(line for line in calls.read_text().split() if int(line) < 3) == ["0", "1", "2"]


def test_an_upsert_keeps_the_last_record_of_a_key_as_it_was_emitted(spark, tmp_path):
    def many(totals):
        return totals.flat_map(lambda t: [Total("all", n) for n in range(2000)], output_type=Total)

    Range(spark, tmp_path).together(into_table(tmp_path, many, mode="upsert", key="key"), DAYS)
    assert table_rows(tmp_path / "table") == [("all", 1999)]


def test_a_store_whose_root_is_a_url(spark, tmp_path):
    ranges = Range(spark, tmp_path)
    ranges.store = IntermediateStore(f"file://{tmp_path}/elsewhere")
    made = ranges.together(written(mapped, tmp_path / "out"), DAYS)
    assert sum(m.rows for m in next(iter(made.values()))) == len(EVENTS)
    assert sum(map(len, files(tmp_path / "out").values())) == 6
