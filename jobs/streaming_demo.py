"""Replays the flights of 2013 as a stream, kills the job in the middle, and compares its tables with BATCH's.

A file a day is put into a watched folder. Everything is real: Dagster's daemon runs the sensor, the sensor starts the
job, `kill -9` ends it, the sensor starts it again.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dagster import DagsterInstance, DagsterRunStatus, RunsFilter
from rich.console import Console
from rich.progress import Progress

from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.desired import read_status
from dagster_unified.settings import configuration
from dagster_unified.storage.paths import remove_tree
from jobs.comparison import compare
from jobs.data import OUTPUT, daily
from jobs.live_flights import INCOMING, TABLES, pipeline

BIN = Path(sys.executable).parent
DEADLINE = 600.0
console = Console()


def main() -> int:
    """The demonstration; 0 where the tables are equal."""
    checkpoints = configuration()["execution.checkpointing.dir"]
    directory = CheckpointDirectory(checkpoints, "live_flights")
    for old in (INCOMING, TABLES, directory.path):
        remove_tree(old)
    INCOMING.mkdir(parents=True)
    console.print("BATCH over the year, for comparison")
    subprocess.run(
        [BIN / "dagster-unified", "run", "jobs.flight_delays", "-D", "execution.runtime-mode=BATCH", "--rows", "0"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    with DagsterInstance.get() as instance, daemon("-w", "workspace.yaml"):
        subprocess.run(
            [BIN / "dagster", "sensor", "start", "live_flights_streaming_sensor", "-w", "workspace.yaml"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        console.print("the sensor is on")
        killed = replay(instance, directory)
        subprocess.run([BIN / "dagster-unified", "drain", "jobs.live_flights"], check=True, stdout=subprocess.DEVNULL)
        console.print("the year is over: draining")
        until(lambda: (found := directory.deployed()) is not None and found.finished, "the job has finished")
        runs = instance.get_runs(RunsFilter(job_name="live_flights_streaming"))
        subprocess.run(
            [BIN / "dagster", "sensor", "stop", "live_flights_streaming_sensor", "-w", "workspace.yaml"],
            check=False,
            stdout=subprocess.DEVNULL,
        )
    console.print(f"{len(runs)} runs, one of them ({killed[:8]}) ended by kill -9")
    return compare(console, pipeline, OUTPUT, "in BATCH", TABLES, "in STREAMING")


def replay(instance: DagsterInstance, directory: CheckpointDirectory) -> str:
    """Drops a file a day; kills the job once half of them are there. Gives the killed run."""
    days = list(daily())
    killed = ""
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("2013", total=len(days))
        for number, (day, lines) in enumerate(days):
            (INCOMING / f".{day}").write_text("\n".join(lines) + "\n")
            (INCOMING / f".{day}").rename(INCOMING / f"{day}.csv")
            if number == len(days) // 2:
                run = until(lambda: running(instance, "live_flights_streaming"), "a run is started")
                until(
                    lambda: (s := read_status(directory)) is not None and s.epochs > 0, "the job has committed an epoch"
                )
                os.kill(process_of(instance, run), signal.SIGKILL)
                killed = run
                console.print(f"{day}: killed the worker of run {run[:8]} with kill -9")
            status = read_status(directory)
            progress.update(task, advance=1, description=f"{day}  epochs {status.epochs if status else 0}")
            if not console.is_terminal and number % 60 == 0:
                console.print(
                    f"{day}: {number + 1} of {len(days)} files dropped, {status.epochs if status else 0} epochs"
                )
            time.sleep(0.15)
    return killed


@contextmanager
def daemon(*location: str) -> Iterator[None]:
    """Dagster's daemon for a code location, with its output in a file."""
    log = Path(os.environ["DAGSTER_HOME"]) / "demo-daemon.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        running_daemon = subprocess.Popen(
            [BIN / "dagster-daemon", "run", *location], stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield
    finally:
        running_daemon.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            running_daemon.wait(30)
        running_daemon.kill()


def running(instance: DagsterInstance, job: str) -> str | None:
    """The run of a job that is started."""
    found = instance.get_runs(RunsFilter(job_name=job, statuses=[DagsterRunStatus.STARTED]), limit=1)
    return found[0].run_id if found else None


def process_of(instance: DagsterInstance, run_id: str) -> int:
    """The process that executes a run, as its log says."""
    for entry in instance.all_logs(run_id):
        found = re.search(
            r"Started process for run \(pid: (\d+)\)",
            entry.user_message or (entry.dagster_event.message if entry.dagster_event else "") or "",
        )
        if found:
            return int(found.group(1))
    raise RuntimeError(f"run {run_id} does not say which process it is")


def until(look: Callable[[], Any], what: str) -> Any:
    """Waits for something to be there."""
    end = time.monotonic() + DEADLINE
    while not (found := look()):
        if time.monotonic() > end:
            raise TimeoutError(f"not within {DEADLINE:.0f} s: {what}; see demo-daemon.log in DAGSTER_HOME")
        time.sleep(0.3)
    return found


if __name__ == "__main__":
    sys.exit(main())
