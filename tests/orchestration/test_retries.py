"""A stage that fails is tried three times more, later each time; one whose error would come again is not."""

import pytest
from dagster import AssetKey, DagsterEventType, DagsterInstance

from dagster_unified.api import Pipeline
from dagster_unified.errors import MissingRequirementError, StageError
from dagster_unified.orchestration import IntermediatesResource, unified_definitions
from dagster_unified.orchestration.batch_deployment import DEFAULT_RETRY


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


def attempts(tmp_path, cluster):
    """How often the stage was tried again, and whether the run ended well."""
    pipeline = Pipeline("numbers")
    pipeline.from_collection([1, 2], name="ones").print()
    definitions = unified_definitions(
        pipeline, resources={"spark": cluster, "intermediates": IntermediatesResource(path=str(tmp_path))}
    )
    with DagsterInstance.ephemeral() as instance:
        result = definitions.resolve_job_def("numbers_batch").execute_in_process(
            instance=instance, raise_on_error=False
        )
        retried = [e for e in result.all_events if e.event_type is DagsterEventType.STEP_UP_FOR_RETRY]
        assert (instance.get_latest_materialization_event(AssetKey(["numbers", "ones"])) is not None) == result.success
    return len(retried), result.success


def test_an_error_that_may_pass_is_tried_again(spark, tmp_path):
    assert attempts(tmp_path, Cluster(spark, StageError("the cluster is away"), failing=1)) == (1, True)


def test_an_error_that_would_come_again_is_not(tmp_path):
    assert attempts(tmp_path, Cluster(None, MissingRequirementError("there is no Java"), failing=9)) == (0, False)


@pytest.mark.parametrize(("attempt", "least", "most"), [(1, 0, 2), (2, 2, 4), (3, 6, 8)])
def test_each_wait_is_about_twice_as_long_as_the_one_before(attempt, least, most):
    assert DEFAULT_RETRY.max_retries == 3
    assert least <= DEFAULT_RETRY.calculate_delay(attempt) <= most
