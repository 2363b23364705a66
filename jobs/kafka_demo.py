"""Replays the flights of 2013 into Kafka, kills the stream that reads them, and compares with BATCH over the topic.

It starts a Kafka broker and a PostgreSQL server, and stops them at its end. Everything is real: Dagster's daemon runs
the sensor, the sensor starts the job, `kill -9` ends it in the middle of the year, the sensor starts it again. The
stream upserts tables of PostgreSQL and reports idle aircraft to a topic; BATCH writes the same from the topic's past.
"""

from __future__ import annotations

import csv
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psycopg
from dagster import DagsterInstance, RunsFilter
from rich.console import Console

from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.desired import read_status
from dagster_unified.settings import configuration
from dagster_unified.storage.paths import remove_tree
from jobs.data import daily
from jobs.flights import RawFlight
from jobs.kafka_flights import FLIGHTS, stream
from jobs.streaming_demo import BIN, daemon, process_of, running, until
from tests.servers.kafka import Broker
from tests.servers.postgres import PostgresServer, folder_of_programs

JOB = f"{stream.name}_streaming"
SENSOR = f"{JOB}_sensor"
LOCATION = ("-m", "definitions.kafka")
PARTITIONS = 4
console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    """The demonstration; 0 where tables and topics are equal."""
    directory = CheckpointDirectory(configuration()["execution.checkpointing.dir"], stream.name)
    remove_tree(directory.path)
    with servers() as (broker, database):
        for topic in (FLIGHTS, "idle_aircraft", "idle_aircraft_past"):
            broker.create_topic(topic, PARTITIONS)
        with DagsterInstance.get() as instance, daemon(*LOCATION):
            run("dagster", "sensor", "start", SENSOR, *LOCATION)
            console.print("the sensor is on")
            killed = replay(broker, instance, directory)
            run("dagster-unified", "drain", "jobs.kafka_flights:stream")
            console.print("the year is over: draining")
            until(lambda: (held := directory.deployed()) is not None and held.finished, "the job has finished")
            runs = instance.get_runs(RunsFilter(job_name=JOB))
            run("dagster", "sensor", "stop", SENSOR, *LOCATION)
        console.print(f"{len(runs)} runs, one of them ({killed[:8]}) ended by kill -9")
        console.print("BATCH over the topic's past")
        past = ("jobs.kafka_flights:past", "-D", "execution.runtime-mode=BATCH", "--rows", "0")
        run("dagster-unified", "run", *past)
        return compare(broker, database)


@contextmanager
def servers() -> Iterator[tuple[Broker, str]]:
    """A broker and a database of this demonstration's own; gives the broker, and the database's URL."""
    programs = folder_of_programs()
    if programs is None:
        sys.exit("no PostgreSQL server (Debian: apt-get install postgresql)")
    with tempfile.TemporaryDirectory(prefix="kafka-") as folder:
        broker = Broker(Path(folder), port_of("FLIGHTS_KAFKA"))
        server = PostgresServer(programs, port_of("FLIGHTS_POSTGRES"))
        try:
            broker.start()
            server.start()
            os.environ |= {"FLIGHTS_KAFKA": broker.address, "FLIGHTS_POSTGRES": server.url()}
            console.print(f"Kafka listens on {broker.address}, PostgreSQL at {server.url()}")
            yield broker, server.url()
        finally:
            broker.stop()
            server.remove()


def port_of(variable: str) -> int | None:
    """The port in an address that the workers of a cluster have been told; None where there is none."""
    found = re.search(r":(\d+)(/|$)", os.environ.get(variable, ""))
    return int(found[1]) if found else None


def replay(broker: Broker, instance: DagsterInstance, directory: CheckpointDirectory) -> str:
    """Produces the flights day by day; kills the job once half of them are there. Gives the killed run."""
    days, killed = list(daily()), ""
    for number, (day, lines) in enumerate(days):
        broker.write(FLIGHTS, messages(lines))
        if number == len(days) // 2:
            until(lambda: (s := read_status(directory)) is not None and s.epochs > 0, "the job has committed an epoch")
            started = until(lambda: running(instance, JOB), "a run is started")
            os.kill(process_of(instance, started), signal.SIGKILL)
            killed = started
            console.print(f"{day}: killed the worker of run {started[:8]} with kill -9")
        if number % 60 == 0:
            status = read_status(directory)
            console.print(f"{day}: {number + 1} of {len(days)} days, {status.epochs if status else 0} epochs")
        time.sleep(0.15)
    return killed


def messages(lines: list[str]) -> Iterator[Mapping[str, object]]:
    """The lines of a CSV file as messages: a JSON object each, by aircraft."""
    for row in csv.DictReader(lines):
        values = [None if row[name] == "NA" else row[name] for name in RawFlight._fields]
        flight = msgspec.convert(values, RawFlight, strict=False)
        yield {"key": (flight.tailnum or "").encode(), "value": msgspec.json.encode(flight._asdict())}


def compare(broker: Broker, database: str) -> int:
    """What the stream has left and what BATCH has; 0 where all are equal."""
    same = True
    with psycopg.connect(database) as connection:
        for table in ("carrier_delays", "delay_propagation"):
            live, past = (sorted(connection.execute(f"SELECT * FROM {name}")) for name in (table, f"{table}_past"))
            same &= told(table, len(live), len(past), live == past)
    live, past = (sorted(broker.values(topic)) for topic in ("idle_aircraft", "idle_aircraft_past"))
    return 0 if told("topic idle_aircraft", len(live), len(past), live == past) and same else 1


def told(name: str, live: int, past: int, same: bool) -> bool:
    """Says how a table or a topic compares; gives `same`."""
    found = "equal" if same and live else "DIFFERENT"
    console.print(f"{name}: {live:,} in STREAMING, {past:,} in BATCH: {found}")
    return same and live > 0


def run(program: str, *arguments: str) -> None:
    """Runs a program of this environment."""
    subprocess.run([BIN / program, *arguments], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
