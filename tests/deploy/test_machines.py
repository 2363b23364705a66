"""The commands of `deploy/machines`, on this machine: a cluster, a bucket, and Dagster's three services."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tests.deploy.units import DEPLOY, UNITS, commands, service, variables
from tests.object_store import s3a, served
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
LAUNCH = """mutation {
  launchRun(executionParams: {mode: "default", runConfigData: {}, selector: {
    repositoryLocationName: "definitions", repositoryName: "__repository__", jobName: "destinations_batch"}}) {
    __typename ... on LaunchRunSuccess { run { runId } } ... on Error { message } } }"""
DATA = "from jobs import data; data.flights_csv(); data.airports_csv()"
LOADED = "{ repositoriesOrError { ... on RepositoryConnection { nodes { name } } } }"
STATUS = '{ runOrError(runId: "%s") { __typename ... on Run { status } } }'


class Machine:
    """All units on one machine, with other addresses and folders."""

    def __init__(self, folder, store):
        self.ports = {name: str(free_port()) for name in ("7077", "8080", "4266", "3000")}
        self.places = {
            "/opt/dagster-unified/.venv/bin/python": sys.executable,
            "/opt/dagster-unified/.venv": sys.prefix,
            "/opt/dagster-unified": str(ROOT),
            "/etc/dagster-unified": str(folder),
            "/var/lib/dagster-unified": str(folder / "home"),
            "spark-master": "127.0.0.1",
            **self.ports,
        }
        (folder / "home" / "recovery").mkdir(parents=True)
        (folder / "home" / "dagster.yaml").write_text((DEPLOY / "machines" / "dagster.yaml").read_text())
        (folder / "workspace.yaml").write_text(self.here((DEPLOY / "machines" / "workspace.yaml").read_text()))
        shipped = (DEPLOY / "machines" / "spark-defaults.conf").read_text()
        config = {**s3a(folder, store["AWS_ENDPOINT_URL"]), "spark.executor.memory": "700m", "spark.cores.max": "2"}
        ours = "".join(f"{name} {value}\n" for name, value in config.items())
        (folder / "spark-defaults.conf").write_text(f"{shipped}{ours}")  # the last word counts
        given = variables(DEPLOY / "machines" / "environment")
        self.environment = {
            **os.environ,
            **{name: self.here(value) for name, value in given.items()},
            **store,
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        self.log = (folder / "log").open("w+b")
        self.processes = []

    def here(self, text):
        return re.sub("|".join(self.places), lambda found: self.places[found[0]], text)

    def start(self, unit):
        """What systemd would start."""
        found = service(unit)
        own = [self.here(value).strip('"').partition("=") for value in found.get("Environment", [])]
        given = commands(unit, variables(DEPLOY / "machines" / "environment"))
        *first, last = ([self.here(word) for word in command] for command in given)
        options = {
            "cwd": self.here(*found["WorkingDirectory"]),
            "env": {**self.environment, **{name: value for name, _, value in own}},
            "stdout": self.log,
            "stderr": self.log,
        }
        for command in first:
            subprocess.run(command, check=True, **options)
        self.processes.append(subprocess.Popen(last, start_new_session=True, **options))

    def ask(self, query):
        body = json.dumps({"query": query}).encode()
        url = f"http://127.0.0.1:{self.ports['3000']}/graphql"
        asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.load(answer)["data"]

    def until(self, look, what):
        end = time.monotonic() + 600
        while True:
            with suppress(OSError, HTTPException, ValueError, TypeError):  # it is starting
                if found := look():
                    return found
            assert time.monotonic() < end, f"not within 600 s: {what}: {self.said()}"
            time.sleep(0.3)

    def said(self):
        self.log.flush()
        return Path(self.log.name).read_text()[-5000:]

    def end(self):
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.log.close()


@pytest.mark.spark
@pytest.mark.rotates("clusters")
def test_a_run_that_the_webserver_launches_leaves_its_tables_in_the_bucket(tmp_path, monkeypatch):
    with served("lake") as store:
        for name, value in store.items():
            monkeypatch.setenv(name, value)
        machine = Machine(tmp_path, store)
        subprocess.run([sys.executable, "-c", DATA], cwd=ROOT, env=machine.environment, check=True)
        try:
            for unit in UNITS:
                machine.start(unit)
            machine.until(
                lambda: machine.ask(LOADED)["repositoriesOrError"].get("nodes"), "the code location is loaded"
            )
            launched = machine.ask(LAUNCH)["launchRun"]
            assert "run" in launched, launched
            run = launched["run"]["runId"]
            ended = machine.until(
                lambda: (
                    status
                    if (status := machine.ask(STATUS % run)["runOrError"]["status"]) in ("SUCCESS", "FAILURE")
                    else None
                ),
                "the run has ended",
            )
            assert ended == "SUCCESS", machine.said()
        finally:
            machine.end()
        assert DeltaTable("s3://lake/tables/destinations").count() > 100
