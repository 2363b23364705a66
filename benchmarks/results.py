"""Runs families of benchmarks one after another. Each family's results are printed and written as soon as it ends.

`latest.json` keeps the last result of every family, with the options and the machine that it was measured with.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.bars import Bar, Measurement, Options

Measure = Callable[[Options], tuple[list[Bar], list[Measurement]]]


@dataclass(frozen=True)
class Family:
    """Benchmarks that are measured together.

    `minutes` is about how long they take on two cores, with the default options.
    """

    name: str
    measure: Measure
    minutes: int


def run(families: Sequence[Family], options: Options, path: Path, console: Console) -> bool:
    """Measure `families`, and return whether every bar holds."""
    console.print(announcement(families, options, read(path)), highlight=False, soft_wrap=True)
    holds = True
    for family in families:
        started = time.perf_counter()
        bars, measurements = family.measure(options)
        seconds = time.perf_counter() - started
        show(family.name, bars, measurements, seconds, console)
        write(path, family.name, bars, measurements, options, seconds)
        holds = holds and all(bar.holds for bar in bars)
    return holds


def announcement(families: Sequence[Family], options: Options, results: Mapping[str, Any]) -> str:
    """How long each family takes: as long as last time, if it was measured with these options; else an estimate."""
    parts, total = [], 0.0
    for family in families:
        last = results.get(family.name)
        measured = last if last is not None and last["options"] == asdict(options) else None
        minutes = float(family.minutes) if measured is None else measured["seconds"] / 60
        total += minutes
        parts.append(f"{family.name} {minutes:.0f}" + ("" if measured else " (estimate for the default sizes)"))
    return f"about {total:.0f} minutes: {', '.join(parts)}"


def show(name: str, bars: Sequence[Bar], measurements: Sequence[Measurement], seconds: float, console: Console) -> None:
    """Print what a family measured, and which bars hold."""
    console.print(f"{name}: {seconds / 60:.1f} minutes", highlight=False)
    rates = Table("variant", "M records/s, best", "all rounds")
    for measurement in measurements:
        rates.add_row(measurement.name, f"{measurement.best:.3f}", ", ".join(map(str, measurement.rounds)))
    if measurements:
        console.print(rates)
    table = Table("bar", "value", "has to be", "holds")
    for bar in bars:
        limit = f"{'at most' if bar.at_most else 'at least'} {bar.bar}"
        table.add_row(bar.name, f"{bar.value:.2f}", limit, "yes" if bar.holds else "NO")
    if bars:
        console.print(table)


def read(path: Path) -> dict[str, Any]:
    """The last results by family; none where the file is missing or of an older form."""
    if not path.exists():
        return {}
    families: dict[str, Any] = json.loads(path.read_text()).get("families", {})
    return families


def write(
    path: Path, name: str, bars: Sequence[Bar], measurements: Sequence[Measurement], options: Options, seconds: float
) -> None:
    """Replace a family's results, and leave those of the other families."""
    result = {
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "bars": [bar.as_json() for bar in bars],
        "measurements": [asdict(measurement) for measurement in measurements],
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()},
        "options": asdict(options),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_suffix(".staged")
    staged.write_text(json.dumps({"families": {**read(path), name: result}}, indent=1) + "\n")
    staged.replace(path)
