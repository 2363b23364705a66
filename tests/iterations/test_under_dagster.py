"""An iteration as a stage of a Dagster run: rounds in its log, what became of them, and re-execution from failure."""

import pytest
from dagster import DagsterInstance, ReexecutionOptions, execute_job, reconstructable
from deltalake import DeltaTable

from tests.iterations.dagster_job import BROKEN, HOME, job


@pytest.fixture
def instance(spark, tmp_path):
    with DagsterInstance.local_temp(str(tmp_path)) as instance:
        yield instance


def log(instance, run_id):
    return [entry.user_message for entry in instance.all_logs(run_id)]


def test_a_re_execution_goes_on_after_the_last_round(instance):
    BROKEN.touch()
    first = job().execute_in_process(instance=instance, raise_on_error=False)
    assert not first.success
    assert any("iteration 'Countdown', epoch 3: 2 records fed back" in line for line in log(instance, first.run_id))
    BROKEN.unlink()
    options = ReexecutionOptions.from_failure(first.run_id, instance)
    with execute_job(reconstructable(job), instance, reexecution_options=options) as again:
        assert again.success
        events = [e for e in again.all_events if e.is_step_materialization]
        (shown,) = [
            m
            for m in (e.step_materialization_data.materialization.metadata for e in events)
            if "rounds of Countdown" in m
        ]
        lines = log(instance, again.run_id)
    assert any("iteration 'Countdown' of stage 'table' goes on after epoch 3" in line for line in lines)
    assert not any("epoch 3: " in line for line in lines)
    assert shown["rounds of Countdown"].value == 7
    assert shown["why Countdown ended"].value == "the termination criteria had no record in epoch 6"
    assert shown["records by round of Countdown"].value.startswith("![records by round](data:image/png")
    table = DeltaTable(str(HOME / "table")).to_pyarrow_table()
    assert sorted(table.column(0).to_pylist()) == sorted([*range(2, 9), *range(1, 8)])
    assert list((HOME / "store").rglob("iteration-*")) == []
