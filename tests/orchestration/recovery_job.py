"""A pipeline whose last stage fails as long as a file exists: for the recovery tests.

At module scope, since re-execution imports it.
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from dagster_unified.api import MapFunction, Pipeline, RuntimeContext, iterations
from dagster_unified.connectors import DatabaseSink, DeltaSink, FileSink, ForeachSink, ParquetSource
from dagster_unified.orchestration import BatchDeployment, unified_definitions
from tests.orchestration.support import resources

HOME = Path(os.environ.get("RECOVERY_HOME") or tempfile.mkdtemp(prefix="recovery"))
BROKEN = HOME / "broken"
FACTOR = HOME / "factor"
LATE = HOME / "late"


class Event(NamedTuple):
    key: str
    value: int


class Keyed(MapFunction):
    def open(self, context: RuntimeContext) -> None:
        group = context.get_metrics_group().add_group("events")
        self.even, self.seen, self.values = group.counter("even"), group.meter("seen"), group.distribution("values")
        group.gauge("attempt", context.get_attempt_number)

    def map(self, event: Event) -> Event:
        self.even.inc(event.value % 2 == 0)
        self.seen.mark_event()
        self.values.update(event.value)
        return Event(event.key.upper(), event.value)


def parity(event: Event) -> str:
    return "even" if event.value % 2 == 0 else "odd"


def combine(a: Event, b: Event) -> Event:
    return Event(a.key, a.value + b.value)


def last(event: Event) -> Event:
    if BROKEN.exists():
        raise OSError("the service is away")
    return event


def build() -> Pipeline:
    pipeline = Pipeline("recovery")
    events = (
        pipeline.from_collection([Event(k, v) for v, k in enumerate("abcabcabz")], name="events")
        .map(Keyed())
        .name("keyed")
    )
    sums = events.key_by("key").reduce(combine).name("sums")
    by_parity = sums.key_by(parity).reduce(combine).name("by_parity")
    by_parity.map(last).sink_to(DeltaSink(str(HOME / "table"), name="table", mode="append"))
    return pipeline


class Halving(iterations.IterationBody):
    """Halves values until nothing is left of them, and gives each that it comes by."""

    def process(self, variables, data):
        halved = variables[0].map(lambda e: Event(e.key, e.value // 2), output_type=Event)
        return iterations.IterationBodyResult([halved.filter(lambda e: e.value > 0)], [halved])


def looping() -> Pipeline:
    """A stage with an iteration, behind a shuffle and before the one that fails."""
    pipeline = Pipeline("looping")
    events = pipeline.from_collection([Event(k, v) for v, k in enumerate("abcabcabz")], name="events")
    sums = events.key_by("key").reduce(combine).name("sums")
    (halved,) = iterations.iterate_bounded_streams_until_termination([sums], [], Halving())
    found = halved.key_by("key").reduce(combine).name("found")
    found.map(last).name("last").sink_to(DeltaSink(str(HOME / "halves"), name="halves", mode="append"))
    return pipeline


def scaled(event: Event) -> Event:
    return Event(event.key, event.value * int(FACTOR.read_text()))


def refuse(events: list[Event]) -> None:
    if BROKEN.exists():
        raise ValueError("the service takes no such event")


def several_sinks() -> Pipeline:
    """A stage with sinks of every kind, of which the last one fails as long as a file exists."""
    pipeline = Pipeline("several")
    events = pipeline.from_collection([Event("a", 1), Event("b", 2)], name="events").map(scaled).name("scaled")
    for mode, key in (("overwrite", ()), ("upsert", "key"), ("append", ())):
        events.sink_to(DeltaSink(str(HOME / f"several_{mode}"), name=mode, mode=mode, key=key))
        events.sink_to(DatabaseSink(mode, f"sqlite:///{HOME}/several.db", name=f"sqlite_{mode}", mode=mode, key=key))
    events.sink_to(FileSink(str(HOME / "several_files"), name="files"))
    events.sink_to(ForeachSink(refuse, name="service"))
    return pipeline


def arriving(event: Event) -> Event:
    """While a file exists, another one comes to those that are being read."""
    if LATE.exists():
        shutil.copy(HOME / "in/one.parquet", HOME / "in/two.parquet")
    return event


def arrived() -> Pipeline:
    """Two stages over a folder of files, the last of which fails as long as a file exists."""
    pipeline = Pipeline("arrived")
    events = pipeline.from_source(ParquetSource(str(HOME / "in"), Event, name="incoming"))
    events = events.map(arriving).map(Keyed()).name("keyed")
    sums = events.key_by("key").reduce(combine).name("sums")
    sums.map(last).sink_to(FileSink(str(HOME / "arrived"), name="arrived"))
    return pipeline


pipeline = build()
defs = unified_definitions(
    BatchDeployment(pipeline, retry_policy=None),
    BatchDeployment(looping(), retry_policy=None),
    BatchDeployment(several_sinks(), retry_policy=None),
    BatchDeployment(arrived(), retry_policy=None),
    resources=resources(HOME),
)


def job():
    return defs.resolve_job_def("recovery_batch")


def several_sinks_job():
    return defs.resolve_job_def("several_batch")


def arrived_job():
    return defs.resolve_job_def("arrived_batch")


def looping_job():
    return defs.resolve_job_def("looping_batch")
