"""A streaming deployment under a real webserver's code server and daemon: start, crash, restart, suspend, resume, upgrade, cancel."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from deltalake import DeltaTable

ROOT = Path(__file__).parents[2]
PORT = 39_471
DEADLINE = 240


class Dagster:
    """`dagster dev`, driven as the UI drives it: through GraphQL."""

    def __init__(self, folder):
        self.folder = folder
        home = folder / "home"
        home.mkdir()
        (home / "dagster.yaml").write_text("telemetry:\n  enabled: false\nrun_monitoring:\n  enabled: true\n  poll_interval_seconds: 2\n")
        self.environment = {**os.environ, "DAGSTER_HOME": str(home), "STREAMING_TEST_FOLDER": str(folder), "PYTHONPATH": str(ROOT)}
        self.process = None

    def start(self, **environment):
        log = (self.folder / "dev.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dagster", "dev", "-m", "tests.orchestration.streaming_job", "-d", str(ROOT), "-h", "127.0.0.1", "-p", str(PORT)],
            env={**self.environment, **environment}, cwd=ROOT, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        self.until(lambda: self.ask("{ version }"), "the webserver is up")

    def stop(self):
        """Stops the webserver and the daemon; runs live on, as they do for a user."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(40)

    def end(self):
        """Stops everything that was started for this test, the processes of runs among them."""
        self.stop()
        mark = f"STREAMING_TEST_FOLDER={self.folder}".encode()
        for process in Path("/proc").iterdir():
            with suppress(OSError):
                if process.name.isdigit() and mark in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)

    def ask(self, query, **variables):
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{PORT}/graphql", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=20) as response:
            return json.load(response)["data"]

    def until(self, look, what):
        end = time.monotonic() + DEADLINE
        while True:
            try:
                found = look()
                if found:
                    return found
            except OSError:
                pass
            if time.monotonic() > end:
                raise AssertionError(f"not within {DEADLINE} s: {what}\n{(self.folder / 'dev.log').read_text()[-3000:]}\n{self.ticks()}\n{self.runs()}")
            time.sleep(0.3)

    SELECTOR = {"repositoryName": "__repository__", "repositoryLocationName": "tests.orchestration.streaming_job"}

    def sensor(self, on):
        if on:
            selector = {**self.SELECTOR, "sensorName": "sales_streaming_sensor"}
            self.ask("mutation($s: SensorSelector!) { startSensor(sensorSelector: $s) { __typename } }", s=selector)

    def launch(self, job):
        selector = {**self.SELECTOR, "pipelineName": job}
        params = {"selector": selector, "runConfigData": {}, "mode": "default"}
        return self.ask(
            "mutation($p: ExecutionParams!) { launchRun(executionParams: $p) { __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } ... on RunConfigValidationInvalid { errors { message } } } }",
            p=params,
        )

    def terminate(self, run_id):
        return self.ask("mutation($r: String!) { terminateRun(runId: $r) { __typename } }", r=run_id)

    def runs(self):
        found = self.ask('{ runsOrError(filter: {pipelineName: "sales_streaming"}) { ... on Runs { results { runId status } } } }')
        return found["runsOrError"]["results"]

    def started(self):
        return next((r["runId"] for r in self.runs() if r["status"] == "STARTED"), None)

    def ticks(self):
        selector = {**self.SELECTOR, "sensorName": "sales_streaming_sensor"}
        try:
            found = self.ask(
                "query($s: SensorSelector!) { sensorOrError(sensorSelector: $s) { ... on Sensor { sensorState { ticks(limit: 5) { status skipReason error { message } } } } } }",
                s=selector,
            )
            return found["sensorOrError"]["sensorState"]["ticks"]
        except (OSError, KeyError, TypeError):
            return None

    def cancel(self, run):
        begun = time.monotonic()
        self.terminate(run)
        self.until(lambda: self.statuses()[run] == "CANCELED", "the run is cancelled")
        sys.stdout.write(f"cancelled within {time.monotonic() - begun:.1f} s\n")
        lease = self.lease()
        assert (lease["owner"], lease["released"]) == (run, True)

    def lease(self):
        return json.loads(max((self.folder / "checkpoints/sales/lease").glob("*.json"), key=lambda p: int(p.stem)).read_text())

    def statuses(self):
        return {r["runId"]: r["status"] for r in self.runs()}

    def said(self, run_id):
        """All messages of a run's log, one after another."""
        found = self.ask(
            "query($r: ID!) { logsForRun(runId: $r) { ... on EventConnection { events { ... on MessageEvent { message } ... on ErrorEvent { error { message } } } } } }", r=run_id
        )
        return "\n".join(e.get("message", "") + (e.get("error") or {}).get("message", "") for e in found["logsForRun"]["events"])

    def worker_of(self, run_id):
        """The process that executes a run, as its log says."""
        return int(re.findall(r"Started process for run \(pid: (\d+)\)", self.said(run_id))[0])

    def drop(self, name, **amounts):
        target = self.folder / "in"
        target.mkdir(exist_ok=True)
        (target / f".{name}").write_text("shop,amount\n" + "".join(f"{shop},{amount}\n" for shop, amount in amounts.items()))
        (target / f".{name}").rename(target / f"{name}.csv")

    def totals(self):
        try:
            return {r["shop"]: r["amount"] for r in DeltaTable(str(self.folder / "totals")).to_pyarrow_table().to_pylist()}
        except Exception:
            return {}


@pytest.fixture
def dagster(tmp_path):
    running = Dagster(tmp_path)
    yield running
    running.end()


def test_a_deployment_that_is_killed_goes_on_and_new_code_takes_over_its_state(dagster):
    dagster.drop("one", a=1, b=2)
    dagster.environment["STREAMING_TEST_EXECUTOR"] = "multiprocess"  # the step's process outlives the one that is killed
    dagster.start()
    dagster.sensor(on=True)
    dagster.until(lambda: dagster.totals() == {"a": 1, "b": 2}, "the first file is in the table")
    killed = dagster.started()
    os.kill(dagster.worker_of(killed), signal.SIGKILL)
    dagster.drop("two", a=10)
    dagster.until(lambda: dagster.totals() == {"a": 11, "b": 2}, "another run goes on where the killed one was")
    assert dagster.statuses()[killed] == "FAILURE"
    dagster.until(lambda: dagster.started() not in (None, killed), "a second run is there")
    assert len(dagster.runs()) == 2

    # New code: the daemon and the code server come back with another factor. The run has lived on meanwhile, and gives way.
    old = dagster.started()
    dagster.stop()
    dagster.start(STREAMING_TEST_FACTOR="100")
    dagster.until(lambda: dagster.started() not in (None, old), "a run with the new code")
    assert dagster.statuses()[old] == "SUCCESS"
    dagster.drop("three", b=1)
    dagster.until(lambda: dagster.totals() == {"a": 11, "b": 102}, "the new code has taken over the state of the old")

    # A second job, launched by hand, writes nothing and says why.
    writer = dagster.started()
    second = dagster.launch("sales_streaming")["launchRun"]["run"]["runId"]
    dagster.until(lambda: dagster.statuses()[second] == "FAILURE", "the second job has given up")
    assert f"another job, {writer}, is writing" in dagster.said(second)
    assert dagster.statuses()[writer] == "STARTED"
    dagster.drop("four", a=1)
    dagster.until(lambda: dagster.totals() == {"a": 111, "b": 102}, "the first goes on")
    dagster.cancel(writer)


def test_a_deployment_from_start_to_cancel(dagster):
    dagster.drop("one", a=1, b=2)
    dagster.start()
    dagster.sensor(on=True)
    dagster.until(lambda: dagster.totals() == {"a": 1, "b": 2}, "the sensor has started the job and the first file is in the table")

    first = dagster.started()
    assert dagster.lease()["owner"] == first

    # Suspend and resume.
    dagster.launch("sales_suspend")
    dagster.until(lambda: dagster.started() is None, "the job has stopped, being suspended")
    dagster.drop("two", a=10)
    assert dagster.totals() == {"a": 1, "b": 2}
    dagster.launch("sales_resume")
    dagster.until(lambda: dagster.totals() == {"a": 11, "b": 2}, "the job goes on where it was")

    # An epoch that hangs: the sensor replaces the job.
    hanging = dagster.started()
    dagster.drop("three", stuck=5, b=1)
    dagster.until(lambda: dagster.statuses()[hanging] == "FAILURE", "the job that makes no progress has been replaced")
    assert "has been busy with one epoch for" in dagster.said(hanging)
    (dagster.folder / "go on").touch()
    dagster.until(lambda: dagster.totals() == {"a": 11, "b": 3, "stuck": 5}, "another job has done the epoch")

    # A process that is frozen, taken to be dead, and thawed when another one writes.
    frozen = dagster.until(lambda: dagster.started() == dagster.lease()["owner"] and dagster.started(), "another run writes")
    worker = dagster.worker_of(frozen)
    os.kill(worker, signal.SIGSTOP)
    dagster.drop("four", a=100)
    dagster.until(lambda: dagster.totals() == {"a": 111, "b": 3, "stuck": 5}, "another run has taken over")
    os.kill(worker, signal.SIGCONT)
    dagster.until(lambda: not Path(f"/proc/{worker}").exists() or "Z" in Path(f"/proc/{worker}/stat").read_text().split()[2], "the thawed process has ended")
    dagster.drop("five", b=10)
    dagster.until(lambda: dagster.totals() == {"a": 111, "b": 13, "stuck": 5}, "nothing was written twice")

    last = dagster.until(lambda: dagster.started() == dagster.lease()["owner"] and dagster.started(), "another run writes")
    dagster.cancel(last)
