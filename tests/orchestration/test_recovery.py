"""Failures in the last stage, lost intermediates, and what runs again: through Dagster, on Spark."""

import logging
import shutil
import sqlite3

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dagster import DagsterInstance, ReexecutionOptions, execute_job, reconstructable
from deltalake import DeltaTable

from tests.orchestration import recovery_job
from tests.orchestration.recovery_job import (
    BROKEN,
    FACTOR,
    HOME,
    LATE,
    arrived_job,
    job,
    looping_job,
    several_sinks_job,
)
from tests.orchestration.support import launched_with, reexecuted


@pytest.fixture
def instance(spark, tmp_path):
    for name in ("table", "store"):
        shutil.rmtree(HOME / name, ignore_errors=True)
    BROKEN.unlink(missing_ok=True)
    with DagsterInstance.local_temp(str(tmp_path)) as instance:
        yield instance


def values():
    return sorted(pa.table(DeltaTable(str(HOME / "table")).to_pyarrow_table())["value"].to_pylist())


def failed_run(instance):
    BROKEN.touch()
    result = job().execute_in_process(instance=instance, raise_on_error=False)
    BROKEN.unlink()
    assert not result.success
    return result


def steps(result):
    return [e.step_key for e in result.get_step_success_events()]


def test_re_execution_from_failure_runs_only_the_last_stage_whose_error_names_its_place(instance):
    first = failed_run(instance)
    (failure,) = [event for event in first.all_node_events if event.is_step_failure]
    message = failure.step_failure_data.user_failure_data.description
    assert "recovery: stage 'table', operator 'last': OSError: the service is away" in message
    assert f"{recovery_job.__file__}:" in message
    assert "Event(key=" in message
    assert "\tat " not in message
    with reexecuted(job, instance, first.run_id) as again:
        assert again.success
        assert steps(again) == ["recovery__table"]
    assert values() == [16, 20]


def test_a_lost_intermediate_is_recomputed_inside_the_step_that_needs_it(instance):
    first = failed_run(instance)
    shutil.rmtree(HOME / "store" / "recovery" / "sums")
    with reexecuted(job, instance, first.run_id) as again:
        assert again.success
        assert steps(again) == ["recovery__table"]
        log = [e.user_message for e in instance.all_logs(again.run_id)]
        shown, _ = [  # the stage, and its table
            e.step_materialization_data.materialization.metadata for e in again.all_events if e.is_step_materialization
        ]
    assert "its intermediate is gone or damaged" in shown["recomputed sums"].value
    assert any("recomputing stage 'sums'" in line for line in log)
    assert not any("recomputing stage 'keyed'" in line for line in log)
    assert values() == [16, 20]


@pytest.mark.a_day(1)
@pytest.mark.parametrize("lost", ["sums", "everything"])
def test_a_lost_output_of_an_iteration_is_made_again_by_the_step_that_needs_it(instance, lost):
    shutil.rmtree(HOME / "halves", ignore_errors=True)
    BROKEN.touch()
    first = looping_job().execute_in_process(instance=instance, raise_on_error=False)
    BROKEN.unlink()
    stages = HOME / "store" / "looping"
    assert not first.success
    shutil.rmtree(stages if lost == "everything" else stages / lost)
    with reexecuted(looping_job, instance, first.run_id) as again:
        assert again.success
        log = "\n".join(e.user_message for e in instance.all_logs(again.run_id))
    assert "recomputing stage 'sums'" in log
    assert ("recomputing stage 'events'" in log) == (lost == "everything")
    found = pa.table(DeltaTable(str(HOME / "halves")).to_pyarrow_table()).to_pylist()
    # of a 4 + 2 + 1, halved from 9, the sum of 0, 3 and 6
    assert sorted((row["key"], row["value"]) for row in found) == [("a", 7), ("b", 10), ("c", 4), ("z", 7)]


def test_a_truncated_intermediate_counts_as_lost(instance):
    first = failed_run(instance)
    file = next((HOME / "store" / "recovery" / "sums").rglob("*.parquet"))
    file.write_bytes(file.read_bytes()[:-10])
    with reexecuted(job, instance, first.run_id) as again:
        assert again.success
    assert values() == [16, 20]


def test_an_intermediate_whose_bytes_have_changed_is_set_aside_and_computed_again(instance):
    first = failed_run(instance)
    file = next((HOME / "store" / "recovery" / "sums").rglob("*.parquet"))
    whole = file.read_bytes()
    damaged = whole[:50] + bytes(255 - byte for byte in whole[50:90]) + whole[90:]
    file.write_bytes(damaged)
    with reexecuted(job, instance, first.run_id) as failed:
        assert not failed.success
        (message,) = [e.step_failure_data.error.message for e in failed.all_node_events if e.is_step_failure]
    assert f"recovery: stage 'table': the intermediate of stage 'sums' is damaged (checksum error in {file})" in message
    with reexecuted(job, instance, failed.run_id) as again:
        assert again.success
        log = "\n".join(e.user_message for e in instance.all_logs(again.run_id))
    assert "recomputing stage 'sums'" in log
    assert file.with_name(f"_damaged-{file.name}").read_bytes() == damaged, "nobody's bytes are thrown away"
    assert values() == [16, 20]


def test_re_execution_after_the_sink_had_committed_does_not_append_twice(instance):
    first = job().execute_in_process(instance=instance)
    manifest = next((HOME / "store" / "recovery" / "table").rglob("manifest.json"))
    manifest.unlink()  # as if the run had died between the sink's commit and the stage's
    instance.report_run_failed(instance.get_run_by_id(first.run_id))
    with execute_job(
        reconstructable(job),
        instance,
        reexecution_options=ReexecutionOptions(parent_run_id=first.run_id, step_selection=["recovery__table"]),
    ) as again:
        assert again.success
    assert values() == [16, 20]


def several_tables():
    with sqlite3.connect(HOME / "several.db") as database:
        found = {
            f"sqlite_{mode}": sorted(v for (v,) in database.execute(f"SELECT value FROM {mode}"))
            for mode in ("overwrite", "upsert", "append")
        }
    for mode in ("overwrite", "upsert", "append"):
        found[mode] = sorted(DeltaTable(str(HOME / f"several_{mode}")).to_pyarrow_table()["value"].to_pylist())
    return {**found, "files": sorted(pq.read_table(HOME / "several_files")["value"].to_pylist())}


def test_a_re_execution_of_mended_code_replaces_what_sinks_had_committed_and_says_where_it_cannot(instance):
    with sqlite3.connect(HOME / "several.db") as database:
        for mode in ("overwrite", "upsert", "append"):
            database.execute(f"CREATE TABLE {mode} (key TEXT{' PRIMARY KEY' * (mode == 'upsert')}, value BIGINT)")
    BROKEN.touch()
    FACTOR.write_text("1000")
    first = several_sinks_job().execute_in_process(instance=instance, raise_on_error=False)
    assert not first.success
    assert set(map(tuple, several_tables().values())) == {(1000, 2000)}
    for factor in (1, 10):  # as somebody does who mends twice, each time from the page of the run that failed
        FACTOR.write_text(str(factor))
        BROKEN.unlink(missing_ok=True)
        with reexecuted(several_sinks_job, instance, first.run_id) as again:
            assert again.success
            warnings = [e.user_message for e in instance.all_logs(again.run_id) if e.level == logging.WARNING]
        appended = ("append", "sqlite_append")
        assert several_tables() == {
            name: [1000, 2000] if name in appended else [factor, 2 * factor] for name in several_tables()
        }
        for name in appended:
            assert any(f"sink '{name}' has the rows that an earlier attempt" in warning for warning in warnings)
        assert len(warnings) == 2


def test_re_executing_a_run_that_succeeded_writes_again_also_when_the_janitor_was_there(instance):
    first = job().execute_in_process(instance=instance)
    shutil.rmtree(HOME / "store" / "recovery")
    with execute_job(
        reconstructable(job), instance, reexecution_options=ReexecutionOptions(parent_run_id=first.run_id)
    ) as again:
        assert again.success
    assert values() == [16, 16, 20, 20]


def test_a_re_execution_reads_what_the_run_before_has_read_and_a_new_run_what_has_come_since(instance):
    shutil.rmtree(HOME / "in", ignore_errors=True)
    (HOME / "in").mkdir()

    def arrive(key, value):
        pq.write_table(pa.table({"key": [key], "value": pa.array([value], pa.int64())}), HOME / f"in/{key}.parquet")

    def found():
        return {row["key"]: row["value"] for row in pq.read_table(HOME / "arrived").to_pylist()}

    arrive("a", 1)
    BROKEN.touch()
    first = arrived_job().execute_in_process(instance=instance, raise_on_error=False)
    BROKEN.unlink()
    assert not first.success
    arrive("b", 2)
    with reexecuted(arrived_job, instance, first.run_id) as again:
        assert again.success
        assert steps(again) == ["arrived__arrived"]
        log = [e.user_message for e in instance.all_logs(again.run_id)]
    assert any(line.startswith("reads of incoming what was read before") for line in log)
    assert not any("recomputing" in line for line in log), "its input stands"
    assert found() == {"A": 1}
    whole = ReexecutionOptions(parent_run_id=again.run_id)
    with execute_job(reconstructable(arrived_job), instance, reexecution_options=whole) as once_more:
        assert once_more.success
        read = [
            e.step_materialization_data.materialization.metadata["read"].value
            for e in once_more.all_events
            if e.is_step_materialization and "read" in e.step_materialization_data.materialization.metadata
        ]
    assert found() == {"A": 1}
    assert [of_stage["incoming"]["files"] for of_stage in read] == [1]
    new = arrived_job().execute_in_process(instance=instance)
    assert found() == {"A": 1, "B": 2}
    (HOME / "in/a.parquet").rename(HOME / "in/mended.parquet")
    with execute_job(
        reconstructable(arrived_job), instance, reexecution_options=ReexecutionOptions(parent_run_id=new.run_id)
    ) as mended:
        assert mended.success
        log = [e.user_message for e in instance.all_logs(mended.run_id)]
    assert any("source 'incoming': a.parquet, which was read before, is gone; this run reads what is" in s for s in log)
    assert found() == {"A": 1, "B": 2}


def test_a_file_that_comes_between_two_stages_is_left_to_the_next_run(instance):
    shutil.rmtree(HOME / "in", ignore_errors=True)
    (HOME / "in").mkdir()
    event = pa.table({"key": ["a"], "value": pa.array([1], pa.int64())})
    pq.write_table(event, HOME / "in/one.parquet")
    LATE.touch()  # while the first stage runs, another file comes
    result = arrived_job().execute_in_process(instance=instance)
    LATE.unlink()
    assert result.success
    assert not any("recomputing" in e.user_message for e in instance.all_logs(result.run_id))
    assert pq.read_table(HOME / "arrived").to_pylist() == [{"key": "A", "value": 1}]
    assert len(list((HOME / "in").iterdir())) == 2


def test_launching_with_all_exchanges_pipelined_runs_one_spark_job_in_the_last_step(instance):
    options = launched_with({"execution.batch-shuffle-mode": "ALL_EXCHANGES_PIPELINED"})
    result = job().execute_in_process(instance=instance, run_config=options)
    assert result.success
    pipelined = {
        m.asset_key.path[-1]
        for m in (e.materialization for e in result.get_asset_materialization_events())
        if "pipelined" in m.metadata
    }
    assert pipelined == {"keyed_stage", "sums_stage"}
    assert values() == [16, 20]


def test_a_run_materializes_every_stage_once_in_order_with_rows_bytes_schema_graph_and_preview(instance):
    result = job().execute_in_process(instance=instance)
    assert values() == [16, 20]
    assert steps(result) == ["recovery__keyed", "recovery__sums", "recovery__table"]
    found = {
        e.materialization.asset_key.path[-1]: e.materialization.metadata
        for e in result.get_asset_materialization_events()
    }
    assert found["keyed_stage"]["dagster/row_count"].value == 9
    assert found["keyed_stage"]["bytes"].value > 0
    assert [c.name for c in found["keyed_stage"]["dagster/column_schema"].schema.columns] == ["key", "value"]
    assert "data:image/svg+xml" in found["table_stage"]["job_graph"].value
    assert len(found["table"]["preview"].records) == 2
    metrics = {n: m.value for n, m in found["keyed_stage"].items() if n.startswith("keyed.")}
    assert metrics.pop("keyed.events.seen (per second)") > 0
    assert metrics == {
        "keyed.events.even": 5,
        "keyed.events.attempt": 0,
        "keyed.events.attempt (min)": 0,
        "keyed.events.values (count)": 9,
        "keyed.events.values (min)": 0.0,
        "keyed.events.values (max)": 8.0,
        "keyed.events.values (mean)": 4.0,
        "keyed.events.values (p50)": pytest.approx(4, rel=0.01),
        "keyed.events.values (p95)": pytest.approx(7, rel=0.01),
        "keyed.events.values (p99)": pytest.approx(7, rel=0.01),
    }


def test_an_unknown_option_is_refused_at_launch(instance):
    from dagster import DagsterInvalidConfigError

    with pytest.raises(DagsterInvalidConfigError, match=r"execution\.runtime-mod"):
        job().execute_in_process(instance=instance, run_config=launched_with({"execution.runtime-mod": "BATCH"}))
