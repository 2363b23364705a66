"""`dagster dev` as a user runs it, driven as the UI drives it: through GraphQL."""

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

from tests.ports import free_port

ROOT = Path(__file__).parents[2]
DEADLINE = 600
SETTINGS = """
telemetry:
  enabled: false
run_monitoring:
  enabled: true
  poll_interval_seconds: 2
run_coordinator:
  module: dagster.core.run_coordinator
  class: QueuedRunCoordinator
  config:
    dequeue_interval_seconds: 1
"""


class DagsterDev:
    """The webserver, the code server and the daemon, on an instance of their own.

    `folder` holds all that a test writes.
    """

    module: str
    mark: str
    """The environment variable that tells the code location its folder."""

    look_every = 0.3
    """Seconds between two looks; each costs the webserver some of its own."""

    def __init__(self, folder, settings=""):
        self.folder = folder
        home = folder / "home"
        home.mkdir()
        (home / "dagster.yaml").write_text(SETTINGS + settings)
        self.environment = {
            **os.environ,
            "DAGSTER_HOME": str(home),
            "DAGSTER_EVENT_LOG_CONSUMER_DAEMON_INTERVAL_SECONDS": "2",
            self.mark: str(folder),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).with_name("daemon"))]),
        }
        self.process = None
        self.port = free_port()

    @property
    def selector(self):
        return {"repositoryName": "__repository__", "repositoryLocationName": self.module}

    def start(self, **environment):
        log = (self.folder / "dev.log").open("ab")
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "dagster",
                "dev",
                "-m",
                self.module,
                "-d",
                str(ROOT),
                "-h",
                "127.0.0.1",
                "-p",
                str(self.port),
            ],
            env={**self.environment, **environment},
            cwd=ROOT,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        self.until(lambda: self.ask("{ version }"), "the webserver is up")

    def stop(self):
        """Stops the webserver and the daemon; runs live on, as they do for a user."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(150)  # Dagster gives each of its processes a minute

    def end(self):
        """Kills everything that was started for this test, the processes of runs among them.

        Nobody looks at it any more, and `dagster dev` takes up to a minute to end by itself.
        """
        mark = f"{self.mark}={self.folder}".encode()
        for process in Path("/proc").iterdir():
            with suppress(OSError):
                if process.name.isdigit() and mark in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
        if self.process is not None:
            self.process.wait()

    def ask(self, query, **variables):
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/graphql", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)["data"]

    def until(self, look, what):
        end = time.monotonic() + DEADLINE
        while True:
            try:
                found = look()
                if found:
                    return found
            except (OSError, KeyError, TypeError, ValueError):  # not up yet, or an answer that is an error
                pass
            if time.monotonic() > end:
                raise AssertionError(
                    f"not within {DEADLINE} s: {what}\n{(self.folder / 'dev.log').read_text()[-3000:]}"
                )
            time.sleep(self.look_every)

    def said(self, run_id):
        """All messages of a run's log, one after another."""
        found = self.ask(
            "query($r: ID!) { logsForRun(runId: $r) { ... on EventConnection { events { ... on MessageEvent { message }"
            " ... on ErrorEvent { error { message } } } } } }",
            r=run_id,
        )
        return "\n".join(
            e.get("message", "") + (e.get("error") or {}).get("message", "") for e in found["logsForRun"]["events"]
        )

    def backfill(self, assets, partitions):
        """Launches a backfill of assets, by their paths, over partitions; gives its id."""
        found = self.ask(
            "mutation($p: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $p) { __typename ... on"
            " LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }",
            p={"assetSelection": [{"path": path} for path in assets], "partitionNames": partitions},
        )
        return found["launchPartitionBackfill"]["backfillId"]

    def backfill_status(self, backfill):
        found = self.ask(
            "query($b: String!) { partitionBackfillOrError(backfillId: $b) { ... on PartitionBackfill { status } } }",
            b=backfill,
        )
        return found["partitionBackfillOrError"]["status"]

    def runs(self):
        """Run and status, the newest first."""
        found = self.ask("{ runsOrError { ... on Runs { results { runId status } } } }")["runsOrError"]["results"]
        return [(r["runId"], r["status"]) for r in found]

    def workers_of(self, run_id):
        """The process that executes a run, as its log says; none while it does not say so."""
        return [int(pid) for pid in re.findall(r"Started process for run \(pid: (\d+)\)", self.said(run_id))]

    def worker_of(self, run_id):
        """The process that executes a run."""
        return self.workers_of(run_id)[0]
