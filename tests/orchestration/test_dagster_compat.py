"""The names that the library uses of Dagster beyond its public ones are there, and what it relies on holds."""

import importlib
import warnings
from datetime import timedelta

from dagster import BackfillPolicy, Definitions, RetryPolicy, asset, job, op

from dagster_unified.api import Pipeline
from dagster_unified.orchestration import BatchDeployment, Checks, unified_definitions
from dagster_unified.orchestration import _dagster_compat as compat


def test_each_name_is_there():
    assert [name for name in compat.__all__ if not hasattr(compat, name)] == []
    importlib.import_module(compat.STORAGE_MODULE)


def test_an_interrupted_step_is_not_tried_again_and_ends_the_run():
    tried = []

    @op(retry_policy=RetryPolicy(max_retries=3))
    def first():
        tried.append("first")
        raise compat.StepInterruptedError

    @op
    def other():
        tried.append("other")

    @job
    def both():
        first()
        other()

    assert not both.execute_in_process(raise_on_error=False).success
    assert tried == ["first"]


def test_loading_a_pipeline_warns_of_nothing_and_the_users_own_use_is_warned_of():
    pipeline = Pipeline("words")
    pipeline.from_collection([("a", 1)], name="words").key_by(0).sum(1).print("out")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fresh = Checks(fresh_within=timedelta(days=1))
        batch = BatchDeployment(pipeline, backfill_policy=BackfillPolicy.single_run(), checks=fresh)
        unified_definitions(batch).get_repository_def()
        assert [str(w.message) for w in seen] == []

        @asset(backfill_policy=BackfillPolicy.single_run())
        def own():
            pass

        Definitions(assets=[own])
        assert ["`backfill_policy`" in str(w.message) for w in seen] == [True]
