"""The other example pipelines on a slice of the real data: the same tables in both modes, held against plain Python."""

from __future__ import annotations

import csv
import math
from collections import Counter, defaultdict
from datetime import datetime, timezone
from functools import partial
from random import Random
from zlib import crc32

import networkx
import numpy as np
import pytest
from deltalake import DeltaTable
from pyarrow.csv import ConvertOptions, read_csv

from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.engine.events import EpochCommitted
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.records import record_type
from dagster_unified.testing import run_pipeline
from jobs import (
    aircraft_profiles,
    aircraft_sessions,
    airport_communities,
    airport_ranks,
    delay_rules,
    delay_totals,
    destinations,
    graph_components,
    late_flights,
    weather_delays,
)
from jobs.data import airports_csv, flights_csv, planes_csv, rules_json, weather_csv
from jobs.flights import RawFlight
from tests.jobs.flown import flown
from tests.support import MODES, streaming

DAYS = {("1", str(day)) for day in range(1, 6)}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    found = {
        "flights_csv": flights_csv(folder),
        "weather_csv": weather_csv(folder),
        "planes_csv": planes_csv(folder),
        "airports_csv": airports_csv(folder),
    }
    for name in ("flights_csv", "weather_csv"):
        path = found[name]
        rows = [r for r in read(path) if (r["month"], r["day"]) in DAYS]
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return {**found, "rules_json": rules_json(folder)}


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def tables(data, spark, tmp_path_factory):
    """Builds the tables of one example in both modes, which have to be the same; gives them by name."""

    def run(module, *inputs):
        folder = tmp_path_factory.mktemp(module.__name__.rpartition(".")[2])
        build = partial(module.build, **{name: str(data[name]) for name in inputs})
        plan = build(output=str(folder / "batch")).plan()
        run_all(Run(plan, spark, IntermediateStore(str(folder / "store")), "run1", "run1"))
        options = streaming(folder, 2)
        assert (
            StreamingJob(build(output=str(folder / "streaming")).plan(options), spark, Start("one")).run() == "finished"
        )
        found = {
            mode: {t.name: DeltaTable(str(t)).to_pyarrow_table().to_pylist() for t in (folder / mode).iterdir()}
            for mode in ("batch", "streaming")
        }
        in_order = {
            mode: {name: sorted(map(repr, rows)) for name, rows in by_name.items()} for mode, by_name in found.items()
        }
        assert in_order["batch"] == in_order["streaming"]
        return found["batch"]

    return run


def test_weather_delays(tables, data):
    found = tables(weather_delays, "flights_csv", "weather_csv")
    measured = {(r["origin"], datetime.fromisoformat(r["time_hour"])): r for r in read(data["weather_csv"])}
    hours = defaultdict(lambda: [0, 0])
    for row, departed, _ in flown(read(data["flights_csv"])):
        hour = row["origin"], departed.replace(minute=0)
        if hour in measured:
            hours[hour][0] += 1
            hours[hour][1] += int(row["dep_delay"])
    assert {(r["origin"], r["hour"]): [r["flights"], r["minutes"]] for r in found["weather_delays"]} == hours
    assert all(r["precip"] == float(measured[r["origin"], r["hour"]]["precip"]) for r in found["weather_delays"])
    dry = [v for h, v in hours.items() if float(measured[h]["precip"]) == 0 and float(measured[h]["visib"]) >= 5]
    (row,) = (r for r in found["delay_by_conditions"] if r["conditions"] == "dry, can see")
    assert (row["hours"], row["flights"], row["minutes"]) == (len(dry), sum(v[0] for v in dry), sum(v[1] for v in dry))


def test_aircraft_sessions(tables, data):
    found = tables(aircraft_sessions, "flights_csv", "planes_csv")
    by_tail = defaultdict(list)
    for row, departed, _ in flown(read(data["flights_csv"])):
        by_tail[row["tailnum"]].append(departed)
    sessions = defaultdict(int)
    for tail, departures in by_tail.items():
        first = last = None
        for departed in sorted(departures):
            if last is None or departed - last > aircraft_sessions.ABSENCE:
                first = departed
            sessions[tail, first] += 1
            last = departed
    assert {(r["tail"], r["first"]): r["flights"] for r in found["aircraft_sessions"]} == sessions
    models = {r["tailnum"]: r["model"] for r in read(data["planes_csv"])}
    assert {r["tail"]: r["model"] for r in found["aircraft_sessions"]} == {tail: models.get(tail) for tail in by_tail}


def test_delay_rules(tables, data):
    found = tables(delay_rules, "flights_csv", "rules_json")["flagged_flights"]
    expected = set()
    in_a_row = defaultdict(int)
    for row, departed, _ in sorted(flown(read(data["flights_csv"])), key=lambda f: f[1]):
        late = int(row["dep_delay"])
        in_a_row[row["tailnum"]] = in_a_row[row["tailnum"]] + 1 if late >= 60 else 0
        if in_a_row[row["tailnum"]] >= 3:
            expected.add(("late again", row["tailnum"], departed))
        if row["origin"] == "EWR" and late >= 240:
            expected.add(("very late out of Newark", row["tailnum"], departed))
    assert expected
    assert {(r["rule"], r["tail"], r["departed"]) for r in found} == expected


def test_destinations(tables, data):
    found = tables(destinations, "flights_csv", "airports_csv")["destinations"]
    names = {r["faa"]: r["name"] for r in read(data["airports_csv"])}
    expected = defaultdict(lambda: [0, 0])
    for row in read(data["flights_csv"]):
        if row["arr_delay"] != "NA":
            total = expected[row["dest"], names.get(row["dest"], "not in the list")]
            total[0] += 1
            total[1] += int(row["arr_delay"])
    assert {(r["dest"], r["airport"]): [r["flights"], int(r["minutes"])] for r in found} == expected
    assert ("SJU", "not in the list") in expected


def test_delay_totals(tables, data):
    found = tables(delay_totals, "flights_csv")
    totals, weeks = defaultdict(lambda: [0, 0]), defaultdict(lambda: [0, 0])
    for row, departed, _ in flown(read(data["flights_csv"])):
        week = departed - (departed - datetime(2013, 1, 3, tzinfo=timezone.utc)) % delay_totals.WEEK
        for total in (totals[row["carrier"]], weeks[row["origin"], week]):
            total[0] += 1
            total[1] += int(row["dep_delay"])
    assert {r["carrier"]: [r["flights"], r["minutes"]] for r in found["delay_totals"]} == totals
    assert {(r["origin"], r["begins"]): [r["flights"], r["minutes"]] for r in found["delay_weeks"]} == weeks
    assert len(weeks) == 6


def test_the_airports_have_the_ranks_of_a_power_iteration(data, run_on_spark, tmp_path):
    pipeline = airport_ranks.build(str(data["flights_csv"]), str(tmp_path / "out"))
    *_, stage = run_on_spark(pipeline, {"parallelism.default": 2})
    weights = defaultdict(float)
    for row in read(data["flights_csv"]):
        if row["arr_delay"] not in ("", "NA"):
            weights[row["origin"], row["dest"]] += 1
            weights[row["dest"], row["origin"]] += 1
    totals = defaultdict(float)
    for (airport, _), weight in weights.items():
        totals[airport] += weight
    ranks = dict.fromkeys(totals, 1.0)
    for _ in range(stage.iterations["pagerank"].rounds - 1):
        shares = defaultdict(float)
        for (airport, neighbour), weight in weights.items():
            shares[neighbour] += ranks[airport] * weight / totals[airport]
        ranks = {airport: 0.15 + 0.85 * shares[airport] for airport in ranks}
    found = {
        r["airport"]: r["rank"] for r in DeltaTable(str(tmp_path / "out/airport_ranks")).to_pyarrow_table().to_pylist()
    }
    assert found == pytest.approx(ranks)
    assert stage.iterations["pagerank"].rounds < airport_ranks.ROUNDS  # it ends by itself


class InOrder(Random):
    """What networkx asks of chance, without it: first airports elsewhere, and of several labels the last."""

    def shuffle(self, nodes):
        nodes.sort(key=lambda airport: (airport in {"EWR", "JFK", "LGA"}, airport))

    def choice(self, labels):
        return max(labels)


def test_the_communities_of_airports_are_those_that_networkx_finds(data, tmp_path):
    pipeline = airport_communities.build(str(data["flights_csv"]), str(tmp_path / "out"))
    types = ConvertOptions(column_types=record_type(RawFlight).schema, null_values=["NA"], strings_can_be_null=True)
    raw = [RawFlight(**row) for row in read_csv(data["flights_csv"], convert_options=types).to_pylist()]
    members = run_pipeline(pipeline, "BATCH", inputs={"flights": raw}, seed=3).only()
    flights = [row for row in read(data["flights_csv"]) if row["arr_delay"] not in ("", "NA")]
    network = networkx.Graph()
    network.add_nodes_from(sorted({row[end] for row in flights for end in ("origin", "dest")}))
    arrived = Counter(row["dest"] for row in flights)
    for (origin, dest), count in Counter((row["origin"], row["dest"]) for row in flights).items():
        if 3 * count > arrived[dest]:
            network.add_edge(origin, dest, weight=3 * count - arrived[dest])
    found = defaultdict(set)
    for member in members:
        found[member.community].add(member.airport)
    expected = networkx.community.asyn_lpa_communities(network, "weight", InOrder())
    assert sorted(map(sorted, found.values())) == sorted(map(sorted, expected))
    assert set(found) == {"EWR", "JFK", "LGA"}


def test_the_profiles_of_aircraft_are_those_of_plain_k_means(data, run_on_spark, tmp_path):
    pipeline = aircraft_profiles.build(str(data["flights_csv"]), str(tmp_path / "out"))
    *_, stage = run_on_spark(pipeline, {"parallelism.default": 2})
    delays = defaultdict(list)
    for row in read(data["flights_csv"]):
        if row["arr_delay"] not in ("", "NA"):
            delays[row["tailnum"]].append((float(row["dep_delay"]), float(row["arr_delay"])))
    points = np.array([(d.mean(), (d - a).mean(), d.std()) for d, a in (np.array(of).T for of in delays.values())])
    centers, moved = np.array(aircraft_profiles.START), True
    while moved:
        near = np.array([np.linalg.norm(point - centers, axis=1).argmin() for point in points])
        means = np.array([points[near == kind].mean(0) for kind in range(len(centers))])
        moved, centers = not np.allclose(means, centers), means
    rows = DeltaTable(str(tmp_path / "out/aircraft_profiles")).to_pyarrow_table().sort_by("kind").to_pylist()
    assert [row["aircraft"] for row in rows] == np.bincount(near).tolist()
    assert [[row[name] for name in aircraft_profiles.MEASURES] for row in rows] == [
        pytest.approx(center) for center in centers.tolist()
    ]
    assert stage.iterations["kmeans"].rounds < aircraft_profiles.ROUNDS  # it ends by itself


def descended(rows, weights):
    """Plain descent, which changes the weights: how many flights there were, the mean loss, the rate of late ones."""
    loss, flights, late = 0.0, 0, 0
    for row in rows:
        if row["arr_delay"] in ("", "NA"):
            continue
        known = ("", row["carrier"], row["origin"], row["dest"], f"{row['hour']} o'clock", f"month {row['month']}")
        features = [crc32(one.encode()) % late_flights.WEIGHTS for one in known]
        expected = 1 / (1 + math.exp(-sum(weights[feature] for feature in features)))
        was_late = float(row["arr_delay"]) >= late_flights.LATE
        for feature in features:
            weights[feature] += late_flights.RATE * (was_late - expected)
        loss -= math.log(expected if was_late else 1 - expected)
        flights, late = flights + 1, late + was_late
    return flights, loss / flights, late / flights


@pytest.mark.a_day(1)
@MODES
def test_late_flights_are_learned_as_by_plain_descent(data, run_in, tmp_path, mode):
    pipeline = late_flights.build(str(data["flights_csv"]), str(tmp_path / "out"))
    run_in[mode](pipeline, {"parallelism.default": 1})
    weights = [0.0] * late_flights.WEIGHTS
    flights, loss, rate = descended(read(data["flights_csv"]), weights)
    (found,) = DeltaTable(str(tmp_path / "out/late_flights")).to_pyarrow_table().to_pylist()
    assert found["flights"] == flights
    assert found["loss"] == pytest.approx(loss)
    assert found["weights"] == pytest.approx(weights)
    assert found["loss"] < -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)  # better than always the mean


def test_a_day_of_late_flights_goes_on_from_the_model_of_the_day_before(data, spark, tmp_path):
    (tmp_path / "in").mkdir()
    rows = read(data["flights_csv"])
    days = [[row for row in rows if row["day"] == str(day)] for day in range(1, 6)]
    written = seen = 0

    def observe(event):
        nonlocal seen
        seen += event.rows_in if isinstance(event, EpochCommitted) else 0

    def ended():
        nonlocal written
        if job.activity()[1] or seen < sum(map(len, days[:written])):
            return False
        if written == len(days):
            return True
        with (tmp_path / "day").open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(days[written])
        (tmp_path / "day").rename(tmp_path / f"in/{written}.csv")
        written += 1
        return False

    pipeline = late_flights.build(str(tmp_path / "in"), str(tmp_path / "out"), live=True)
    plan = pipeline.plan({"execution.checkpointing.dir": str(tmp_path / "checkpoints"), "parallelism.default": 1})
    job = StreamingJob(plan, spark, Start("test"), observe)
    assert job.run(ended) == "stopped"
    weights = [0.0] * late_flights.WEIGHTS
    expected = [descended(day, weights)[:2] for day in days]
    found = DeltaTable(str(tmp_path / "out/late_flights")).to_pyarrow_table().to_pylist()
    assert sorted((row["flights"], round(row["loss"], 9)) for row in found) == sorted(
        (flights, round(loss, 9)) for flights, loss in expected
    )
    (last,) = [row for row in found if row["loss"] == pytest.approx(expected[-1][1])]
    assert last["weights"] == pytest.approx(weights)


def test_the_components_of_a_graph_are_those_of_a_union_find(run_on_spark, tmp_path):
    vertices = 400
    run_on_spark(graph_components.build(vertices, str(tmp_path / "out")), {"parallelism.default": 2})
    above = list(range(vertices))

    def least(vertex):
        while above[vertex] != vertex:
            vertex = above[vertex]
        return vertex

    for vertex, near in graph_components.Edges(vertices).flat_map(0):
        low, high = sorted((least(vertex), least(near)))
        above[high] = low
    rows = DeltaTable(str(tmp_path / "out/graph_components")).to_pyarrow_table().to_pylist()
    assert {row["vertex"]: row["label"] for row in rows} == {vertex: least(vertex) for vertex in range(vertices)}
    assert len({row["label"] for row in rows}) < vertices / 2
