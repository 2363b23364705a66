"""The example pipeline against the same questions answered in plain Python, on a slice of the real flights."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections import defaultdict
from datetime import date, datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path
from typing import get_type_hints

import pytest
from deltalake import DeltaTable

from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.testing import OneInputHarness
from dagster_unified.testing.parity import assert_same_in_both_modes
from jobs.data import flights_csv
from jobs.flight_delays import AircraftDay, Leg, build, pipeline
from jobs.flights import Flight, RawFlight, clean
from tests.jobs.flown import flown

# Busy on the first days of January; quiet for more than a month, and back; shared by two flights with one schedule; a
# handful more.
TAILS = ("N14228", "N725MQ", "N24211", "N3ALAA", "N13989", "N523JB", "N14148")
ROOT = Path(__file__).parents[2]
TEXTS = {name for name, kind in get_type_hints(RawFlight).items() if kind in (str, str | None)}


@pytest.fixture(scope="module")
def year(tmp_path_factory):
    return flights_csv(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def rows(year):
    """The aircraft's whole year, and everything that left in the first three days."""
    with year.open() as file:
        return [r for r in csv.DictReader(file) if r["tailnum"] in TAILS or (r["month"] == "1" and int(r["day"]) <= 3)]


@pytest.fixture(scope="module")
def tables(rows, spark, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    with (folder / "flights.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    plan = build(str(folder / "flights.csv"), str(folder / "tables")).plan({"execution.runtime-mode": "BATCH"})
    run_all(Run(plan, spark, IntermediateStore(str(folder / "store")), "run1", "run1"))
    return {
        name: DeltaTable(str(folder / "tables" / name)).to_pyarrow_table().to_pylist()
        for name in ("carrier_delays", "delay_propagation", "idle_aircraft")
    }


@pytest.fixture(scope="module")
def by_aircraft(rows):
    """Completed flights by aircraft in the order of departure, as `(row, departure, landing)`."""
    found = defaultdict(list)
    for flight in flown(rows):
        found[flight[0]["tailnum"]].append(flight)
    return {tail: sorted(flights, key=lambda f: f[1]) for tail, flights in found.items()}


def test_carrier_totals_and_extremes_are_those_of_the_completed_flights(tables, by_aircraft):
    delays, miles = defaultdict(list), defaultdict(int)
    for flights in by_aircraft.values():
        for row, _, _ in flights:
            delays[row["carrier"]].append(int(row["dep_delay"]))
            miles[row["carrier"]] += int(row["distance"])
    expected = {c: (len(d), sum(d), max(d), min(d), miles[c]) for c, d in delays.items()}
    assert {
        r["carrier"]: (r["flights"], r["minutes"], r["worst"], r["earliest"], r["miles"])
        for r in tables["carrier_delays"]
    } == expected


def test_propagation_adds_up_what_each_aircraft_brought_along(tables, by_aircraft):
    expected = defaultdict(lambda: [0, 0, 0, 0])
    for flights in by_aircraft.values():
        for (before, left, landed), (row, departed, _) in pairwise(flights):
            ground = int(((departed - landed) - (landed - left)).total_seconds()) // 60
            if (before["month"], before["day"]) == (row["month"], row["day"]) and ground > 0:
                delay = int(row["dep_delay"])
                inherited = max(0, min(int(before["arr_delay"]), delay))
                total = expected[row["carrier"], int(row["month"])]
                for i, amount in enumerate((1, inherited, delay - inherited, ground)):
                    total[i] += amount
    assert {
        (r["carrier"], r["month"]): [r["legs"], r["inherited"], r["own"], r["ground"]]
        for r in tables["delay_propagation"]
    } == expected


def test_an_aircraft_is_idle_where_it_did_not_leave_for_thirty_days_of_the_year(tables, by_aircraft):
    end = datetime(2014, 1, 1, 5, tzinfo=timezone.utc)
    expected = set()
    for tail, flights in by_aircraft.items():
        departures = [departed for _, departed, _ in flights[1:]] + [None]
        for (row, departed, landed), following in zip(flights, departures):
            noticed = departed + timedelta(days=30)
            if noticed < end and (following is None or following >= noticed):
                expected.add((tail, row["carrier"], row["dest"], landed, noticed))
    found = [(r["tail"], r["carrier"], r["last_seen"], r["since"], r["noticed"]) for r in tables["idle_aircraft"]]
    assert len(found) == len(expected)
    assert set(found) == expected


def test_a_day_of_one_aircraft_checked_by_hand(rows):
    """N13975 on 2 January, in New York's time.

    It left for Pittsburgh at 9:23, 179 minutes late, and landed at 10:24, in the end 173 late. It left for Rochester at
    13:31, 90 late, which is 187 minutes after landing, 61 of them the way back; it landed at 14:19, 83 late. It left
    for Washington at 17:28, 133 late, 189 minutes after landing, 48 of them the way back.
    """
    harness = OneInputHarness(lambda flights: flights.key_by("tail").process(AircraftDay()), Flight)
    day = sorted(
        (f for row in rows if row["tailnum"] == "N13975" for f in clean(_raw(row)) if f.day == date(2013, 1, 2)),
        key=lambda f: f.departed,
    )
    departures = [int(flight.departed.timestamp() * 1000) for flight in day]
    for flight, departure in zip(day, departures, strict=True):
        harness.process_element(flight, departure)
    assert harness.process_watermark(departures[-1]) == [
        Leg("EV", "N13975", month=1, ground=187 - 61, inherited=90, own=0),
        Leg("EV", "N13975", month=1, ground=189 - 48, inherited=83, own=50),
    ]


def test_both_modes_end_alike(rows):
    """Above all a silence within the year is reported alike.

    BATCH fires no timer before an aircraft's last flight, and yet must alert as STREAMING does.
    """
    assert_same_in_both_modes(build(), {"flights": [_raw(row) for row in rows if row["tailnum"] in TAILS]})


def test_the_data_is_written_once_whole_and_in_the_order_of_departure(year):
    written = year.stat().st_mtime_ns
    assert flights_csv(year.parent) == year
    assert year.stat().st_mtime_ns == written
    with year.open() as file:
        hours = [r["time_hour"] for r in csv.DictReader(file)]
    assert len(hours) == 336_776
    assert hours == sorted(hours)


def test_a_file_that_is_not_whole_is_written_again(year, tmp_path):
    (tmp_path / year.name).write_text("year,month\n")
    assert flights_csv(tmp_path).read_bytes() == year.read_bytes()
    assert [f.name for f in tmp_path.iterdir()] == [year.name]


def test_no_departure_is_later_than_the_watermark_allows(year):
    latest, behind = datetime.min.replace(tzinfo=timezone.utc), timedelta(0)
    with year.open() as file:
        for row in csv.DictReader(file):
            for flight in clean(_raw(row)):
                latest = max(latest, flight.departed)
                behind = max(behind, latest - flight.departed)
    assert behind < timedelta(days=1)


def test_the_lint_has_nothing_to_warn_about():
    assert "warning" not in pipeline.explain()


def _raw(row):
    return RawFlight(
        **{name: None if text == "NA" else text if name in TEXTS else int(text) for name, text in row.items()}
    )


@pytest.mark.spark
@pytest.mark.rotates("processes")
def test_the_readmes_command_runs_the_year(tmp_path):
    """As a user runs it: a process of its own, Spark's own settings, the command line, Dagster."""
    places = {"DAGSTER_UNIFIED_DATA": f"{tmp_path}/data", "DAGSTER_UNIFIED_OUTPUT": f"{tmp_path}/tables"}
    environment = {**os.environ, **places, "DAGSTER_HOME": str(tmp_path)}
    command = [str(Path(sys.executable).with_name("dagster-unified")), "run", "jobs.flight_delays"]
    for one in ([sys.executable, "-m", "jobs.data"], [*command, "-D", "execution.runtime-mode=BATCH"]):
        subprocess.run(one, cwd=ROOT, env=environment, check=True, timeout=300)
    totals = DeltaTable(f"{tmp_path}/tables/carrier_delays").to_pyarrow_table().to_pylist()
    assert sum(row["flights"] for row in totals) == 327_346  # those that have arrived
