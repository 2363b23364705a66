"""What `unified_definitions` is given: pipelines, and their deployments in BATCH and STREAMING."""

from datetime import timedelta
from typing import NamedTuple

import pytest
from dagster import AssetKey, AssetSpec, DailyPartitionsDefinition, Definitions

from dagster_unified.api import Pipeline, WatermarkStrategy
from dagster_unified.connectors import CsvSource, KafkaOffsetsInitializer, KafkaSource, PostgresSink
from dagster_unified.errors import ConfigurationError, PipelineError, UnsupportedError
from dagster_unified.orchestration import (
    BatchDeployment,
    BatchSchedule,
    Checks,
    Retention,
    StreamingDeployment,
    unified_definitions,
)

DAILY = DailyPartitionsDefinition("2024-01-01")


def sales(name="sales", **options):
    pipeline = Pipeline(name)
    pipeline.from_source(
        CsvSource(f"/in/{name}/{{start:%Y-%m-%d}}.csv" if not options else f"/in/{name}", int, name="files", **options)
    ).print()
    return pipeline


def numbers():
    pipeline = Pipeline("numbers")
    pipeline.from_collection([1, 2], int).print()
    return pipeline


def jobs(definitions):
    return sorted(job.name for job in definitions.get_repository_def().get_all_jobs() if not job.name.startswith("__"))


def test_each_pipeline_has_its_own_partitions():
    definitions = unified_definitions(
        BatchDeployment(sales("days"), partitions=DAILY), StreamingDeployment(sales("live", monitor=True))
    )
    assert jobs(definitions) == ["days_batch", "days_janitor", "live_control", "live_streaming"]
    stages = [node for node in definitions.resolve_asset_graph().asset_nodes if node.is_materializable]
    assert [(node.key.path[0], node.partitions_def) for node in stages] == [("days", DAILY), ("days", DAILY)]


def test_a_stream_that_is_deployed_alone_has_no_stages():
    pipeline = numbers()
    assert jobs(unified_definitions(StreamingDeployment(pipeline))) == ["numbers_control", "numbers_streaming"]
    assert jobs(unified_definitions(StreamingDeployment(pipeline), pipeline)) == [
        "numbers_batch",
        "numbers_control",
        "numbers_janitor",
        "numbers_streaming",
    ]


def test_intermediates_are_freed_by_age_and_size_unless_somebody_wants_them_all():
    (schedule,) = unified_definitions(sales("days")).schedules
    assert (schedule.name, schedule.default_status.value) == ("days_janitor_schedule", "RUNNING")
    job = unified_definitions(sales("days")).resolve_job_def("days_batch")
    assert "kept for 1 week and up to 100 GB in all, and then freed by its schedule (30 3 * * *)" in job.description
    everything = unified_definitions(BatchDeployment(sales("days"), retention=None))
    assert not everything.schedules
    assert "All intermediates are kept." in everything.resolve_job_def("days_batch").description


LIVE, NUMBERS = sales(monitor=True), numbers()


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: BatchSchedule(offset=3600), "BatchSchedule: offset is a timedelta, not 3600; import it from datetime"),
        (lambda: Retention(max_age="7 d"), "Retention: max_age is a timedelta, not '7 d'"),
        (lambda: Checks(fresh_within=3600), "Checks: fresh_within is a timedelta, not 3600"),
        (lambda: Checks(rows_within="50%"), "checks: rows_within is a number such as 0.5, not negative, and not '50%'"),
        (lambda: BatchDeployment("sales"), "a BatchDeployment is of a pipeline, and not of 'sales'"),
        (lambda: StreamingDeployment("sales"), "a StreamingDeployment is of a pipeline, and not of 'sales'"),
        (lambda: unified_definitions([Pipeline("sales")]), r"takes pipelines and deployments of pipelines, .* not \["),
        (
            lambda: BatchDeployment(LIVE, schedule="0 3 * * *"),
            r"^sales: schedule is a BatchSchedule, not '0 3 \* \* \*'",
        ),
        (lambda: BatchDeployment(LIVE, checks=True), "^sales: checks is a Checks, not True"),
        (
            lambda: BatchDeployment(LIVE, partitions="daily"),
            "^sales: partitions is a PartitionsDefinition, not",
        ),
        (lambda: BatchDeployment(LIVE, upstream=["given"]), r"^sales: upstream is a Mapping, not \['given'\]"),
        (lambda: BatchDeployment(LIVE, reuse="always"), "^sales: reuse is 'never' or 'fingerprint', not 'always'"),
        (lambda: StreamingDeployment(LIVE, checks=True), "^sales: checks is a Checks, not True"),
        (lambda: StreamingDeployment(LIVE, options="x"), "^sales: options is a Mapping, not 'x'"),
        (
            lambda: unified_definitions(
                BatchDeployment(NUMBERS, checks=Checks()), StreamingDeployment(NUMBERS, checks=Checks(schema=False))
            ),
            "numbers: both its BatchDeployment and its StreamingDeployment give checks",
        ),
    ],
)
def test_arguments_that_cannot_be_are_errors_with_their_name(made, says):
    with pytest.raises(ConfigurationError, match=says):
        made()


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (
            lambda: unified_definitions(BatchDeployment(LIVE)),
            "sales: source 'files' is unbounded, and a BatchDeployment needs bounded sources; use a Stream",
        ),
        (
            lambda: unified_definitions(StreamingDeployment(LIVE), StreamingDeployment(LIVE)),
            "sales has two deployments of one kind: StreamingDeployment",
        ),
        (lambda: unified_definitions(LIVE, sales(monitor=True)), "two pipelines are named 'sales'"),
        (
            lambda: BatchDeployment(sales(), carry_state=True),
            "sales: carry_state hands state on from one partition in time to the next, and there is no partitions",
        ),
    ],
)
def test_pipelines_that_cannot_be_deployed_so_are_errors(made, says):
    with pytest.raises(PipelineError, match=says):
        made()


def test_the_sinks_of_a_stream_depend_on_the_users_own_assets():
    ours = unified_definitions(StreamingDeployment(sales(monitor=True), upstream={"files": "exports"}))
    graph = Definitions.merge(ours, Definitions(assets=[AssetSpec("exports")])).resolve_asset_graph()
    assert graph.get(AssetKey(["sales", "print"])).parent_keys == {AssetKey("exports")}
    assert not graph.has(AssetKey(["sales", "files_source"]))


class Counted(NamedTuple):
    shop: str
    amount: int | None


@pytest.mark.parametrize("deployment", [BatchDeployment, StreamingDeployment])
def test_what_is_outside_of_dagster_shows_its_kind_and_its_columns(deployment):
    pipeline = Pipeline("sales")
    offsets = KafkaOffsetsInitializer.latest()
    source = KafkaSource("sales", Counted, "broker:9092", bounded=offsets if deployment is BatchDeployment else None)
    pipeline.from_source(source).sink_to(PostgresSink("counted", "postgresql://db.example/shop"))
    graph = unified_definitions(deployment(pipeline)).resolve_asset_graph()
    external = graph.get(AssetKey(["sales", "sales_source"]))
    written = graph.get(AssetKey(["sales", "counted"]))
    assert external.kinds == {"kafka"}
    in_batch = deployment is BatchDeployment
    assert written.kinds == {"table", "postgres"} | (set() if in_batch else {"streaming"})
    assert written.parent_keys == {AssetKey(["sales", "counted_stage"]) if in_batch else external.key}
    for shown in (external, written):
        columns = [(c.name, c.type, c.constraints.nullable) for c in shown.metadata["dagster/column_schema"].columns]
        assert columns == [("shop", "string", False), ("amount", "int64", True)]


def test_a_stream_that_cannot_run_is_refused_when_the_code_location_loads():
    time = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(lambda n, _: n)
    pipeline = Pipeline("numbers")
    given = pipeline.from_collection([1, 2], int, name="given")
    given.assign_timestamps_and_watermarks(time.with_watermark_alignment("all", timedelta(minutes=1))).print()
    with pytest.raises(UnsupportedError, match=r"numbers: .* source 'given' cannot wait for others"):
        unified_definitions(StreamingDeployment(pipeline))


def test_stages_depend_on_each_other_as_assets():
    pipeline = Pipeline("numbers")
    pipeline.from_collection([("a", 1), ("b", 2)], name="pairs").key_by(0).sum(1).name("sums").print("out")
    graph = unified_definitions(pipeline).resolve_asset_graph()
    assert graph.get(AssetKey(["numbers", "out_stage"])).parent_keys == {AssetKey(["numbers", "pairs_stage"])}
