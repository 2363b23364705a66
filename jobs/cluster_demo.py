"""Runs the demonstrations on a cluster whose machines share nothing but a bucket, and compares with this machine.

It starts an S3 server, and a Spark master with two workers of one core, and stops them at its end. The pipelines and
their definitions are the same: only the environment says where they run. In each demonstration `kill -9` ends a worker
with its executor, and another one takes its place.

    python -m jobs.cluster_demo [connect] [batch | stream | backfill | handover | kafka]…

runs some of them, with `connect` through a Spark Connect server; without arguments all, in both ways.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from upath import UPath

from dagster_unified.api import Pipeline
from dagster_unified.engine import connect_server
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.desired import read_status
from dagster_unified.storage.paths import remove_tree
from jobs.comparison import compare
from jobs.daily_flights import pipeline as daily_flights
from jobs.data import OUTPUT
from jobs.flight_delays import pipeline as flight_delays
from jobs.kafka_flights import stream as kafka_flights
from jobs.live_flights import pipeline as live_flights
from jobs.ongoing_delays import pipeline as ongoing_delays
from tests.object_store import s3a, served
from tests.ports import free_port
from tests.servers.standalone import Cluster

BIN = Path(sys.executable).parent
LAKE = "s3://lake"
DAYS = "2013-01-05"
"""The last day of the backfill."""

BATCH = ("jobs.flight_delays", "-D", "execution.runtime-mode=BATCH", "--rows", "0")
console = Console(highlight=False, soft_wrap=True)


def main(*chosen: str) -> int:
    """The demonstrations; 0 where all went well and all tables are equal."""
    console.print("on this machine: the year in BATCH, and five days of the backfill")
    run("dagster-unified", "run", *BATCH)
    names = [name for name in chosen if name != "connect"]
    if not names or "backfill" in names:
        run("python", "-m", "jobs.backfill_demo", DAYS, "0")
    with tempfile.TemporaryDirectory(prefix="cluster-") as folder, deployed(Path(folder)) as demonstrations:
        run("python", "-m", "jobs.data")
        equal = True
        if "connect" not in chosen:
            equal = demonstrations.run(names)
        if not chosen or "connect" in chosen:
            equal = demonstrations.run_through_connect(names) and equal
        return int(not equal)


class Demonstrations:
    """What runs on the cluster."""

    def __init__(self, cluster: Cluster, config: Mapping[str, str]) -> None:
        self.cluster, self.config = cluster, config
        self.through = ""
        """By what the driver is reached, where it is not in the run's process."""

    def run(self, names: Sequence[str]) -> bool:
        """Runs those of these names, or all of them; returns whether all tables are equal."""
        known = {one.__name__: one for one in (self.batch, self.stream, self.backfill, self.handover, self.kafka)}
        equal = [known[name]() for name in names or known]  # all of them, whatever the first one gives
        return all(equal)

    def batch(self) -> bool:
        """The year in BATCH, by the command line."""
        where = ("--remote", os.environ["SPARK_REMOTE"]) if self.through else ("--master", self.cluster.url)
        command = ("dagster-unified", "run", *BATCH, *where, "--storage", f"{LAKE}/intermediates")
        self._losing_a_worker(f"BATCH{self.through}", command, lambda: self._has_stage("flight_delays"))
        return self._equal(flight_delays, "tables", OUTPUT)

    def stream(self) -> bool:
        """The year as a stream under the sensor: the run worker is killed as well."""
        directory = CheckpointDirectory(f"{LAKE}/checkpoints", live_flights.name)

        def runs() -> bool:
            return (status := read_status(directory)) is not None and status.epochs > 1

        self._losing_a_worker(f"STREAMING{self.through}", ("python", "-m", "jobs.streaming_demo"), runs)
        return self._equal(live_flights, "live_tables", OUTPUT)

    def backfill(self) -> bool:
        """Five daily partitions with carried state, by a backfill: a run worker is killed as well."""
        command = ("python", "-m", "jobs.backfill_demo", DAYS, "1")
        self._losing_a_worker(f"a backfill{self.through}", command, lambda: self._has_stage("daily_flights"))
        return self._equal(daily_flights, "daily_tables", OUTPUT.parent / "daily_tables")

    def handover(self) -> bool:
        """Ten months in daily partitions, and the rest as a stream from their savepoint; it compares by itself."""
        command = ("python", "-m", "jobs.handover_demo")
        self._losing_a_worker(f"a handover{self.through}", command, lambda: self._has_stage(ongoing_delays.name))
        return True

    def kafka(self) -> bool:
        """From a topic to PostgreSQL and a topic, where a run worker is killed as well; it compares by itself."""
        directory = CheckpointDirectory(f"{LAKE}/checkpoints", kafka_flights.name)

        def runs() -> bool:
            return (status := read_status(directory)) is not None and status.epochs > 1

        self._losing_a_worker(f"Kafka and PostgreSQL{self.through}", ("python", "-m", "jobs.kafka_demo"), runs)
        return True

    def run_through_connect(self, names: Sequence[str]) -> bool:
        """The same by one Spark Connect server on the cluster. A stream's query outlives its killed run worker."""
        for earlier in ("tables", "live_tables", "daily_tables", "intermediates", "checkpoints"):
            remove_tree(UPath(f"{LAKE}/{earlier}"))
        port = free_port()
        os.environ["SPARK_REMOTE"] = connect_server.ensure(port, self.cluster.url, self.config)
        self.through = " through Spark Connect"
        try:
            return self.run(names)
        finally:
            self.through = ""
            del os.environ["SPARK_REMOTE"]
            connect_server.stop(port)

    def _losing_a_worker(self, what: str, command: tuple[str, ...], begun: Callable[[], bool]) -> None:
        """Runs a program, and kills a worker that has an executor of it once it has begun."""
        since, killed = time.monotonic(), ""
        program = subprocess.Popen([BIN / command[0], *command[1:]], stdout=subprocess.DEVNULL)
        while program.poll() is None:
            victim = self.cluster.workers[0]
            if not killed and self.cluster.executor(victim) is not None and begun():
                killed = f"; a worker was killed after {time.monotonic() - since:.0f} s"
                self.cluster.kill(self.cluster.workers.pop(0))
                self.cluster.start_worker()
            time.sleep(0.2)
        if program.returncode:
            raise SystemExit(f"{what}: {' '.join(command)} ended with {program.returncode}")
        if not killed:
            raise SystemExit(f"{what}: {' '.join(command)} has ended before a worker could be killed")
        console.print(f"{what} on the cluster: {time.monotonic() - since:.0f} s{killed}")

    def _has_stage(self, pipeline: str) -> bool:
        """Whether a stage is finished, so that others read its result."""
        return any(UPath(f"{LAKE}/intermediates/{pipeline}", use_listings_cache=False).glob("**/manifest.json"))

    def _equal(self, pipeline: Pipeline, tables: str, expected: UPath) -> bool:
        return compare(console, pipeline, expected, "here", UPath(f"{LAKE}/{tables}"), "on the cluster") == 0


@contextmanager
def deployed(folder: Path) -> Iterator[Demonstrations]:
    """A cluster and a bucket, and the environment in which everything runs there."""
    with served("lake") as environment:
        os.environ |= environment
        config = {
            "spark.executor.memory": "700m",
            **s3a(folder, environment["AWS_ENDPOINT_URL"]),
        }
        (folder / "spark-defaults.conf").write_text("".join(f"{name} {value}\n" for name, value in config.items()))
        os.environ |= {  # which workers take with them, so that they know them before there are such servers
            "FLIGHTS_KAFKA": f"127.0.0.1:{free_port()}",
            "FLIGHTS_POSTGRES": f"postgresql://postgres@127.0.0.1:{free_port()}/postgres",
        }
        cluster = Cluster(folder)
        os.environ |= {
            "SPARK_CONF_DIR": str(folder),
            "SPARK_MASTER": cluster.url,
            "PYSPARK_PYTHON": sys.executable,
            "UNIFIED_STORAGE": f"{LAKE}/intermediates",
            "DAGSTER_UNIFIED_DATA": f"{LAKE}/data",
            "DAGSTER_UNIFIED_OUTPUT": f"{LAKE}/tables",
            "DAGSTER_UNIFIED_EXECUTION_CHECKPOINTING_DIR": f"{LAKE}/checkpoints",
        }
        console.print(f"a cluster at {cluster.url}, a bucket at {environment['AWS_ENDPOINT_URL']}")
        try:
            yield Demonstrations(cluster, config)
        finally:
            cluster.end()


def run(program: str, *arguments: str) -> None:
    """Runs a program of this environment."""
    subprocess.run([BIN / program, *arguments], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
