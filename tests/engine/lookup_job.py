"""A stream with lookups before a keyed operator, in a process of its own: `python -m tests.engine.lookup_job FOLDER`.

It runs through the Spark Connect server of SPARK_REMOTE until there is a file FOLDER/stop, and says what queries it
goes on with.
"""

import sys
from pathlib import Path
from typing import NamedTuple

from dagster_unified.api import Pipeline
from dagster_unified.connectors import CollectionSource, DeltaSink, ParquetSource
from dagster_unified.engine import session
from dagster_unified.engine.events import QueriesTakenOver
from dagster_unified.engine.streaming.job import Start, StreamingJob
from tests.engine.test_lookup_join import Airport, Flight, located


class State(NamedTuple):
    faa: str
    state: str


class FromState(NamedTuple):
    n: int
    origin: str | None
    state: str


STATES = [State("JFK", "New York"), State("LGA", "New York"), State("EWR", "New Jersey")]


def main(folder):
    pipeline = Pipeline("located")
    flights = pipeline.from_source(ParquetSource(f"{folder}/flights", Flight, monitor=True))
    states = CollectionSource(STATES, State, "states")
    known = flights.lookup_join(states, {"origin": "faa"}, {"state": "state"}, FromState, how="inner")
    found = located(known, ParquetSource(f"{folder}/airports", Airport)).key_by("n").reduce(lambda a, b: b)
    found.sink_to(DeltaSink(f"{folder}/out", mode="append", name="out"))
    options = {"execution.runtime-mode": "STREAMING", "execution.checkpointing.dir": f"{folder}/checkpoints"}

    def observe(event):
        if isinstance(event, QueriesTakenOver):
            print("goes on with", *event.queries, flush=True)

    job = StreamingJob(pipeline.plan(options), session.start(), Start("test", patience=1), observe)
    job.run(Path(folder, "stop").exists)
    print("views", [table.name for table in job.spark.catalog.listTables()], flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
