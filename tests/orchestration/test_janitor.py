"""The janitor under Dagster: what runs and backfills need stays, the rest goes."""

from datetime import timedelta

import pytest
from dagster import AssetKey, DagsterInstance, DagsterRunStatus, in_process_executor

from dagster_unified.api import Pipeline
from dagster_unified.orchestration import (
    BatchDeployment,
    Retention,
    unified_definitions,
)
from tests.orchestration.support import resources

FAIL = {"last": False}


def refuse(value: int) -> int:
    if FAIL["last"]:
        raise OSError("the service is away")
    return value


@pytest.fixture
def dagster(spark, tmp_path):
    pipeline = Pipeline("numbers")
    doubled = pipeline.from_collection([1, 2, 3]).map(lambda n: 2 * n, output_type=int).name("doubled").rebalance()
    doubled.map(refuse).print("shown")
    definitions = unified_definitions(
        BatchDeployment(pipeline, retry_policy=None, retention=Retention(max_age=timedelta(0))),
        resources=resources(tmp_path),
        executor=in_process_executor,
    )
    FAIL["last"] = False
    with DagsterInstance.ephemeral() as instance:
        yield definitions, instance


def run(dagster, **options):
    definitions, instance = dagster
    return definitions.resolve_job_def("numbers_batch").execute_in_process(
        instance=instance, raise_on_error=False, **options
    )


def clean(dagster, dry_run=False):
    """What the janitor says."""
    definitions, instance = dagster
    config = {"ops": {"numbers_free_intermediates": {"config": {"dry_run": dry_run}}}}
    result = definitions.resolve_job_def("numbers_janitor").execute_in_process(instance=instance, run_config=config)
    (output,) = [e for e in result.all_node_events if e.is_successful_output]
    return {k: v.value for k, v in output.step_output_data.metadata.items() if k in ("intermediates", "kept", "bytes")}


def test_after_a_run_all_goes_and_a_dry_run_only_says_so(dagster, tmp_path):
    run(dagster)
    said = clean(dagster, dry_run=True)
    assert (said["intermediates"], said["kept"]) == (2, 0)
    assert said["bytes"] > 0
    assert list((tmp_path / "store").rglob("*.parquet"))
    assert clean(dagster) == said
    assert not list((tmp_path / "store").rglob("*.parquet"))
    assert clean(dagster)["intermediates"] == 0


def test_what_a_failed_run_may_be_executed_again_from_stays_until_it_was(dagster, tmp_path):
    FAIL["last"] = True
    failed = run(dagster)
    assert clean(dagster)["intermediates"] == 0
    FAIL["last"] = False
    definitions, instance = dagster
    job = definitions.resolve_job_def("numbers_batch")
    again = job.execute_in_process(instance=instance, asset_selection=[AssetKey(["numbers", "shown_stage"])])
    assert again.success
    clean(dagster)
    assert list((tmp_path / "store").rglob("*.parquet"))  # that one was no re-execution
    instance.delete_run(failed.run_id)
    clean(dagster)
    assert not list((tmp_path / "store").rglob("*.parquet"))


def test_what_a_queued_run_may_read_stays(dagster):
    run(dagster)
    definitions, instance = dagster
    job = definitions.resolve_job_def("numbers_batch")
    queued = instance.create_run_for_job(
        job, status=DagsterRunStatus.NOT_STARTED, asset_selection={AssetKey(["numbers", "shown_stage"])}
    )
    assert clean(dagster)["intermediates"] == 0
    instance.report_run_canceled(queued)
    assert clean(dagster)["intermediates"] == 2
