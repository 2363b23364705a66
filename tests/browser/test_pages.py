"""The main pages of Dagster's UI over a partitioned pipeline, in a real browser: Chromium, where it is installed."""

import shutil

import pytest

from tests.orchestration.dagster_dev import DagsterDev

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LOCATION = "/locations/tests.orchestration.backfill_job"
DAYS = ["2024-01-01", "2024-01-02", "2024-01-03"]

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(CHROMIUM is None, reason="the tests in tests/browser need Chromium (Debian: apt-get install chromium)"),
]


class Dagster(DagsterDev):
    module = "tests.orchestration.backfill_job"
    mark = "BACKFILL_TEST_FOLDER"

    def materialize(self, *days):
        """Runs a range of days in one run; gives it when it has ended."""
        params = {
            "selector": {**self.selector, "pipelineName": "totals_batch"},
            "runConfigData": "{}",
            "mode": "default",
            "executionMetadata": {"tags": [{"key": "dagster/asset_partition_range_start", "value": days[0]}, {"key": "dagster/asset_partition_range_end", "value": days[-1]}]},
        }
        found = self.ask(
            "mutation($p: ExecutionParams!) { launchRun(executionParams: $p) { __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }", p=params
        )
        run = found["launchRun"]["run"]["runId"]
        status = self.until(lambda: (s := self.status(run)) in ("SUCCESS", "FAILURE") and s, "the run has ended")
        assert status == "SUCCESS", self.said(run)[-3000:]
        return run

    def status(self, run):
        return self.ask("query($r: ID!) { runOrError(runId: $r) { ... on Run { status } } }", r=run)["runOrError"]["status"]

    def backfills(self):
        found = self.ask("{ partitionBackfillsOrError { ... on PartitionBackfills { results { status } } } }")
        return [b["status"] for b in found["partitionBackfillsOrError"]["results"]]


@pytest.fixture(scope="module")
def dagster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    running = Dagster(folder, "nux:\n  enabled: false\n")
    (folder / "in").mkdir()
    for number, day in enumerate(DAYS):
        (folder / "in" / f"{day}.csv").write_text("shop,amount\n" + "".join(f"a,{n}\n" for n in range(number + 1)))
    running.start()
    try:
        running.materialize(*DAYS)
        running.again = running.materialize(DAYS[1])
        yield running
    finally:
        running.end()


@pytest.fixture(scope="module")
def page(dagster):
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=30_000)
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]) as browser:
        opened = browser.new_page(viewport={"width": 1600, "height": 1200}, base_url=f"http://127.0.0.1:{dagster.port}")
        opened.set_default_timeout(30_000)
        yield opened


def see(page, *texts):
    from playwright.sync_api import expect

    for text in texts:
        expect(page.get_by_text(text).first).to_be_visible()


def test_the_lineage_leads_from_the_source_through_the_stages_to_the_table(page):
    page.goto(f"{LOCATION}/asset-groups/totals/lineage")
    see(page, "sales", "running", "table")


def test_a_partitions_page_tells_what_a_stage_made_and_shows_the_rows_of_all_days(page):
    page.goto(f"/assets/totals/running?view=partitions&partition={DAYS[1]}")
    see(page, "Materialized (3)", "duration_seconds", "bytes", "rows per partition")
    page.locator("tr", has_text="rows per partition").get_by_text("[Show Markdown]").click()
    picture = page.get_by_alt_text("rows per partition")
    picture.wait_for()
    assert picture.evaluate("image => image.naturalWidth") > 500


def test_a_partitions_page_shows_the_job_graph_as_a_picture(page):
    page.goto(f"/assets/totals/running?view=partitions&partition={DAYS[1]}")
    page.locator("tr", has_text="job_graph").get_by_text("[Show Markdown]").click()
    picture = page.get_by_alt_text("job graph of totals")
    picture.wait_for()
    assert picture.evaluate("image => image.naturalWidth") > 500


def test_the_checks_page_says_which_later_days_are_stale(page):
    page.goto("/assets/totals/running?view=checks")
    see(page, "carried_state", f"{DAYS[2]} went on from a state that has been made again since: run a backfill over it")


def test_a_runs_page_has_a_step_for_each_stage_and_its_log(page, dagster):
    page.goto(f"/runs/{dagster.again}")
    see(page, "totals__sales", "totals__running", "totals__table", "Success")
    see(page, f"stage 'running' of partition {DAYS[1]}: 2 rows")


def test_the_launchpad_takes_the_run_as_it_is(page):
    page.goto(f"{LOCATION}/jobs/totals_batch")
    page.get_by_role("button", name="Materialize all").locator("xpath=following::button[1]").click()
    page.get_by_text("Open launchpad").click()
    see(page, "Launchpad (configure assets)", "resources?: {", "No errors")


def test_the_sensors_are_there(page):
    page.goto("/automation")
    see(page, "totals_heartbeat_sensor")


def test_a_backfill_from_the_dialog_repairs_the_stale_day(page, dagster):
    page.goto(f"{LOCATION}/asset-groups/totals/lineage")
    page.get_by_role("button", name="Materialize all").first.click()
    partitions = page.get_by_placeholder("ex: 2024-01-01")
    partitions.fill(f"[{DAYS[1]}...{DAYS[2]}]")
    partitions.press("Enter")
    page.get_by_role("button", name="Launch backfill").click()
    dagster.until(lambda: dagster.backfills() == ["COMPLETED_SUCCESS"], "the backfill has ended")
    page.goto("/assets/totals/running?view=checks")
    see(page, "every partition goes on from the one before it")
