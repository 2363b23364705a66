"""A backfill launched through GraphQL, against a real daemon, whose run workers are killed; and a re-execution after intermediates are gone."""

import os
import random
import shutil
import signal
from contextlib import suppress
from itertools import accumulate

import pytest
from deltalake import DeltaTable

from tests.orchestration.dagster_dev import DagsterDev

pytestmark = pytest.mark.spark

DAYS = [f"2024-01-0{n}" for n in range(1, 9)]
STAGES = [["totals", name] for name in ("sales", "running", "table")]
AMOUNTS = {day: [10 * n + 1, 10 * n + 2] for n, day in enumerate(DAYS)}


class Dagster(DagsterDev):
    module = "tests.orchestration.backfill_job"
    mark = "BACKFILL_TEST_FOLDER"

    def re_execute(self, run):
        params = {"parentRunId": run, "strategy": "FROM_FAILURE"}
        found = self.ask(
            "mutation($p: ReexecutionParams!) { launchRunReexecution(reexecutionParams: $p) { __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }",
            p=params,
        )
        return found["launchRunReexecution"]["run"]["runId"]

    def kill_a_worker(self):
        """Ends the process of a run that is started, and gives the run; None where there is none."""
        with suppress(StopIteration, IndexError, ProcessLookupError):
            run = next(run for run, status in self.runs() if status == "STARTED")
            os.kill(self.worker_of(run), signal.SIGKILL)
            return run
        return None

    def table(self):
        rows = DeltaTable(str(self.folder / "table")).to_pyarrow_table().to_pylist()
        return sorted((r["number"], r["total"]) for r in rows)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("backfill")
    running = Dagster(folder, "run_retries:\n  enabled: true\n  max_retries: 3\n  retry_on_asset_or_op_failure: false\n")
    (folder / "in").mkdir()
    for day, amounts in AMOUNTS.items():
        (folder / "in" / f"{day}.csv").write_text("shop,amount\n" + "".join(f"a,{n}\n" for n in amounts))
    try:
        running.start()
        yield running
    finally:
        running.end()


@pytest.fixture
def dagster(running):
    """Nothing has been written, as far as the pipeline can see."""
    yield running
    shutil.rmtree(running.folder / "table", ignore_errors=True)
    shutil.rmtree(running.folder / "store", ignore_errors=True)


def expected(days):
    return list(enumerate(accumulate(n for day in days for n in AMOUNTS[day]), 1))


def test_a_backfill_with_carried_state_survives_kills_and_a_day_that_runs_again_changes_nothing(dagster):
    chance = random.Random(2024)
    backfill = dagster.backfill(STAGES, DAYS)
    stage, days = chance.choice([("sales", 3), ("running", 2), ("running", 5)])
    done = dagster.folder / "store" / "totals" / stage
    dagster.until(lambda: len(list(done.glob("*/*/manifest.json"))) >= days, f"{days} days of {stage} are there")
    killed = dagster.until(dagster.kill_a_worker, "a run worker is killed")
    dagster.until(lambda: dagster.backfill_status(backfill) == "COMPLETED_SUCCESS", "the backfill is complete")
    assert dict(dagster.runs())[killed] == "FAILURE"
    assert dagster.table() == expected(DAYS)

    # A day in the middle runs again: it begins with the state before it.
    again = dagster.backfill(STAGES, DAYS[3:5])
    dagster.until(lambda: dagster.backfill_status(again) == "COMPLETED_SUCCESS", "the second backfill is complete")
    assert dagster.table() == expected(DAYS)


def test_re_execution_from_failure_after_an_intermediate_is_gone(dagster):
    (dagster.folder / "table").write_text("not a table, and in its way")
    backfill = dagster.backfill(STAGES, DAYS[:2])
    dagster.until(lambda: dagster.backfill_status(backfill) == "COMPLETED_FAILED", "the backfill has failed")
    failed = dagster.runs()[0][0]
    (dagster.folder / "table").unlink()
    shutil.rmtree(dagster.folder / "store" / "totals" / "running" / DAYS[1])
    again = dagster.re_execute(failed)
    dagster.until(lambda: dict(dagster.runs())[again] in ("SUCCESS", "FAILURE"), "the re-execution has ended")
    assert dict(dagster.runs())[again] == "SUCCESS"
    said = dagster.said(again)
    assert f"recomputing stage 'running' of partition {DAYS[1]}" in said, said
    assert dagster.table() == expected(DAYS[:2])
