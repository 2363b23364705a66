"""A streaming deployment under a real webserver's code server and daemon.

It is started, crashes, is restarted, suspended, resumed, upgraded and cancelled.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tests.orchestration.dagster_dev import DagsterDev

pytestmark = [pytest.mark.spark, pytest.mark.rotates("stories", together=True)]


class Dagster(DagsterDev):
    module = "tests.orchestration.streaming_job"
    mark = "STREAMING_TEST_FOLDER"
    look_every = 1.0

    def sensor(self, on):
        if on:
            selector = {**self.selector, "sensorName": "sales_streaming_sensor"}
            self.ask("mutation($s: SensorSelector!) { startSensor(sensorSelector: $s) { __typename } }", s=selector)

    def launch(self, job, config=None):
        selector = {**self.selector, "pipelineName": job}
        params = {"selector": selector, "runConfigData": config or {}, "mode": "default"}
        return self.ask(
            "mutation($p: ExecutionParams!) { launchRun(executionParams: $p) { __typename ... on LaunchRunSuccess { run"
            " { runId } } ... on PythonError { message } ... on RunConfigValidationInvalid { errors { message } } } }",
            p=params,
        )

    def control(self, action):
        return self.launch("sales_control", {"ops": {"sales_action": {"config": {"action": action}}}})

    def terminate(self, run_id):
        return self.ask("mutation($r: String!) { terminateRun(runId: $r) { __typename } }", r=run_id)

    def runs(self):
        found = self.ask(
            '{ runsOrError(filter: {pipelineName: "sales_streaming"}) { ... on Runs { results { runId status } } } }'
        )
        return found["runsOrError"]["results"]

    def started(self):
        return next((r["runId"] for r in self.runs() if r["status"] == "STARTED"), None)

    def ticks(self):
        selector = {**self.selector, "sensorName": "sales_streaming_sensor"}
        try:
            found = self.ask(
                "query($s: SensorSelector!) { sensorOrError(sensorSelector: $s) { ... on Sensor { sensorState {"
                " ticks(limit: 5) { status skipReason error { message } } } } } }",
                s=selector,
            )
            return found["sensorOrError"]["sensorState"]["ticks"]
        except (OSError, KeyError, TypeError):
            return None

    def said_by_sensor(self):
        """The sensor's latest messages: of ticks that did nothing, and why it has asked for its runs."""
        found = self.ask(
            "query($j: String!) { runsOrError(filter: {pipelineName: $j}) { ... on Runs {"
            " results { tags { key value } } } } }",
            j="sales_streaming",
        )
        tags = [tag for run in found["runsOrError"]["results"] for tag in run["tags"]]
        asked = [tag["value"] for tag in tags if tag["key"] == "dagster-unified/reason"]
        return [*asked, *(tick["skipReason"] or "" for tick in self.ticks() or ())]

    def cancel(self, run):
        begun = time.monotonic()
        self.terminate(run)
        self.until(lambda: self.statuses()[run] == "CANCELED", "the run is cancelled")
        sys.stdout.write(f"cancelled within {time.monotonic() - begun:.1f} s\n")
        lease = self.lease()
        assert (lease["owner"], lease["released"]) == (run, True)

    def has_ended(self, process):
        stat = Path(f"/proc/{process}/stat")
        return not stat.exists() or "Z" in stat.read_text().split()[2]

    def lease(self):
        return json.loads(
            max((self.folder / "checkpoints/sales/lease").glob("*.json"), key=lambda p: int(p.stem)).read_text()
        )

    def statuses(self):
        return {r["runId"]: r["status"] for r in self.runs()}

    def drop(self, name, **amounts):
        target = self.folder / "in"
        target.mkdir(exist_ok=True)
        (target / f".{name}").write_text(
            "shop,amount\n" + "".join(f"{shop},{amount}\n" for shop, amount in amounts.items())
        )
        (target / f".{name}").rename(target / f"{name}.csv")

    def totals(self):
        try:
            return {
                r["shop"]: r["amount"] for r in DeltaTable(str(self.folder / "totals")).to_pyarrow_table().to_pylist()
            }
        except Exception:
            return {}


@pytest.fixture(scope="module")
def dagster(tmp_path_factory):
    """One instance, whose tests go on from each other."""
    running = Dagster(tmp_path_factory.mktemp("streaming"))
    yield running
    running.end()


@pytest.fixture(scope="module")
def writer(dagster):
    """The run of a job that was killed and restarted, and has given way to new code, with a factor of 100.

    The table holds a and b.
    """
    dagster.drop("one", a=1, b=2)
    dagster.start(STREAMING_TEST_EXECUTOR="multiprocess")  # the step's process outlives the one that is killed
    dagster.sensor(on=True)
    dagster.until(
        lambda: dagster.totals() == {"a": 1, "b": 2},
        "the sensor has started the job and the first file is in the table",
    )
    killed = dagster.until(dagster.started, "a run is there")
    os.kill(dagster.worker_of(killed), signal.SIGKILL)
    dagster.until(lambda: dagster.statuses()[killed] == "FAILURE", "Dagster has seen the run die")
    dagster.drop("two", a=10)
    dagster.until(lambda: dagster.totals() == {"a": 11, "b": 2}, "another run goes on where the killed one was")
    dagster.until(lambda: dagster.started() not in (None, killed), "a second run is there")
    assert len(dagster.runs()) == 2

    # New code: the daemon and the code server come back with another factor. The run has lived on meanwhile, and gives
    # way.
    old = dagster.started()
    dagster.stop()
    dagster.start(STREAMING_TEST_FACTOR="100")
    dagster.until(lambda: dagster.started() not in (None, old), "a run with the new code")
    assert dagster.statuses()[old] == "SUCCESS"
    dagster.drop("three", b=1)
    dagster.until(lambda: dagster.totals() == {"a": 11, "b": 102}, "the new code has taken over the state of the old")

    return dagster.started()


def test_a_second_job_writes_nothing_and_says_why(dagster, writer):
    assert dagster.lease()["owner"] == writer
    second = dagster.launch("sales_streaming")["launchRun"]["run"]["runId"]
    dagster.until(lambda: dagster.statuses()[second] == "FAILURE", "the second job has given up")
    assert f"another job, {writer}, is writing" in dagster.said(second)
    assert dagster.statuses()[writer] == "STARTED"
    assert dagster.totals() == {"a": 11, "b": 102}


def test_a_deployment_is_suspended_resumed_replaced_and_cancelled(dagster, writer):
    dagster.control("suspend")
    dagster.until(lambda: dagster.started() is None, "the job has stopped, being suspended")
    dagster.drop("four", a=10)
    assert dagster.totals() == {"a": 11, "b": 102}
    dagster.control("resume")
    dagster.until(lambda: dagster.totals() == {"a": 1011, "b": 102}, "the job goes on where it was")

    # An epoch that hangs: the sensor replaces the job.
    hanging = dagster.started()
    dagster.drop("five", stuck=5, b=1)
    dagster.until(lambda: dagster.statuses()[hanging] == "FAILURE", "the job that makes no progress has been replaced")
    assert "has been busy with one epoch for" in dagster.said(hanging)
    (dagster.folder / "go on").touch()
    dagster.until(lambda: dagster.totals() == {"a": 1011, "b": 202, "stuck": 500}, "another job has done the epoch")

    # A process that is frozen, taken to be dead, and thawed when another one writes.
    frozen = dagster.until(
        lambda: dagster.started() == dagster.lease()["owner"] and dagster.started(), "another run writes"
    )
    worker = dagster.worker_of(frozen)
    os.kill(worker, signal.SIGSTOP)
    dagster.drop("six", a=100)
    dagster.until(lambda: dagster.totals() == {"a": 11011, "b": 202, "stuck": 500}, "another run has taken over")
    os.kill(worker, signal.SIGCONT)
    dagster.until(lambda: dagster.has_ended(worker), "the thawed process has ended")
    dagster.drop("seven", b=10)
    dagster.until(lambda: dagster.totals() == {"a": 11011, "b": 1202, "stuck": 500}, "nothing was written twice")

    last = dagster.until(
        lambda: dagster.started() == dagster.lease()["owner"] and dagster.started(), "another run writes"
    )
    dagster.cancel(last)
