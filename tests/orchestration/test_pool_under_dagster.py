"""A backfill of several runs at once, whose stages keep within the slots of their pool."""

from itertools import pairwise

import pytest
from deltalake import DeltaTable

from tests.orchestration.dagster_dev import DagsterDev

pytestmark = pytest.mark.spark

DAYS = [f"2024-01-0{n}" for n in range(1, 3)]


class Dagster(DagsterDev):
    module = "tests.orchestration.pool_job"
    mark = "POOL_TEST_FOLDER"

    def spans(self):
        """From when until when each run was."""
        found = self.ask("{ runsOrError { ... on Runs { results { startTime endTime } } } }")["runsOrError"]["results"]
        return sorted((r["startTime"], r["endTime"]) for r in found)

    def steps(self):
        """From when until when each step was."""
        found = self.ask("{ runsOrError { ... on Runs { results { stepStats { startTime endTime } } } } }")[
            "runsOrError"
        ]["results"]
        return sorted((s["startTime"], s["endTime"]) for r in found for s in r["stepStats"])


@pytest.fixture
def dagster(tmp_path):
    running = Dagster(
        tmp_path,
        "concurrency:\n  runs:\n    max_concurrent_runs: 2\n  pools:\n    default_limit: 1\n    granularity: op\n",
    )
    (tmp_path / "in").mkdir()
    for number, day in enumerate(DAYS):
        (tmp_path / "in" / f"{day}.csv").write_text(f"shop,amount\na,{number}\n")
    try:
        running.start()
        yield running
    finally:
        running.end()


def test_the_runs_of_a_backfill_overlap_and_their_stages_keep_within_the_pool(dagster):
    backfill = dagster.backfill([["doubles", name] for name in ("doubled", "table")], DAYS)
    dagster.until(
        lambda: dagster.backfill_status(backfill) not in ("REQUESTED", "FAILING", "CANCELING"), "the backfill has ended"
    )
    assert dagster.backfill_status(backfill) == "COMPLETED_SUCCESS"
    steps, runs = dagster.steps(), dagster.spans()
    assert (len(runs), len(steps)) == (2, 4)
    assert any(end > start for (_, end), (start, _) in pairwise(runs))
    assert all(end <= start for (_, end), (start, _) in pairwise(steps))
    assert sorted(DeltaTable(str(dagster.folder / "table")).to_pyarrow_table()["amount"].to_pylist()) == [0, 4]
