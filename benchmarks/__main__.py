"""Run families of benchmarks. Each prints its results as it ends, and keeps them in `benchmarks/results/latest.json`.

Exit code 1 if a bar does not hold.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from rich.console import Console

from benchmarks import (
    batch,
    clusters,
    connectors,
    iterations,
    location,
    lowering,
    ranges,
    recovery,
    staging,
    state,
    stream,
    tables,
    windows,
)
from benchmarks.bars import Options
from benchmarks.results import Family, run

FAMILIES = (
    Family("batch", batch.measure, 8),
    Family("cluster", clusters.measure, 15),
    Family("connectors", connectors.measure, 5),
    Family("iterations", iterations.measure, 6),
    Family("location", location.measure, 1),
    Family("lowering", lowering.measure, 5),
    Family("ranges", ranges.measure, 5),
    Family("recovery", recovery.measure, 15),
    Family("staging", staging.measure, 6),
    Family("state", state.measure, 10),
    Family("stream", stream.measure, 15),
    Family("tables", tables.measure, 3),
    Family("windows", windows.measure, 12),
)
RESULTS = Path(__file__).parent / "results" / "latest.json"
Name = Literal[
    "batch",
    "cluster",
    "connectors",
    "iterations",
    "location",
    "lowering",
    "ranges",
    "recovery",
    "staging",
    "state",
    "stream",
    "tables",
    "windows",
]
app = App(help=__doc__, version_flags=[])


@app.default
def main(
    *,
    only: Annotated[tuple[Name, ...], Parameter(consume_multiple=True)] = (),
    records: int = 5_000_000,
    keys: int = 10_000,
    rounds: int = 4,
    one_key_records: int = 20_000_000,
    flink: bool = True,
    flink_records: int = 1_000_000,
    stream_records: int = 6_000_000,
) -> int:
    """Measure all families, or those that `only` names."""
    options = Options(records, keys, rounds, one_key_records, flink, flink_records, stream_records)
    chosen = [family for family in FAMILIES if not only or family.name in only]
    return 0 if run(chosen, options, RESULTS, Console()) else 1


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))
