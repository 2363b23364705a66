"""A stage that fails is tried three times more, later each time; one whose error would come again is not."""

import pytest
from dagster import AssetKey, DagsterEventType, DagsterInstance

from dagster_unified.api import Pipeline
from dagster_unified.engine.events import ignore_events
from dagster_unified.errors import MissingRequirementError, StageError
from dagster_unified.orchestration import IntermediatesResource, unified_definitions
from dagster_unified.orchestration.deployments import DEFAULT_RETRY
from dagster_unified.orchestration.launch import launch
from tests.execution.test_jobs import AwaySource


class Cluster:
    """A resource that has a session once it has been asked `failing` times."""

    def __init__(self, session, error, failing):
        self._session, self._error, self._failing = session, error, failing

    @property
    def spark_session(self):
        if self._failing:
            self._failing -= 1
            raise self._error
        return self._session


def attempts(tmp_path, cluster, **strategy):
    """How often the stage was tried again, and whether the run ended well."""
    pipeline = Pipeline("numbers")
    pipeline.from_collection([1, 2], name="ones").print()
    definitions = unified_definitions(
        pipeline, resources={"spark": cluster, "intermediates": IntermediatesResource(path=str(tmp_path))}
    )
    with DagsterInstance.ephemeral() as instance:
        result = definitions.resolve_job_def("numbers_batch").execute_in_process(
            instance=instance,
            raise_on_error=False,
            run_config={
                "resources": {
                    "execution": {"config": {f"restart-strategy.{k.replace('_', '-')}": v for k, v in strategy.items()}}
                }
            },
        )
        retried = [e for e in result.all_events if e.event_type is DagsterEventType.STEP_UP_FOR_RETRY]
        assert (
            instance.get_latest_materialization_event(AssetKey(["numbers", "ones_stage"])) is not None
        ) == result.success
    return len(retried), result.success


def test_an_error_that_may_pass_is_tried_again(spark, tmp_path):
    assert attempts(tmp_path, Cluster(spark, StageError("the cluster is away"), failing=1)) == (1, True)


FIXED = {"type": "fixed-delay", "fixed-delay.attempts": 2, "fixed-delay.delay": "10 ms"}


@pytest.mark.a_day(1)
@pytest.mark.parametrize(
    ("strategy", "failing", "expected"),
    [
        ({"type": "none"}, 1, (0, False)),
        (FIXED, 2, (2, True)),
        (FIXED, 3, (2, False)),
    ],
)
def test_a_restart_strategy_that_is_set_at_launch_goes_before_the_retry_policy(
    spark, tmp_path, strategy, failing, expected
):
    assert attempts(tmp_path, Cluster(spark, StageError("the cluster is away"), failing), **strategy) == expected


def test_no_restart_strategy_tries_again_what_would_come_again(tmp_path):
    error = MissingRequirementError("there is no Java")
    assert attempts(tmp_path, Cluster(None, error, failing=9), **FIXED) == (0, False)


@pytest.mark.a_day(1)
@pytest.mark.parametrize(("failing", "sentence"), [(1, None), (2, "all 1 attempts of restart-strategy.fixed-delay")])
def test_a_stream_of_the_command_line_obeys_the_restart_strategy(spark, tmp_path, failing, sentence):
    pipeline = Pipeline("away")
    pipeline.from_source(AwaySource(failing)).print()
    options = {
        "execution.runtime-mode": "STREAMING",
        "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
        "restart-strategy.type": "fixed-delay",
        "restart-strategy.fixed-delay.attempts": 1,
        "restart-strategy.fixed-delay.delay": "10 ms",
    }
    error = launch(pipeline, options, spark.sparkContext.master, None, str(tmp_path / "store"), ignore_events, {}).error
    assert (error is None) if sentence is None else (sentence in error and "the system is away: 2" in error)


@pytest.mark.parametrize(("attempt", "least", "most"), [(1, 0, 2), (2, 2, 4), (3, 6, 8)])
def test_each_wait_is_about_twice_as_long_as_the_one_before(attempt, least, most):
    assert DEFAULT_RETRY.max_retries == 3
    assert least <= DEFAULT_RETRY.calculate_delay(attempt) <= most
