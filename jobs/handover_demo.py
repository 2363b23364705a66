"""Runs January to October of the flights in BATCH, day by day, and November and December as a stream after them.

The backfill leaves a savepoint, and the sensor starts the stream from it, under a real `dagster dev`. The tables have
to be those of one BATCH run over the year.
"""

from __future__ import annotations

import subprocess
import sys
import time

from rich.console import Console
from upath import UPath

from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.desired import read_status
from dagster_unified.settings import configuration
from dagster_unified.state import Savepoint
from dagster_unified.storage.paths import remove_tree
from jobs.backfill_demo import BIN, dagster, follow, launch, stages, until
from jobs.comparison import compare
from jobs.data import OUTPUT
from jobs.ongoing_delays import HISTORY, SAVEPOINT, TABLES, pipeline
from resources import STORAGE

SENSOR = f"{pipeline.name}_streaming_sensor"
DEADLINE = 1800.0
console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    """The demonstration; 0 where the tables are equal."""
    directory = CheckpointDirectory(configuration()["execution.checkpointing.dir"], pipeline.name)
    for old in (TABLES, SAVEPOINT, UPath(STORAGE) / pipeline.name, directory.path):
        remove_tree(old)
    console.print("one BATCH run over the year, for comparison")
    unified("run", "jobs.delay_totals", "-D", "execution.runtime-mode=BATCH", "--rows", "0")
    with dagster("demo-handover"):
        if not history():
            return 1
        stream(directory)
    return compare(console, pipeline, OUTPUT, "in one BATCH run", TABLES, "in BATCH and then STREAMING")


def history() -> bool:
    """Runs the history in BATCH, which leaves the savepoint; says whether that went well."""
    days, begun = HISTORY.get_partition_keys(), time.monotonic()
    console.print(f"BATCH: {days[0]} to {days[-1]} in {len(days)} daily partitions")
    ended = follow(launch(stages(pipeline.name), days, "the history"), [])
    console.print(f"the backfill ended after {time.monotonic() - begun:.0f} s: {ended}")
    if ended != "COMPLETED_SUCCESS":
        return False
    savepoint = Savepoint.read(SAVEPOINT)
    for operator in savepoint.operators:
        console.print(f"the savepoint has {operator.rows} keys of '{operator.name}'")
    for source, position in savepoint.positions.items():
        console.print(f"and of source '{source}' was read: {position.describe()}")
    return True


def stream(directory: CheckpointDirectory) -> None:
    """Lets the sensor start the stream, and drains it."""
    begun = time.monotonic()
    console.print("STREAMING: the sensor is on, and starts the stream from the savepoint")
    run("dagster", "sensor", "start", SENSOR, "-w", "workspace.yaml")
    until(lambda: (status := read_status(directory)) is not None and status.epochs > 0, "an epoch", DEADLINE)
    unified("drain", "jobs.ongoing_delays")
    until(lambda: (held := directory.deployed()) is not None and held.finished, "the end of the stream", DEADLINE)
    run("dagster", "sensor", "stop", SENSOR, "-w", "workspace.yaml")
    status = read_status(directory)
    epochs = status.epochs if status is not None else 0
    console.print(f"the stream read the rest in {epochs} epochs, and ended after {time.monotonic() - begun:.0f} s")


def unified(*arguments: str) -> None:
    """Runs the command line."""
    run("dagster-unified", *arguments)


def run(program: str, *arguments: str) -> None:
    """Runs a program of this environment."""
    subprocess.run([BIN / program, *arguments], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
