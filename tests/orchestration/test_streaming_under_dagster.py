"""A streaming deployment under a real webserver's code server and daemon: start, crash, restart, suspend, resume, upgrade, cancel."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
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
        self.environment = {**os.environ, "DAGSTER_HOME": str(home), "STREAMING_TEST_FOLDER": str(folder), "UNIFIED_SENSOR_SECONDS": "1", "PYTHONPATH": str(ROOT)}
        self.process = None

    def start(self, **environment):
        log = (self.folder / "dev.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dagster", "dev", "-m", "tests.orchestration.streaming_job", "-d", str(ROOT), "-h", "127.0.0.1", "-p", str(PORT)],
            env={**self.environment, **environment}, cwd=ROOT, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        self.until(lambda: self.ask("{ version }"), "the webserver is up")

    def stop(self):
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                pass
            for group in self._groups():
                os.killpg(group, signal.SIGKILL)

    def _groups(self):
        try:
            return [os.getpgid(self.process.pid)]
        except ProcessLookupError:
            return []

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
        params = {"selector": selector, "runConfigData": {"ops": {}} if False else {"resources": {"execution": {"config": {"execution.checkpointing.dir": str(self.folder / "checkpoints")}}}}, "mode": "default"}
        return self.ask("mutation($p: ExecutionParams!) { launchRun(executionParams: $p) { __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } ... on RunConfigValidationInvalid { errors { message } } } }", p=params)

    def terminate(self, run_id):
        return self.ask("mutation($r: String!) { terminateRun(runId: $r) { __typename } }", r=run_id)

    def runs(self):
        found = self.ask("{ runsOrError(filter: {pipelineName: \"sales_streaming\"}) { ... on Runs { results { runId status } } } }")
        return found["runsOrError"]["results"]

    def started(self):
        return next((r["runId"] for r in self.runs() if r["status"] == "STARTED"), None)

    def ticks(self):
        selector = {**self.SELECTOR, "sensorName": "sales_streaming_sensor"}
        try:
            found = self.ask("query($s: SensorSelector!) { sensorOrError(sensorSelector: $s) { ... on Sensor { sensorState { ticks(limit: 5) { status skipReason error { message } } } } } }", s=selector)
            return found["sensorOrError"]["sensorState"]["ticks"]
        except (OSError, KeyError, TypeError):
            return None

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
    running.stop()


def worker_of(run_id):
    """The process that executes a run."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                environment = (process / "environ").read_bytes()
                if f"DAGSTER_RUN_ID={run_id}".encode() in environment or run_id.encode() in (process / "cmdline").read_bytes():
                    return int(process.name)
            except OSError:
                continue
    return None


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
