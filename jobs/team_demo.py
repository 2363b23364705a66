"""Runs the project in `jobs/team`: a backfill, then a stream that is killed once, then an order that comes too late.

Everything is real: Dagster's webserver and daemon, dbt, DuckDB, Delta, Spark. Nothing but the orders is launched by
hand; all else follows by automation. At the end the tables are compared with what plain Python makes of the orders.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import duckdb
import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError
from rich.console import Console

from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.desired import read_status
from jobs.team.orders import late_order, orders_of

HOME = Path(os.environ.get("TEAM_HOME", ".dagster_unified/team")).absolute()
MODULE = "jobs.team.definitions"
PORT = int(os.environ.get("TEAM_PORT", "3333"))
BACKFILLED = [f"2024-03-0{day}" for day in (1, 2)]
STREAMED = [f"2024-03-0{day}" for day in (3, 4)]
LATE = "2024-03-03"
DEADLINE = 900.0
SETTINGS = """
telemetry: {enabled: false}
nux: {enabled: false}
concurrency: {runs: {max_concurrent_runs: 3}}
"""
BACKFILL = """
mutation($p: LaunchBackfillParams!) {
  launchPartitionBackfill(backfillParams: $p) {
    __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message }
  }
}"""
RUNS = """
query($f: RunsFilter!) { runsOrError(filter: $f) { ... on Runs { results { runId status tags { key value } } } } }"""

LOG = """
query($r: ID!) { logsForRun(runId: $r) { ... on EventConnection { events { ... on MessageEvent { message } } } } }"""
STARTED = re.compile(r"Started process for run \(pid: (\d+)\)")

Found = TypeVar("Found")
Amounts = dict[tuple[str, str], int]
console = Console(highlight=False)


def main() -> int:
    """The demonstration; 0 where all tables are as they should be."""
    shutil.rmtree(HOME, ignore_errors=True)
    (HOME / "dagster").mkdir(parents=True)
    (HOME / "dagster" / "dagster.yaml").write_text(SETTINGS)
    environment = {
        **os.environ,
        "TEAM_HOME": str(HOME),
        "DAGSTER_HOME": str(HOME / "dagster"),
        "TEAM_DEMO": str(os.getpid()),
    }
    with (HOME / "dagster.log").open("wb") as log:
        dagster = subprocess.Popen(
            [sys.executable, "-m", "dagster", "dev", "-m", MODULE, "-h", "127.0.0.1", "-p", str(PORT)],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        until(lambda: ask("{ version }"), "Dagster is up")
        console.print(f"Dagster is at http://127.0.0.1:{PORT}")
        return show(environment)
    finally:
        dagster.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            dagster.wait(90)
        end(environment)


def show(environment: dict[str, str]) -> int:
    """All steps of it."""
    asked = {"assetSelection": [{"path": ["orders"]}], "partitionNames": BACKFILLED}
    until(lambda: ask(BACKFILL, p=asked)["launchPartitionBackfill"]["backfillId"], "the backfill is launched")
    console.print(f"a backfill of orders over {', '.join(BACKFILLED)}: all behind it follows")
    everything = until(lambda: reached(BACKFILLED), f"{BACKFILLED[-1]} has reached dbt and polars")
    console.print(f"BATCH, dbt and polars have {len(everything)} rows of revenue")

    for sensor in ("revenue_streaming_sensor", "revenue_late_sensor"):
        command = [sys.executable, "-m", "dagster", "sensor", "start", sensor, "-m", MODULE]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    console.print("the stream is on")
    killed = ""
    for day in STREAMED:
        orders = orders_of(day)
        for first in range(0, len(orders), 100):
            append(orders.slice(first, 100))
            if day == STREAMED[0] and first == 200:
                killed = kill()
            time.sleep(1)
    until(lambda: reached(BACKFILLED + STREAMED[:-1]), f"{STREAMED[-2]} has reached dbt and polars")
    console.print(f"the days of the stream have reached dbt and polars; run {killed} was killed with kill -9")

    append(late_order(LATE, "west", 99_999_999))
    console.print(f"an order of {LATE} has come too late")
    until(lambda: reached(BACKFILLED + STREAMED[:-1]), f"{LATE} has run again, and dbt and polars as well")
    rerun = [run for run in runs("revenue_batch") if tag(run, "dagster/partition") == LATE]
    console.print(f"BATCH ran {LATE} again ({rerun[0]['runId'][:8]}); revenue, dbt and polars are as Python has them")
    streams = {run["runId"][:8]: run["status"] for run in runs("revenue_streaming")}
    console.print(f"the stream's runs: {', '.join(f'{run} {status}' for run, status in streams.items())}")
    return 0 if streams[killed] == "FAILURE" and len(streams) > 1 and rerun else 1


def expected() -> Amounts:
    """What plain Python makes of all orders: the revenue by day and shop."""
    amounts: dict[tuple[str, str], int] = defaultdict(int)
    for order in DeltaTable(str(HOME / "lake" / "orders")).to_pyarrow_table().to_pylist():
        if order["amount"] > 0:
            amounts[order["day"], order["shop"]] += order["amount"]
    return amounts


def reached(days: list[str]) -> Amounts | None:
    """The revenue of some days, where the pipeline's table, dbt's and polars' files all have it; else None."""
    wanted = {key: amount for key, amount in expected().items() if key[0] in days}
    best = {day: max((amount, shop) for (of, shop), amount in wanted.items() if of == day)[1] for day in days}
    if not wanted or of_pipeline(days) != wanted or of_dbt(days) != wanted or of_polars(days) != best:
        return None
    return wanted


def of_pipeline(days: list[str]) -> Amounts:
    """What the pipeline's table has."""
    rows = DeltaTable(str(HOME / "lake" / "revenue")).to_pyarrow_table().to_pylist()
    return {(str(row["day"]), row["shop"]): row["amount"] for row in rows if str(row["day"]) in days}


def of_dbt(days: list[str]) -> Amounts:
    """What dbt's table has."""
    copied = shutil.copy(HOME / "team.duckdb", HOME / "copied.duckdb")  # a reader would keep dbt from writing
    with duckdb.connect(str(copied), read_only=True) as database:
        rows = database.execute("select day, shop, amount from shares").fetchall()
    return {(str(day), shop): amount for day, shop, amount in rows if str(day) in days}


def of_polars(days: list[str]) -> dict[str, str]:
    """The best shop of each day."""
    found = {}
    for day in days:
        with (HOME / "best" / f"{day}.csv").open(newline="") as file:
            found[day] = next(csv.DictReader(file))["shop"]
    return found


def append(orders: pa.Table) -> None:
    """Some service writes to the lake, of which Dagster knows nothing."""
    write_deltalake(str(HOME / "lake" / "orders"), orders, mode="append")


def kill() -> str:
    """Kill the process of the stream as soon as it has committed something; returns its run."""
    run = until(lambda: next(iter(runs("revenue_streaming", "STARTED")), None), "the stream runs")
    directory = CheckpointDirectory(str(HOME / "checkpoints"), "revenue")
    until(lambda: (status := read_status(directory)) and status.epochs > 0, "the stream has committed an epoch")
    started = until(lambda: STARTED.search(json.dumps(ask(LOG, r=run["runId"]))), "the run says which process it is")
    os.kill(int(started[1]), signal.SIGKILL)
    console.print(f"killed the process of run {run['runId'][:8]}")
    return str(run["runId"][:8])


def runs(job: str, *statuses: str) -> list[dict[str, Any]]:
    """The runs of a job, the newest first."""
    wanted: dict[str, Any] = {"pipelineName": job} | ({"statuses": list(statuses)} if statuses else {})
    found: list[dict[str, Any]] = ask(RUNS, f=wanted)["runsOrError"]["results"]
    return found


def tag(run: dict[str, Any], key: str) -> str | None:
    """A tag of a run."""
    return next((tag["value"] for tag in run["tags"] if tag["key"] == key), None)


def ask(query: str, **variables: Any) -> Any:
    """What the webserver answers."""
    body = json.dumps({"query": query, "variables": variables}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/graphql", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["data"]


def until(look: Callable[[], Found | None], what: str) -> Found:
    """Wait for something to be there."""
    end = time.monotonic() + DEADLINE
    while True:
        with suppress(
            OSError, KeyError, TypeError, ValueError, duckdb.Error, DeltaError
        ):  # not there yet, or being written
            if found := look():
                return found
        if time.monotonic() > end:
            raise TimeoutError(f"not within {DEADLINE:.0f} s: {what}; see {HOME / 'dagster.log'}")
        time.sleep(1)


def end(environment: dict[str, str]) -> None:
    """End the runs that live on, the stream among them."""
    mark = f"TEAM_DEMO={environment['TEAM_DEMO']}".encode()
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdigit() and mark in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
