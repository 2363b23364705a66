"""The resource `intermediates`, where it is not one or cannot be one: an error at once, not a retry."""

import re

import pytest
from dagster import DagsterInstance

from dagster_unified.api import Pipeline
from dagster_unified.orchestration import IntermediatesResource, unified_definitions


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (IntermediatesResource(path=""), "intermediate storage: '' is not a path"),
        (IntermediatesResource(path="nosuch://bucket/x"), "intermediate storage: .*nosuch"),
        ("/tmp/x", "the resource 'intermediates' is a str; give an IntermediatesResource"),
    ],
)
def test_what_is_no_store_ends_the_run_at_once(given, message):
    pipeline = Pipeline("numbers")
    pipeline.from_collection([1, 2]).print()
    definitions = unified_definitions(pipeline, resources={"intermediates": given})
    with DagsterInstance.ephemeral() as instance:
        ended = definitions.resolve_job_def("numbers_batch").execute_in_process(instance=instance, raise_on_error=False)
    (failed,) = [event for event in ended.all_events if event.is_step_failure]
    assert not [event for event in ended.all_events if event.is_step_up_for_retry]
    assert re.search(message, failed.step_failure_data.user_failure_data.description)
