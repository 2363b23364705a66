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
DEADLINE = 120


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

    def worker_of(self, run_id):
        """The process that executes a run, as its log says."""
        found = self.ask("query($r: ID!) { logsForRun(runId: $r) { ... on EventConnection { events { ... on MessageEvent { message } } } } }", r=run_id)
        messages = [e.get("message", "") for e in found["logsForRun"]["events"]]
        return int(next(m for text in messages for m in re.findall(r"Started process for run \(pid: (\d+)\)", text)))

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
    assert {r["runId"]: r["status"] for r in dagster.runs()}[killed] == "FAILURE"
    dagster.until(lambda: dagster.started() not in (None, killed), "a second run is there")
    assert len(dagster.runs()) == 2

    # New code: the daemon and the code server come back with another factor. The run has lived on meanwhile, and gives way.
    old = dagster.started()
    dagster.stop()
    dagster.start(STREAMING_TEST_FACTOR="100")
    dagster.until(lambda: dagster.started() not in (None, old), "a run with the new code")
    assert {r["runId"]: r["status"] for r in dagster.runs()}[old] == "SUCCESS"
    dagster.drop("three", b=1)
    dagster.until(lambda: dagster.totals() == {"a": 11, "b": 102}, "the new code has taken over the state of the old")


def test_a_deployment_from_start_to_cancel(dagster):
    dagster.drop("one", a=1, b=2)
    dagster.start()
    dagster.sensor(on=True)
    dagster.until(lambda: dagster.totals() == {"a": 1, "b": 2}, "the sensor has started the job and the first file is in the table")

    first = dagster.started()
    lease = json.loads(max((dagster.folder / "checkpoints/sales/lease").glob("*.json"), key=lambda p: int(p.stem)).read_text())
    assert lease["owner"] == first

    # Suspend and resume.
    dagster.launch("sales_suspend")
    dagster.until(lambda: dagster.started() is None, "the job has stopped, being suspended")
    dagster.drop("two", a=10)
    assert dagster.totals() == {"a": 1, "b": 2}
    dagster.launch("sales_resume")
    dagster.until(lambda: dagster.totals() == {"a": 11, "b": 2}, "the job goes on where it was")

    # Cancel.
    run = dagster.started()
    dagster.terminate(run)
    dagster.until(lambda: {r["runId"]: r["status"] for r in dagster.runs()}[run] == "CANCELED", "the run is cancelled")
    held = json.loads(max((dagster.folder / "checkpoints/sales/lease").glob("*.json"), key=lambda p: int(p.stem)).read_text())
    assert held["released"]
