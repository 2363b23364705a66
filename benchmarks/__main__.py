"""Runs families of benchmarks, prints a table, and leaves `benchmarks/results/latest.json`. Exit code 1 where a bar does not hold."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Literal

from cyclopts import App
from rich.console import Console
from rich.table import Table

from benchmarks import batch, ranges, recovery, staging, stream, windows
from benchmarks.bars import Options

FAMILIES = {"batch": batch.measure, "ranges": ranges.measure, "recovery": recovery.measure, "staging": staging.measure, "stream": stream.measure, "windows": windows.measure}
RESULTS = Path(__file__).parent / "results" / "latest.json"
app = App(help=__doc__, version_flags=[])


@app.default
def main(
    *,
    only: Literal["batch", "ranges", "recovery", "staging", "stream", "windows"] | None = None,
    records: int = 5_000_000,
    keys: int = 10_000,
    rounds: int = 4,
    one_key_records: int = 20_000_000,
    flink: bool = True,
    flink_records: int = 1_000_000,
    stream_records: int = 6_000_000,
) -> int:
    options = Options(records, keys, rounds, one_key_records, flink, flink_records, stream_records)
    bars, measurements = [], []
    for name, measure in FAMILIES.items():
        if only in (None, name):
            found, measured = measure(options)
            bars += found
            measurements += measured
    console = Console()
    rates = Table("variant", "M records/s, best", "all rounds")
    for m in measurements:
        rates.add_row(m.name, f"{m.best:.3f}", ", ".join(map(str, m.rounds)))
    console.print(rates)
    table = Table("bar", "value", "has to be", "holds")
    for b in bars:
        table.add_row(b.name, f"{b.value:.2f}", f"{'at most' if b.at_most else 'at least'} {b.bar}", "yes" if b.holds else "NO")
    console.print(table)
    RESULTS.parent.mkdir(exist_ok=True)
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()}
    RESULTS.write_text(
        json.dumps({"bars": [b.as_json() for b in bars], "measurements": [vars(m) for m in measurements], "machine": machine, "options": vars(options)}, indent=1) + "\n"
    )
    return 0 if all(b.holds for b in bars) else 1


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))
