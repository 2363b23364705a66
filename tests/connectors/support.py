"""What tests of several connectors do: read a source in BATCH and in a query, and write to a sink as the engine does.

The tasks of such a write run in this process instead of Spark's.
"""

from contextlib import ExitStack, closing

import msgspec
from upath import UPath

from dagster_unified.connectors.files import listing
from dagster_unified.connectors.protocol.commits import WriteIdentity, WriterTask
from dagster_unified.engine.commit import SinkCommits, WriteContext
from dagster_unified.records import record_type


class Query:
    """One streaming query over a source: the numbers that it read in a column, by epoch, and its position at one."""

    def __init__(self, spark, source, folder, column=0):
        self.spark, self.source, self.folder, self.column = spark, source, folder, column
        self.checkpoint = folder / "spark" / "main"
        self.read = []

    def start(self, frame, **trigger):
        writer = frame.writeStream.foreachBatch(lambda rows, _: self.keep(rows.collect()))
        writer = writer.option("checkpointLocation", f"file://{self.checkpoint}")
        return (writer.trigger(**trigger) if trigger else writer).start()

    def keep(self, rows):
        if rows:
            self.read.append(sorted(int(row[self.column]) for row in rows))

    def look(self, query):
        """Lists what is monitored, and reads it."""
        listing.look(UPath(self.folder), now=True)
        self.read_all(query)

    def read_all(self, query):
        """Reads what was listed, chunk by chunk as an epoch ends."""
        query.processAllAvailable()
        while not listing.all_taken(UPath(self.folder)):
            listing.look(UPath(self.folder), now=True)
            query.processAllAvailable()

    def run(self, while_it_runs=lambda query: None, **trigger):
        """What it has read so far, after it has read all that there is."""
        query = self.start(self.source.read_stream(self.spark, UPath(self.folder / "sources" / "sales")), **trigger)
        try:
            if trigger:
                assert query.awaitTermination(60)
            else:
                self.read_all(query)
                while_it_runs(query)
        finally:
            query.stop()
        return sorted(amount for epoch in self.read for amount in epoch)

    def position(self, epoch=None):
        offsets = self.checkpoint / "offsets"
        last = max((int(f.name) for f in offsets.glob("[0-9]*")), default=None)
        if last is None:
            return self.source.stream_position(None, None)
        offset = (offsets / str(last if epoch is None else epoch)).read_text().splitlines()[2]
        return self.source.stream_position(UPath(self.checkpoint / "sources" / "0"), offset)


def read_batch(spark, source):
    return sorted(r.amount for r in source.read_partition(spark).collect())


class LocalCommits(SinkCommits):
    """The engine's commits of a sink, given the records of each task instead of a DataFrame."""

    def __init__(self, sink, record):
        records = record_type(record)
        super().__init__(_staged_here(sink.bound_to(records)))

    def _open(self, frame):
        if self._committer is None:
            self._committer = self.sink.committer(self.sink.records.schema)
        return self._committer


def _staged_here(sink):
    sink.stage = lambda tasks, attempts, ship: [stage(sink, tasks, attempt) for attempt in attempts]
    return sink


def stage(sink, tasks, attempt, retry=0):
    """The committables of an attempt, whose tasks have these records."""
    found = []
    for number, records in enumerate(tasks):
        with ExitStack() as opened:
            writer = opened.enter_context(closing(sink.writer(WriterTask(attempt, number, retry))))
            for first in range(0, len(records), 10_000):
                writer.write(sink.records.to_batch(records[first : first + 10_000]))
            found += [msgspec.msgpack.encode(committable) for committable in writer.prepare_commit()]
    return [msgspec.msgpack.decode(encoded, type=sink.committable) for encoded in found]


def identity(execution="run", partition="all", uid="sink", **more):
    return WriteIdentity("p", uid, execution, partition, **more)


def write(sink, *tasks, record=None, before_commit=lambda: None, **who):
    """The result of one write by a job of its own."""
    first = next(task[0] for task in tasks if task) if record is None else None
    with closing(LocalCommits(sink, record or type(first))) as commits:
        (result,) = commits.write(tasks, [WriteContext(identity(**who), "stage", before_commit)])
    return result
