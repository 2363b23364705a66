"""Partitions under Dagster: one, a range of them, again, and what a failure in the middle leaves."""

import shutil
import warnings
from datetime import date, datetime, timedelta
from itertools import pairwise

import pytest
from dagster import (
    AssetKey,
    BackfillPolicy,
    DagsterInstance,
    DailyPartitionsDefinition,
    HourlyPartitionsDefinition,
    MultiPartitionsDefinition,
    StaticPartitionsDefinition,
    execute_job,
    reconstructable,
)
from deltalake import DeltaTable

from dagster_unified.api import KeyedProcessFunction, Pipeline, ValueStateDescriptor, iterations
from dagster_unified.api import functions as F
from dagster_unified.connectors import CsvSource, DeltaSink, RateSource
from dagster_unified.errors import PipelineError
from dagster_unified.orchestration import (
    BatchDeployment,
    StreamingDeployment,
    unified_definitions,
)
from dagster_unified.orchestration.partitions import in_zone, key_after, key_before, slice_of
from dagster_unified.state import Savepoint
from tests.iterations.support import Body
from tests.orchestration.partitioned_job import (
    BROKEN,
    DAILY,
    HOME,
    Sale,
    Total,
    add,
    as_total,
    build,
    carrying_job,
    checked,
    defs,
    job,
    shops_job,
)
from tests.orchestration.support import launched_with, reexecuted, resources, whole_range

DAYS = ["2013-03-09", "2013-03-10", "2013-03-11"]


@pytest.fixture
def instance(spark, tmp_path):
    for name in ("table", "store", "in"):
        shutil.rmtree(HOME / name, ignore_errors=True)
    BROKEN.unlink(missing_ok=True)
    sales(
        "2013-03-09T12:00:00-05:00,1",
        "2013-03-10T01:59:00-05:00,2",
        "2013-03-10T23:59:00-04:00,4",
        "2013-03-11T00:00:00-04:00,8",
    )
    with DagsterInstance.local_temp(str(tmp_path)) as instance:
        yield instance


def sales(*lines):
    (HOME / "in").mkdir(exist_ok=True)
    (HOME / "in" / "sales.csv").write_text("shop,at,amount\n" + "".join(f"north,{line}\n" for line in lines))


def amounts():
    return sorted(DeltaTable(str(HOME / "table")).to_pyarrow_table()["amount"].to_pylist())


def materialized(instance, key):
    return {
        e.asset_materialization.partition: e.asset_materialization.metadata
        for e in instance.fetch_materializations(AssetKey(key), limit=100).records
    }


def test_a_partition_that_runs_again_replaces_what_it_had_written(instance):
    for day in (*DAYS, "2013-03-10"):
        assert job().execute_in_process(instance=instance, partition_key=day).success
    assert amounts() == [1, 6, 8]
    sales("2013-03-10T12:00:00-04:00,32")
    assert job().execute_in_process(instance=instance, partition_key="2013-03-10").success
    assert amounts() == [1, 8, 32]


def test_a_range_in_one_run_gives_what_its_partitions_give_by_themselves(instance):
    assert job().execute_in_process(instance=instance, tags=whole_range(DAYS[0], DAYS[-1])).success
    assert amounts() == [1, 6, 8]
    shown = materialized(instance, ["sales", "as_total_stage"])
    assert {day: shown[day]["dagster/row_count"].value for day in DAYS} == {DAYS[0]: 1, DAYS[1]: 2, DAYS[2]: 1}
    assert len({shown[day]["intermediate"].value for day in DAYS}) == 3
    assert {shown[day]["partitions of its Spark job"].value for day in DAYS} == {3}


def test_a_run_without_a_partition_says_that_it_needs_one(instance):
    found = job().execute_in_process(instance=instance, raise_on_error=False)
    (failed,) = [event for event in found.all_events if event.is_step_failure]
    assert "the deployment is partitioned, and the run is of no partition" in failed.step_failure_data.error.to_string()
    assert not [event for event in found.all_events if event.is_step_up_for_retry]


def test_a_later_run_goes_on_from_the_state_of_a_day_that_a_re_execution_did_not_run_again(instance):
    BROKEN.write_text("adding 2013-03-11")
    first = carrying_job().execute_in_process(
        instance=instance, tags=whole_range(DAYS[0], DAYS[-1]), raise_on_error=False
    )
    assert not first.success
    BROKEN.unlink()
    with reexecuted(carrying_job, instance, first.run_id, tags=whole_range(DAYS[0], DAYS[-1])) as again:
        assert again.success
        log = "\n".join(e.user_message for e in instance.all_logs(again.run_id))
    assert f"stage 'totals' of partition 2013-03-10 was finished by run {first.run_id[:8]} before" in log
    assert "stage 'as_total'" not in log
    assert amounts() == [1, 7, 15]
    assert carrying_job().execute_in_process(instance=instance, partition_key=DAYS[-1]).success
    assert amounts() == [1, 7, 15]


def test_a_stage_that_has_another_name_since_goes_on_from_the_state_of_its_operators(instance):
    def run(names, **partition):
        pipeline = Pipeline("sales")
        incoming = pipeline.from_source(CsvSource(str(HOME / "in"), Sale, name="incoming").partitioned_by("at"))
        totals = incoming.map(as_total).name(names[0]).key_by("shop").reduce(add).uid("adding").name(names[1])
        totals.rebalance().map(checked).name("checked").sink_to(DeltaSink(str(HOME / "table"), name="table"))
        definitions = unified_definitions(
            BatchDeployment(pipeline, partitions=DAILY, carry_state=True, retry_policy=None),
            resources=resources(HOME),
        )
        job = definitions.resolve_job_def("sales_batch")
        return job.execute_in_process(instance=instance, raise_on_error=False, **partition)

    assert run(("first", "totals"), tags=whole_range(*DAYS[:2])).success
    assert run(("head", "sums"), partition_key=DAYS[2]).success
    assert amounts() == [1, 7, 15]
    shutil.rmtree(HOME / "store/sales/sums")
    again = run(("head", "sums"), partition_key="2013-03-12")
    (failed,) = [event for event in again.all_events if event.is_step_failure]
    assert "it has not been run, or its state was freed" in failed.step_failure_data.error.to_string()


class Lessened(KeyedProcessFunction[str, Total, Total]):
    """Takes 2 off, and says the how-manieth time that is."""

    def open(self, runtime_context):
        self.times = runtime_context.get_state(ValueStateDescriptor("times", int))

    def process_element(self, value, ctx):
        self.times.update((self.times.value() or 0) + 1)
        return [Total(value.shop, str(self.times.value()), value.amount - 2)]


@pytest.mark.a_day(1)
@pytest.mark.parametrize(
    ("iterate", "expected"),
    [
        # from 1, and from 1 + 6
        (iterations.iterate_bounded_streams_until_termination, [(1, -1), (1, 5), (2, 3), (3, 1), (4, -1)]),
        (iterations.iterate_unbounded_streams, [(1, -1), (2, 5), (3, 3), (4, 1), (5, -1)]),
    ],
)
def test_an_iteration_begins_anew_each_day_if_it_is_bounded_and_else_goes_on_in_a_range_and_day_by_day(
    instance, iterate, expected
):
    pipeline = Pipeline("sales")
    incoming = pipeline.from_source(CsvSource(str(HOME / "in"), Sale, name="incoming").partitioned_by("at"))
    totals = incoming.map(as_total).key_by("shop").reduce(add).name("totals")

    def build(variables, data):
        less = variables[0].key_by("shop").process(Lessened())
        return iterations.IterationBodyResult([less.filter(lambda total: total.amount > 0)], [less])

    (less,) = iterate([totals], [], Body(build))
    less.sink_to(DeltaSink(str(HOME / "table"), name="table"))
    deployment = BatchDeployment(
        pipeline, partitions=DAILY, carry_state=True, backfill_policy=BackfillPolicy.single_run(), retry_policy=None
    )
    job = unified_definitions(deployment, resources=resources(HOME)).resolve_job_def("sales_batch")
    for runs in ([{"tags": whole_range(*DAYS[:2])}], [{"partition_key": day} for day in DAYS[:2]]):
        for run in runs:
            assert job.execute_in_process(instance=instance, **run).success
        rows = DeltaTable(str(HOME / "table")).to_pyarrow_table().to_pylist()
        found = sorted((int(row["first"]), row["amount"]) for row in rows)
        assert found == expected
        for name in ("table", "store"):
            shutil.rmtree(HOME / name)


def test_a_stream_goes_on_exactly_where_the_days_have_ended(instance, tmp_path):
    savepoint = str(tmp_path / "savepoint")
    options = launched_with({"execution.savepoint.path": savepoint})
    assert carrying_job().execute_in_process(instance=instance, partition_key=DAYS[0], run_config=options).success
    assert carrying_job().execute_in_process(instance=instance, partition_key=DAYS[1], run_config=options).success
    assert amounts() == [1, 7]
    again = carrying_job().execute_in_process(instance=instance, partition_key=DAYS[0], run_config=options)
    assert again.success
    assert Savepoint.read(savepoint).manifest.partition == DAYS[1]
    says = f"{savepoint} keeps the savepoint after partition {DAYS[1]}, which is later than {DAYS[0]}"
    assert [one.user_message for one in instance.all_logs(again.run_id) if says in one.user_message]
    pipeline = build()
    deployment = StreamingDeployment(
        pipeline, from_savepoint=savepoint, options={"execution.checkpointing.dir": str(tmp_path / "checkpoints")}
    )
    batch = BatchDeployment(pipeline, options={"execution.savepoint.path": savepoint})
    streaming = unified_definitions(batch, deployment).resolve_job_def("sales_streaming")
    assert streaming.execute_in_process(instance=instance).success
    assert amounts() == [1, 7, 15]
    left = instance.fetch_materializations(AssetKey(["sales", "savepoint"]), limit=5).records
    assert [one.asset_materialization.metadata["after partition"].value for one in left] == [DAYS[1], DAYS[0]]
    (began,) = instance.fetch_observations(AssetKey(["sales", "stream"]), limit=5).records
    assert began.asset_observation.metadata["started from"].value == savepoint


def test_stages_that_run_by_themselves_leave_a_savepoint_once_all_of_them_have_run(instance, tmp_path):
    savepoint = str(tmp_path / "savepoint")
    options = launched_with({"execution.savepoint.path": savepoint})

    def left_after(stage, day):
        selected = [AssetKey(["sales", f"{stage}_stage"])]
        assert (
            carrying_job()
            .execute_in_process(instance=instance, partition_key=day, asset_selection=selected, run_config=options)
            .success
        )
        found = list((tmp_path / "savepoint").glob("manifest.json"))
        return Savepoint.read(savepoint).manifest.partition if found else None

    assert [left_after("as_total", DAYS[0]), left_after("totals", DAYS[0])] == [None, DAYS[0]]
    assert [left_after("as_total", DAYS[1]), left_after("totals", DAYS[1])] == [DAYS[0], DAYS[1]]
    assert [left_after("as_total", DAYS[0]), left_after("totals", DAYS[0])] == [DAYS[1], DAYS[1]]


def test_a_run_that_has_more_stages_than_assets_leaves_its_savepoint(spark, tmp_path):
    pipeline = Pipeline("words")
    words = pipeline.from_collection([("a", 1), ("a", 2)], tuple[str, int], "words")
    words.key_by(0).sum(1).uid("sums").union(words).print("out")
    definitions = unified_definitions(
        BatchDeployment(pipeline, retry_policy=None),
        resources=resources(tmp_path),
    )
    options = {"execution.batch-shuffle-mode": "ALL_EDGES_BLOCKING", "execution.savepoint.path": str(tmp_path / "left")}
    with DagsterInstance.ephemeral() as instance:
        job = definitions.resolve_job_def("words_batch")
        config = launched_with(options)
        assert job.execute_in_process(instance=instance, run_config=config).success
    assert Savepoint.read(str(tmp_path / "left")).keyed_state("sums").num_rows == 1


def test_a_lost_intermediate_of_a_partition_is_recomputed_for_that_partition_alone(instance):
    BROKEN.write_text("2013-03-11")
    first = job().execute_in_process(instance=instance, tags=whole_range(DAYS[0], DAYS[-1]), raise_on_error=False)
    BROKEN.unlink()
    shutil.rmtree(HOME / "store" / "sales" / "totals" / "2013-03-11")
    with reexecuted(job, instance, first.run_id, tags=whole_range(DAYS[0], DAYS[-1])) as again:
        assert again.success
        recomputed = [e.user_message for e in instance.all_logs(again.run_id) if "recomputing" in e.user_message]
    assert [line.split(":")[0] for line in recomputed] == ["recomputing stage 'totals' of partition 2013-03-11"]
    assert amounts() == [1, 6, 8]


def test_a_stage_by_itself_reads_the_latest_intermediate_of_its_partition(instance):
    assert job().execute_in_process(instance=instance, partition_key=DAYS[0]).success
    assert job().execute_in_process(instance=instance, partition_key=DAYS[1]).success
    alone = job().execute_in_process(
        instance=instance, partition_key=DAYS[0], asset_selection=[AssetKey(["sales", "table"])]
    )
    assert alone.success
    assert not any("recomputing" in e.user_message for e in instance.all_logs(alone.run_id))
    assert amounts() == [1, 6]


def test_dynamic_partitions(instance):
    instance.add_dynamic_partitions("shops", ["north", "sales", "south"])
    with execute_job(reconstructable(shops_job), instance, tags={"dagster/partition": "sales"}) as done:
        assert done.success
    assert amounts() == [1, 2, 4, 8]
    assert "rows per partition" in materialized(instance, ["shops", "table"])["sales"]


def test_lineage_leads_from_the_users_asset_to_the_users_asset():
    graph = defs.resolve_asset_graph()
    first = graph.get(AssetKey(["sales", "as_total_stage"]))
    assert first.parent_keys == {AssetKey("exports")}
    assert type(first.partition_mappings[AssetKey("exports")]).__name__ == "TimeWindowPartitionMapping"
    assert graph.get(AssetKey(["sales", "table"])).child_keys == {AssetKey("report")}
    assert {graph.get(k).partitions_def for k in graph.materializable_asset_keys} == {DAILY}


def test_column_lineage_leads_to_the_users_asset_that_a_source_reads(spark, tmp_path):
    (tmp_path / "sales.csv").write_text("shop,at,amount\nnorth,2013-03-09,3\n")
    pipeline = Pipeline("lineage")
    sales = pipeline.from_source(CsvSource(str(tmp_path / "sales.csv"), Sale, name="incoming"))
    sales.where(F.col("amount") > 0).rebalance().where(F.col("amount") > 1).sink_to(
        DeltaSink(str(tmp_path / "table"), name="table", mode="append")
    )
    defs = unified_definitions(
        BatchDeployment(pipeline, upstream={"incoming": "exports"}), resources=resources(tmp_path)
    )
    with DagsterInstance.ephemeral() as instance, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        done = defs.resolve_job_def("lineage_batch").execute_in_process(instance=instance)
    assert [w for w in warned if "deprecated" in str(w.message)] == []
    graph = defs.resolve_asset_graph()
    for event in done.get_asset_materialization_events():
        lineage = event.materialization.metadata["dagster/column_lineage"].value.deps_by_column
        parents = {dep.asset_key for deps in lineage.values() for dep in deps}
        assert parents == graph.get(event.asset_key).parent_keys


def test_definitions_name_an_upstream_that_is_not_there():
    pipeline = Pipeline("ticks")
    pipeline.from_source(RateSource(name="rate")).print()
    says = "upstream names the source 'rates', and there are rate; did you mean 'rate'"
    with pytest.raises(PipelineError, match=says):
        unified_definitions(StreamingDeployment(pipeline, upstream={"rates": "exports"}))


def test_a_time_zone_may_be_given_beside_the_partitions():
    daily = in_zone("days", DailyPartitionsDefinition("2013-03-09", end_date="2013-03-12"), "America/New_York")
    assert daily.get_partition_keys() == DAYS
    day = slice_of(daily, "2013-03-10").dimensions[""]
    assert (day.start.isoformat(), day.end - day.start) == ("2013-03-10T00:00:00-05:00", timedelta(hours=23))
    both = MultiPartitionsDefinition(
        {"day": DailyPartitionsDefinition("2013-03-09"), "shop": StaticPartitionsDefinition(["north"])}
    )
    part = slice_of(in_zone("days", both, "Europe/Vienna"), "2013-03-31|north")
    assert part.dimensions["day"].end.isoformat() == "2013-04-01T00:00:00+02:00"
    assert in_zone("days", DAILY, "America/New_York") is DAILY


@pytest.mark.parametrize(
    ("zone", "first", "last"),
    [
        ("America/Havana", date(2008, 3, 14), date(2008, 3, 19)),  # 00:00 on the 16th is skipped
        ("America/Sao_Paulo", date(2017, 10, 13), date(2017, 10, 18)),
        ("Africa/Cairo", date(2010, 9, 8), date(2010, 10, 2)),
        ("Asia/Beirut", date(2009, 3, 27), date(2009, 3, 31)),
        ("Pacific/Apia", date(2011, 12, 27), date(2012, 1, 3)),  # the 30th is skipped
        ("Europe/Vienna", date(2013, 3, 29), date(2013, 4, 2)),
    ],
)
@pytest.mark.parametrize("kind", [DailyPartitionsDefinition, HourlyPartitionsDefinition])
def test_windows_are_those_of_dagster_and_follow_each_other_in_any_time_zone(zone, first, last, kind):
    hourly = "-00:00" if kind is HourlyPartitionsDefinition else ""
    partitions = kind(f"{first}{hourly}", end_date=f"{last}{hourly}", timezone=zone)
    keys = [key for key in partitions.get_partition_keys() if key != "2011-12-30"]
    windows = [slice_of(partitions, key).time() for key in keys]
    asked = [partitions.time_window_for_partition_key(key) for key in keys]
    moments = [(w.start.timestamp(), w.end.timestamp()) for w in windows]
    assert moments == [(w.start.timestamp(), w.end.timestamp()) for w in asked]
    assert all(start < end for start, end in moments)
    assert all(before[1] == after[0] for before, after in pairwise(moments))
    assert [key_after(partitions, key) for key in keys] == [*keys[1:], None]
    assert [key_before(partitions, key) for key in keys] == [None, *keys[:-1]]


def test_a_day_that_the_time_zone_skips_has_no_records_and_the_day_before_has_all_of_its_own():
    samoa = DailyPartitionsDefinition("2011-12-25", end_date="2012-01-05", timezone="Pacific/Apia")
    before, skipped, after = (slice_of(samoa, f"2011-12-{day}").time() for day in (29, 30, 31))
    assert before.end - before.start == timedelta(days=1)
    assert before.end == skipped.start == skipped.end == after.start
    assert (key_before(samoa, "2011-12-30"), key_after(samoa, "2011-12-30")) == ("2011-12-29", "2011-12-31")


def test_a_time_zone_that_contradicts_the_partitions_is_an_error():
    pipeline = Pipeline("sales")
    with pytest.raises(PipelineError, match="timezone='Mars/Olympus' is not the name of a time zone"):
        unified_definitions(BatchDeployment(pipeline, partitions=DAILY, timezone="Mars/Olympus"))
    with pytest.raises(
        PipelineError, match="timezone='Europe/Vienna', and the partitions are in America/New_York; say it in one place"
    ):
        unified_definitions(BatchDeployment(pipeline, partitions=DAILY, timezone="Europe/Vienna"))
    with pytest.raises(PipelineError, match="goes with partitions in time"):
        unified_definitions(BatchDeployment(pipeline, timezone="Europe/Vienna"))


@pytest.mark.parametrize(
    ("excluded", "days"),
    [
        ([], [1, 2, 3, 4, 5, 6, 7]),
        (["0 0 * * 6", "0 0 * * 0"], [1, 2, 3, 4, 5]),
        ([datetime(2024, 1, 4)], [1, 2, 3, 5, 6, 7]),
    ],
)
def test_partitions_follow_each_other_without_the_excluded_ones_to_the_last(excluded, days):
    partitions = DailyPartitionsDefinition("2024-01-01", end_date="2024-01-08", exclusions=excluded)
    keys = [f"2024-01-{day:02}" for day in days]
    assert partitions.get_partition_keys() == keys
    assert [key_after(partitions, key) for key in keys] == [*keys[1:], None]
    assert [key_before(partitions, key) for key in keys] == [None, *keys[:-1]]


def test_partitions_that_do_not_end_have_no_last_one():
    partitions = DailyPartitionsDefinition("2024-01-01", exclusions=["0 0 * * 6"])
    assert key_after(partitions, "2124-01-07") == "2124-01-09"
