"""New code beside the old under a real webserver's code server and daemon: compared, refused, accepted, swapped in."""

import pytest

from tests.orchestration.test_streaming_under_dagster import Dagster

pytestmark = [pytest.mark.spark, pytest.mark.rotates("stories", together=True)]


class Beside(Dagster):
    def shadows(self):
        found = self.ask(
            '{ runsOrError(filter: {pipelineName: "sales_shadow"}) { ... on Runs { results { runId status } } } }'
        )
        return {run["runId"]: run["status"] for run in found["runsOrError"]["results"]}

    def load(self, **environment):
        """Load other code, as a deployment does; the job that runs lives on."""
        self.stop()
        self.start(STREAMING_TEST_UPGRADE="shadow", STREAMING_TEST_EXECUTOR="multiprocess", **environment)

    def swap(self, **config):
        """Ask for the swap, and return the run's log once it has ended."""
        action = {"ops": {"sales_action": {"config": {"action": "swap", **config}}}}
        run = self.launch("sales_control", action)["launchRun"]["run"]["runId"]
        query = "query($r: ID!) { runOrError(runId: $r) { ... on Run { status } } }"
        ended = ("SUCCESS", "FAILURE")
        self.until(lambda: self.ask(query, r=run)["runOrError"]["status"] in ended, "the control job has ended")
        return self.said(run)

    def says(self, words):
        self.until(lambda: any(words in said for said in self.said_by_sensor()), f"the sensor says {words!r}")


@pytest.fixture(scope="module")
def dagster(tmp_path_factory):
    running = Beside(tmp_path_factory.mktemp("shadow"))
    yield running
    running.end()


def test_new_code_runs_beside_the_old_and_takes_its_place_when_it_is_swapped_in(dagster):
    dagster.drop("one", a=1, b=2)
    dagster.load()
    dagster.sensor(on=True)
    dagster.until(lambda: dagster.totals() == {"a": 1, "b": 2}, "the first file is in the table")
    old = dagster.started()

    dagster.load(STREAMING_TEST_FACTOR="7")
    dagster.until(lambda: "STARTED" in dagster.shadows().values(), "new code runs beside the old")
    (abandoned,) = dagster.shadows()
    dagster.load(STREAMING_TEST_FACTOR="100")
    dagster.until(lambda: len(dagster.shadows()) == 2, "and other code in its place")
    dagster.until(lambda: dagster.shadows()[abandoned] == "CANCELED", "what is no longer loaded is terminated")
    (shadow,) = dagster.shadows().keys() - {abandoned}
    dagster.says("the new code has not written anything yet (round ")
    dagster.drop("two", a=10)
    dagster.until(lambda: dagster.totals() == {"a": 11, "b": 2}, "the old code goes on")
    dagster.says("their tables differ (round ")
    assert dagster.started() == old
    assert "are not equal to those of the old code" in dagster.swap()
    assert dagster.started() == old
    assert "sales is to run the new code" in dagster.swap(accept_differences=True)
    dagster.until(lambda: dagster.started() not in (None, old), "a run with the new code")
    dagster.drop("three", b=1)
    dagster.until(lambda: dagster.totals() == {"a": 11, "b": 102}, "it has taken over the state of the old")
    dagster.until(lambda: dagster.shadows()[shadow] == "SUCCESS", "its shadow has ended")
    assert list((dagster.folder / "checkpoints/sales/shadow").iterdir()) == []

    old = dagster.started()
    dagster.load(STREAMING_TEST_FACTOR="100", STREAMING_TEST_TERMS="10")  # the same by another way
    dagster.until(lambda: len(dagster.shadows()) == 3, "other code runs beside it")
    dagster.says("the new code has not written anything yet (round ")
    dagster.drop("four", a=1)
    dagster.says("their tables are equal (round ")
    assert "sales is to run the new code" in dagster.swap()
    dagster.until(lambda: dagster.started() not in (None, old), "a run with the other code")
    dagster.drop("five", b=1)
    dagster.until(lambda: dagster.totals() == {"a": 111, "b": 202}, "it goes on")
