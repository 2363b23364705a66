"""Backfills the flights of 2013 in daily partitions, kills run workers at random meanwhile, and compares.

The backfill goes through GraphQL, against a real daemon.

    python -m jobs.backfill_demo [LAST_DAY [KILLS [SEED]]]

After the year's last day the tables have to be those of one run over the year.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from upath import UPath

from dagster_unified.storage.paths import remove_tree
from jobs.comparison import compare
from jobs.daily_flights import DAYS, TABLES, pipeline
from jobs.data import OUTPUT
from resources import STORAGE

BIN = Path(sys.executable).parent
PORT = 39_473
DEADLINE = 5400.0
STORE = UPath(STORAGE) / pipeline.name
console = Console()

BACKFILL = (
    "mutation($p: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $p) { __typename ... on"
    " LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }"
)
STATUS = (
    "query($b: String!) { partitionBackfillOrError(backfillId: $b) { ... on PartitionBackfill { status error { message"
    " } runs: unfinishedRuns(limit: 50) { id status } } } }"
)
LOG = (
    "query($r: ID!) { logsForRun(runId: $r) { ... on EventConnection { events { ... on MessageEvent { message } } } } }"
)


def main(last: str = "2013-12-31", kills: int = 6, seed: int = 2013) -> int:
    """The demonstration; 0 where the backfill went well and, after a whole year, where the tables are equal."""
    for earlier in (TABLES, STORE):
        remove_tree(earlier)
    keys = [key for key in DAYS.get_partition_keys() if key <= last]
    console.print(f"{len(keys)} partitions, {kills} kills, seed {seed}", highlight=False)
    with dagster("demo-backfill"):
        begun = time.monotonic()
        assets = stages(pipeline.name)
        points = sorted(random.Random(seed).sample(range(1, len(keys) * len(assets)), kills))
        backfill = launch(assets, keys, "the year", retries=kills)
        ended = follow(backfill, points)
        console.print(f"backfill {backfill}: {ended} after {time.monotonic() - begun:.0f} s", highlight=False)
    if ended != "COMPLETED_SUCCESS" or keys[-1] < DAYS.get_partition_keys()[-1]:
        return int(ended != "COMPLETED_SUCCESS")
    return compare(console, pipeline, OUTPUT, "in one run", TABLES, "day by day")


def launch(assets: list[dict[str, Any]], partitions: list[str], title: str, retries: int = 0) -> str:
    """Launches a backfill, and returns its id."""
    tags = [{"key": "dagster/max_retries", "value": str(retries)}]
    asked = {"assetSelection": assets, "partitionNames": partitions, "title": title, "tags": tags}
    return str(ask(BACKFILL, p=asked)["launchPartitionBackfill"]["backfillId"])


def stages(pipeline: str) -> list[dict[str, Any]]:
    """The assets of a pipeline's stages."""
    found = ask("{ assetNodes { assetKey { path } isMaterializable } }")["assetNodes"]
    return [
        {"path": n["assetKey"]["path"]} for n in found if n["isMaterializable"] and n["assetKey"]["path"][0] == pipeline
    ]


def follow(backfill: str, points: list[int]) -> str:
    """Waits for a backfill to end, and returns its status.

    It kills the run worker whenever so many partitions of stages are finished.
    """
    due = list(points)
    for_good = time.monotonic() + DEADLINE
    while time.monotonic() < for_good:
        time.sleep(1)
        seen = ask(STATUS, b=backfill)["partitionBackfillOrError"]
        if seen["status"] not in ("REQUESTED", "CANCELING", "FAILING"):
            return str(seen["status"])
        started = [r["id"] for r in seen["runs"] if r["status"] == "STARTED"]
        finished = {m.parents[1] for m in STORE.glob("*/*/*/manifest.json")}  # a re-execution links what was finished
        if due and started and len(finished) >= due[0] and kill(started[0]):
            del due[0]
            done = ", ".join(
                f"{n} of {stage}" for stage, n in sorted(Counter(folder.parent.name for folder in finished).items())
            )
            console.print(f"killed the worker of run {started[0][:8]} with kill -9, after {done}", highlight=False)
    raise TimeoutError(f"backfill {backfill} has not ended within {DEADLINE:.0f} s")


def kill(run: str) -> bool:
    """Ends the process of a run, and Spark's beside it."""
    events = ask(LOG, r=run)["logsForRun"]["events"]
    found = [
        int(p) for e in events for p in re.findall(r"Started process for run \(pid: (\d+)\)", e.get("message") or "")
    ]
    with suppress(ProcessLookupError):
        if found:
            os.kill(found[-1], signal.SIGKILL)
            return True
    return False


def ask(query: str, **variables: Any) -> dict[str, Any]:
    """Dagster's answer to a GraphQL query."""
    body = json.dumps({"query": query, "variables": variables}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/graphql", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    if answer.get("errors"):
        raise RuntimeError(answer["errors"][0]["message"])
    return answer["data"]


@contextmanager
def dagster(demo: str) -> Iterator[None]:
    """`dagster dev`, with its output in a file named after the demonstration."""
    log = Path(os.environ["DAGSTER_HOME"]) / f"{demo}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        running = subprocess.Popen(
            [BIN / "dagster", "dev", "-w", "workspace.yaml", "-h", "127.0.0.1", "-p", str(PORT)],
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        until(lambda: ask("{ version }"), "the webserver is up")
        yield
    finally:
        running.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            running.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)  # the webserver and the daemon as well


def until(look: Callable[[], Any], what: str, deadline: float = 180.0) -> None:
    """Waits for something."""
    for_good = time.monotonic() + deadline
    while time.monotonic() < for_good:
        with suppress(OSError):
            if look():
                return
        time.sleep(0.5)
    raise TimeoutError(f"not within {deadline:.0f} s: {what}")


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(main(*given[:1], *map(int, given[1:])))
