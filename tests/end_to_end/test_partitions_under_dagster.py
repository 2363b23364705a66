"""Partitions with carried state under a real daemon.

A backfill whose run worker is killed, the pages of Dagster's UI in a real browser, a day that is run again, a
re-execution after an intermediate is gone, and a backfill of several runs at once. One Dagster instance and one Spark
Connect server serve all tests, which go on from each other.
"""

import os
import random
import shutil
import signal
from contextlib import suppress
from itertools import accumulate, pairwise
from unittest import mock

import pytest
from deltalake import DeltaTable

from dagster_unified.engine import connect_server
from tests.orchestration.dagster_dev import DagsterDev
from tests.ports import free_port

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LOCATION = "/locations/tests.orchestration.backfill_job"
DAYS = [f"2024-01-0{n}" for n in range(1, 5)]
AMOUNTS = {day: [10 * n + 1, 10 * n + 2] for n, day in enumerate(DAYS)}
SETTINGS = """
nux:
  enabled: false
run_retries:
  enabled: true
  max_retries: 3
  retry_on_asset_or_op_failure: false
concurrency:
  runs:
    max_concurrent_runs: 2
  pools:
    default_limit: 1
    granularity: op
    op_granularity_run_buffer: 1
"""
STAGES = [["totals", f"{name}_stage"] for name in ("sales", "running", "table")]

pytestmark = [pytest.mark.spark, pytest.mark.rotates("stories", together=True)]
browser = pytest.mark.skipif(  # for a machine of one's own: CI installs Chromium, and fails where a test is skipped
    CHROMIUM is None, reason="the tests in a browser need Chromium (Debian: apt-get install chromium)"
)


class Dagster(DagsterDev):
    module = "tests.orchestration.backfill_job"
    mark = "BACKFILL_TEST_FOLDER"

    def materialize(self, *days):
        """Runs a range of days in one run; gives it when it has ended."""
        params = {
            "selector": {**self.selector, "pipelineName": "totals_batch"},
            "runConfigData": "{}",
            "mode": "default",
            "executionMetadata": {
                "tags": [
                    {"key": "dagster/asset_partition_range_start", "value": days[0]},
                    {"key": "dagster/asset_partition_range_end", "value": days[-1]},
                ]
            },
        }
        found = self.ask(
            "mutation($p: ExecutionParams!) { launchRun(executionParams: $p) { __typename ... on LaunchRunSuccess { run"
            " { runId } } ... on PythonError { message } } }",
            p=params,
        )
        return self.succeeded(found["launchRun"]["run"]["runId"])

    def re_execute(self, run):
        """Runs again, from its failure, what has failed; gives the new run when it has ended."""
        found = self.ask(
            "mutation($p: ReexecutionParams!) { launchRunReexecution(reexecutionParams: $p) {"
            " __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }",
            p={"parentRunId": run, "strategy": "FROM_FAILURE"},
        )
        return self.succeeded(found["launchRunReexecution"]["run"]["runId"])

    def succeeded(self, run):
        status = self.until(
            lambda: (s := dict(self.runs()).get(run)) in ("SUCCESS", "FAILURE") and s, "the run has ended"
        )
        assert status == "SUCCESS", self.said(run)[-3000:]
        return run

    def metadata(self, run):
        """The names of what a run's materializations say of the partitions, by partition."""
        found = self.ask(
            "query($r: ID!) { logsForRun(runId: $r) { ... on EventConnection { events { ... on MaterializationEvent {"
            " partition metadataEntries { label } } } } } }",
            r=run,
        )
        events = [e for e in found["logsForRun"]["events"] if "metadataEntries" in e]
        return {e["partition"]: [entry["label"] for entry in e["metadataEntries"]] for e in events}

    def complete(self, backfill):
        self.until(lambda: self.backfill_status(backfill) == "COMPLETED_SUCCESS", "the backfill is complete")

    def spans(self, backfill):
        """From when until when each run of a backfill was, and each step."""
        found = self.ask(
            'query($b: String!) { runsOrError(filter: {tags: [{key: "dagster/backfill", value: $b}]}) { ... on Runs {'
            " results { startTime endTime stepStats { startTime endTime } } } } }",
            b=backfill,
        )["runsOrError"]["results"]
        steps = [step for run in found for step in run["stepStats"]]
        return [sorted((span["startTime"], span["endTime"]) for span in spans) for spans in (found, steps)]

    def backfills(self):
        found = self.ask("{ partitionBackfillsOrError { ... on PartitionBackfills { results { id status } } } }")
        return {b["id"]: b["status"] for b in found["partitionBackfillsOrError"]["results"]}

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
def dagster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("partitions")
    running = Dagster(folder, SETTINGS)
    (folder / "in").mkdir()
    for day, amounts in AMOUNTS.items():
        (folder / "in" / f"{day}.csv").write_text("shop,amount\n" + "".join(f"a,{n}\n" for n in amounts))
    port = free_port()
    try:
        running.start(BACKFILL_TEST_CONNECT=str(port))
        yield running
    finally:
        running.end()
        with mock.patch.dict(os.environ):  # Spark tells its clients by the environment
            connect_server.stop(port)


@pytest.fixture(scope="module")
def killed(dagster):
    """The run of a backfill over all days whose worker was killed; the backfill is complete."""
    backfill = dagster.backfill(STAGES, DAYS)
    stage = random.Random(2024).choice(["sales", "running"])
    done = dagster.folder / "store" / "totals" / stage
    dagster.until(lambda: len(list(done.glob("*/*/manifest.json"))) >= 2, f"two days of {stage} are there")
    run = dagster.until(dagster.kill_a_worker, "a run worker is killed")
    dagster.complete(backfill)
    return run


@pytest.fixture(scope="module")
def again(dagster, killed):
    """The run that has made the second day again by itself: the day after it is stale."""
    return dagster.materialize(DAYS[1])


@pytest.fixture(scope="module")
def page(dagster, again):
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=180_000)
    launched = {"executable_path": CHROMIUM, "args": ["--no-sandbox"]}
    with sync_playwright() as playwright, playwright.chromium.launch(**launched) as chromium:
        opened = chromium.new_page(
            viewport={"width": 1600, "height": 1200}, base_url=f"http://127.0.0.1:{dagster.port}"
        )
        opened.set_default_timeout(180_000)
        yield opened


def see(page, *texts):
    from playwright.sync_api import expect

    for text in texts:
        expect(page.get_by_text(text).first).to_be_visible()


def expected(days):
    return list(enumerate(accumulate(n for day in days for n in AMOUNTS[day]), 1))


def test_a_backfill_with_carried_state_survives_a_kill(dagster, killed):
    assert dict(dagster.runs())[killed] == "FAILURE"
    assert dagster.table() == expected(DAYS)


@browser
def test_the_lineage_leads_from_the_source_through_the_stages_to_the_table(page):
    page.goto(f"{LOCATION}/asset-groups/totals/lineage")
    see(page, "sales_source", "sales_stage", "running_stage", "table_stage", "table")


@browser
def test_a_partitions_page_tells_what_a_stage_made_and_shows_the_rows_of_all_days_and_the_job_graph(page):
    page.goto(f"/assets/totals/running_stage?view=partitions&partition={DAYS[1]}")
    see(page, "Materialized (4)", "duration_seconds", "bytes", "rows per partition")
    for row, alt in (("rows per partition", "rows per partition"), ("job_graph", "job graph of totals")):
        page.locator("tr", has_text=row).get_by_text("[Show Markdown]").click()
        picture = page.get_by_alt_text(alt)
        picture.wait_for()
        assert picture.evaluate("image => image.naturalWidth") > 500
        page.keyboard.press("Escape")


@browser
def test_the_checks_page_says_which_later_days_are_stale(page):
    page.goto("/assets/totals/running_stage?view=checks")
    see(
        page,
        "carried_state",
        f"{DAYS[2]} to {DAYS[3]} went on from a state that has been replaced since: run a backfill over them",
    )


@browser
def test_a_runs_page_has_a_step_for_each_stage_and_its_log(page, again):
    page.goto(f"/runs/{again}")
    see(page, "totals__sales", "totals__running", "totals__table", "Success")
    see(page, f"stage 'running' of partition {DAYS[1]}: 2 rows")


@browser
def test_the_launchpad_takes_the_run_as_it_is(page):
    page.goto(f"{LOCATION}/jobs/totals_batch")
    page.get_by_role("button", name="Materialize all").locator("xpath=following::button[1]").click()
    page.get_by_text("Open launchpad").click()
    see(page, "Launchpad (configure assets)", "resources?: {", "No errors")


@browser
def test_the_sensor_is_there(page):
    page.goto("/automation")
    see(page, "totals_heartbeat_sensor")


@browser
def test_a_backfill_from_the_dialog_repairs_the_stale_days(page, dagster):
    before = dagster.backfills()
    page.goto(f"{LOCATION}/asset-groups/totals/lineage")
    page.get_by_role("button", name="Materialize all").first.click()
    partitions = page.get_by_placeholder("ex: 2024-01-01")
    partitions.fill(f"[{DAYS[1]}...{DAYS[-1]}]")
    partitions.press("Enter")
    page.get_by_role("button", name="Launch backfill").click()
    launched = dagster.until(
        lambda: next((b for b in dagster.backfills() if b not in before), None), "the backfill is launched"
    )
    page.goto("about:blank")  # the UI asks for news all the time
    dagster.complete(launched)
    page.goto("/assets/totals/running_stage?view=checks")
    see(page, "every partition goes on from the one before it")
    assert dagster.table() == expected(DAYS)


def test_re_execution_from_failure_after_an_intermediate_is_gone(dagster, killed):
    for folder in ("table", "store"):
        shutil.rmtree(dagster.folder / folder)
    (dagster.folder / "table").write_text("not a table, and in its way")
    backfill = dagster.backfill(STAGES, DAYS[:2])
    dagster.until(lambda: dagster.backfill_status(backfill) == "COMPLETED_FAILED", "the backfill has failed")
    failed = dagster.runs()[0][0]
    (dagster.folder / "table").unlink()
    shutil.rmtree(dagster.folder / "store" / "totals" / "running" / DAYS[1])
    again = dagster.re_execute(failed)
    made = dagster.metadata(again)
    assert "recomputed running" in made[DAYS[1]], (made, dagster.said(again))
    assert dagster.table() == expected(DAYS[:2])


def test_the_runs_of_a_backfill_overlap_and_their_stages_keep_within_the_pool(dagster):
    days = DAYS[:2]
    backfill = dagster.backfill([["doubles", name] for name in ("doubled", "written")], days)
    dagster.complete(backfill)
    runs, steps = dagster.spans(backfill)
    assert (len(runs), len(steps)) == (2, 4)
    assert any(end > start for (_, end), (start, _) in pairwise(runs))
    assert all(end <= start for (_, end), (start, _) in pairwise(steps))
    rows = DeltaTable(str(dagster.folder / "doubles")).to_pyarrow_table()
    assert sorted(rows["amount"].to_pylist()) == sorted(4 * amount for day in days for amount in AMOUNTS[day])
