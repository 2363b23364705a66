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


def jobs(definitions):
    return sorted(job.name for job in definitions.get_repository_def().get_all_jobs() if not job.name.startswith("__"))


def test_each_pipeline_has_its_own_partitions():
    definitions = unified_definitions(
        BatchDeployment(sales("days"), partitions=DAILY), StreamingDeployment(sales("live", monitor=True))
    )
    assert jobs(definitions) == ["days_batch", "days_janitor", "live_control", "live_streaming"]
    stages = [node for node in definitions.resolve_asset_graph().asset_nodes if node.is_materializable]
    assert [(node.key.path[0], node.partitions_def) for node in stages] == [("days", DAILY)]


def test_a_stream_that_is_deployed_alone_has_no_stages():
    pipeline = Pipeline("numbers")
    pipeline.from_collection([1, 2], int).print()
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


def test_a_batch_deployment_of_an_unbounded_pipeline_is_an_error_that_names_the_source():
    with pytest.raises(
        PipelineError,
        match=(
            "sales: source 'files' is unbounded, and a BatchDeployment needs bounded sources; use a StreamingDeployment"
        ),
    ):
        unified_definitions(BatchDeployment(sales(monitor=True)))


def test_two_deployments_of_one_kind_and_two_pipelines_of_one_name_are_errors():
    pipeline = sales(monitor=True)
    with pytest.raises(PipelineError, match="sales has two deployments of one kind: StreamingDeployment"):
        unified_definitions(StreamingDeployment(pipeline), StreamingDeployment(pipeline))
    with pytest.raises(PipelineError, match="two pipelines are named 'sales'"):
        unified_definitions(pipeline, sales(monitor=True))


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
    ],
)
def test_what_is_of_another_type_is_said_to_be(made, says):
    with pytest.raises(ConfigurationError, match=says):
        made()


def test_what_goes_for_the_assets_of_both_deployments_is_given_once():
    pipeline = Pipeline("numbers")
    pipeline.from_collection([1, 2], int).print()
    with pytest.raises(
        ConfigurationError, match="numbers: both its BatchDeployment and its StreamingDeployment give checks"
    ):
        unified_definitions(
            BatchDeployment(pipeline, checks=Checks()), StreamingDeployment(pipeline, checks=Checks(schema=False))
        )


def test_the_sinks_of_a_stream_depend_on_the_users_own_assets():
    ours = unified_definitions(StreamingDeployment(sales(monitor=True), upstream={"files": "exports"}))
    graph = Definitions.merge(ours, Definitions(assets=[AssetSpec("exports")])).resolve_asset_graph()
    assert graph.get(AssetKey(["sales", "print"])).parent_keys == {AssetKey("exports")}
    assert not graph.has(AssetKey(["sales", "sources", "files"]))


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
    external = graph.get(AssetKey(["sales", "sources", "sales"]))
    written = graph.get(AssetKey(["sales", "counted"]))
    assert external.kinds == {"kafka"}
    assert written.kinds == ({"spark", "kafka", "postgres"} if deployment is BatchDeployment else {
        "spark", "streaming", "postgres"
    })  # fmt: skip
    assert written.parent_keys == {external.key}
    for shown in (external, written) if deployment is StreamingDeployment else (external,):
        columns = [(c.name, c.type, c.constraints.nullable) for c in shown.metadata["dagster/column_schema"].columns]
        assert columns == [("shop", "string", False), ("amount", "int64", True)]


def test_a_deployment_that_cannot_be_is_an_error_with_the_pipelines_name():
    with pytest.raises(
        PipelineError,
        match="sales: carry_state hands state on from one partition in time to the next, and there is no partitions",
    ):
        BatchDeployment(sales(), carry_state=True)
    with pytest.raises(ConfigurationError, match="sales: reuse is 'never' or 'fingerprint', not 'always'"):
        BatchDeployment(sales(), reuse="always")


def test_a_stream_that_cannot_run_is_refused_when_the_code_location_loads():
    time = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(lambda n, _: n)
    pipeline = Pipeline("numbers")
    given = pipeline.from_collection([1, 2], int, name="given")
    given.assign_timestamps_and_watermarks(time.with_watermark_alignment("all", timedelta(minutes=1))).print()
    with pytest.raises(UnsupportedError, match=r"numbers: .* source 'given' cannot wait for others"):
        unified_definitions(StreamingDeployment(pipeline))


@pytest.mark.parametrize(
    ("deployment", "given", "message"),
    [
        (BatchDeployment, {"schedule": "0 3 * * *"}, r"schedule is a BatchSchedule, not '0 3 \* \* \*'"),
        (BatchDeployment, {"checks": True}, "checks is a Checks, not True"),
        (BatchDeployment, {"partitions": "daily"}, "partitions is a PartitionsDefinition, not 'daily'"),
        (BatchDeployment, {"upstream": ["given"]}, r"upstream is a Mapping, not \['given'\]"),
        (StreamingDeployment, {"checks": True}, "checks is a Checks, not True"),
        (StreamingDeployment, {"options": "x"}, "options is a Mapping, not 'x'"),
    ],
)
def test_arguments_of_other_types_are_errors_with_their_name(deployment, given, message):
    with pytest.raises(ConfigurationError, match=f"^sales: {message}"):
        deployment(sales(), **given)


def test_stages_depend_on_each_other_as_assets():
    pipeline = Pipeline("numbers")
    pipeline.from_collection([("a", 1), ("b", 2)], name="pairs").key_by(0).sum(1).name("sums").print("out")
    definitions = unified_definitions(pipeline)
    stages = {
        key.path[-1]: definitions.resolve_assets_def(key)
        for key in definitions.resolve_asset_graph().materializable_asset_keys
    }
    assert stages["out"].dependency_keys == {AssetKey(["numbers", "pairs"])}
