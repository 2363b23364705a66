"""How a sink commits: writers prepare committables, one committer makes them visible (FLIP-143).

Workers load this file, so it imports little.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, closing
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar
from urllib.parse import unquote
from uuid import uuid4

import msgspec
import pyarrow as pa

from dagster_unified.errors import SinkError, UnavailableError, UnifiedError, UnsupportedError
from dagster_unified.graph.connectors import WHOLE, Sink
from dagster_unified.operators.functions.type_variables import In
from dagster_unified.operators.layout import EMITTED, PARTITION_INDEX
from dagster_unified.storage.paths import put, remove_tree, storage_path

if TYPE_CHECKING:
    import pyarrow.dataset as ds
    from pyspark.sql import DataFrame, SparkSession

    from dagster_unified.records import RecordType


class DeliveryGuarantee(Enum):
    """A sink's promise, named as in Flink. There is an example at `KafkaSink`."""

    EXACTLY_ONCE = "exactly-once"
    AT_LEAST_ONCE = "at-least-once"


STREAMED = "streaming"
"""The partition of what a stream writes."""


@dataclass(frozen=True)
class WriteIdentity:
    """Who writes to a sink, and what.

    In BATCH `execution` is the run, its retries and its re-executions, which write one `partition`. In STREAMING it is
    the deployment, which writes an `epoch`; where the deployment went back to a savepoint, it begins a new `timeline`,
    on which epochs come again.
    """

    pipeline: str
    sink: str
    """The uid of the sink: two sinks may write to one place, each under an identity of its own."""

    execution: str
    partition: str = WHOLE
    """The partition's name, as paths have it."""

    epoch: int | None = None
    timeline: int = 0

    run: int = 0
    """In BATCH the number of the run, which grows within an execution, where the target can replace what it has.

    So a later run, whose code or input may be another, replaces what an earlier one wrote before it failed. It is 0 for
    a target that cannot do so, and takes one write of all these runs.
    """

    @property
    def partition_key(self) -> str:
        """The partition's key, as its author and Dagster write it."""
        return unquote(self.partition)

    @property
    def writer(self) -> str:
        """A name for the writer, the same for all epochs of a timeline. A target remembers its highest version."""
        return f"{self.origin}/timeline {self.timeline}" if self.timeline else self.origin

    @property
    def version(self) -> int:
        """The number of this write among those of its writer."""
        return self.run if self.epoch is None else self.epoch

    @property
    def deployment(self) -> str | None:
        """In STREAMING a name whose version is the timeline: a target with a later timeline refuses this write."""
        return None if self.epoch is None else f"{self.origin}/timelines"

    @property
    def replaces(self) -> str | None:
        """A name for the pipeline's partition that is replaced, the same for all runs of it; None for no partition."""
        if self.epoch is not None or self.partition == WHOLE:
            return None
        return f"dagster-unified/{self.pipeline}/{self.sink}/partition/{self.partition}"

    @property
    def origin(self) -> str:
        """A name for the writer, the same on all timelines."""
        return f"dagster-unified/{self.pipeline}/{self.sink}/{self.execution}/{self.partition}"


@dataclass(frozen=True)
class Epochs:
    """What some epochs of a stream wrote to a sink: of each query those after one epoch, up to another."""

    pipeline: str
    sink: str
    """The uid of the sink."""

    deployment: str
    timeline: int
    after: Mapping[str, int]
    """By query; a query that is not here has written none before."""

    until: Mapping[str, int]

    def of_writers(self) -> dict[str, tuple[int, int]]:
        """The epoch after which they come and the last one, by the name of the writer."""
        return {
            WriteIdentity(
                self.pipeline, self.sink, f"{self.deployment}/{query}", STREAMED, last, self.timeline
            ).writer: (self.after.get(query, -1), last)
            for query, last in self.until.items()
        }


class Rewritten(NamedTuple):
    """What some writes did to a table: the rows of the files that they added, and of those that they removed.

    A row that a merge or a compaction has moved to another file is among both.
    """

    added: pa.Table
    removed: pa.Table


@dataclass(frozen=True)
class WriteAttempt:
    """One attempt at a write. Its `id` marks what it stages, so that attempts do not collide."""

    identity: WriteIdentity
    id: str
    stage: str
    """The stage that writes, for messages."""

    staging: str | None = None
    """A folder of its own, which the driver and all workers reach, for a target without one. It may not exist yet.

    The folders of all attempts of its writer are next to it, and nothing else is.
    """


class Committable(msgspec.Struct, frozen=True, kw_only=True):
    """What a writer has prepared for the committer: a file, a staging table, a receipt.

    A sink subclasses it with its own fields. It travels from a task to the driver as msgpack.
    """

    rows: int = 0
    bytes: int = 0


C = TypeVar("C", bound=Committable)


class Writer(ABC, Generic[C]):
    """Takes the rows of one Spark task, or of one partition in it."""

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None:
        """Take rows; they must not be visible to readers yet."""

    @abstractmethod
    def prepare_commit(self) -> Iterable[C]:
        """Called once, after the last row: all that was written is durable when it returns."""

    def close(self) -> None:
        """Called last, also after an error, which may have come before `prepare_commit`."""


@dataclass(frozen=True)
class WriterTask:
    """The attempt that a writer writes for, and its Spark task."""

    attempt: WriteAttempt
    number: int
    """The number of the task within the write, from 0; a retried task has the same."""

    retry: int
    """How many attempts at this task Spark has made before."""


@dataclass(frozen=True)
class Commit(Generic[C]):
    """The committables of all tasks, and who wrote them."""

    attempt: WriteAttempt
    committables: Sequence[C]
    goes_back: bool = False
    """Whether this is the first commit after going back to a savepoint.

    What the deployment had written from this version on, on earlier timelines, is to be undone where that is possible.
    """

    @property
    def identity(self) -> WriteIdentity:
        """The writer."""
        return self.attempt.identity

    @property
    def marks(self) -> dict[str, int]:
        """The marks that the target has to remember in the same transaction: a version for each name."""
        identity = self.identity
        versions = {identity.writer: identity.version}
        return versions if identity.deployment is None else {**versions, identity.deployment: identity.timeline}


class CommitConflictError(UnifiedError):
    """Another write committed meanwhile: nothing of this one is visible, and it can be tried again on top."""

    retryable = True


class CommitUncertainError(UnifiedError):
    """The target's answer to a commit was lost: the target has to be asked whether it was committed."""

    retryable = True


class PartitionsUnknownError(SinkError):
    """A target does not say which of its rows the runs of a partition wrote."""


class Committer(ABC, Generic[C]):
    """Makes prepared writes visible. Lives on the driver; in STREAMING for all epochs of a job.

    One thread at a time calls it, not always the same.
    """

    @abstractmethod
    def last_version(self, name: str) -> int | None:
        """The highest version that the target remembers for a name in `Commit.marks`, or None."""

    def begin(self, attempts: Sequence[WriteAttempt]) -> None:
        """Prepare a place for what these attempts will stage, where writers need one.

        It may remove what killed attempts of the same writers have left.
        """

    @abstractmethod
    def commit(self, commits: Sequence[Commit[C]]) -> None:
        """Make these commits visible at once, or none of them, and remember all their marks with them.

        The target must hold no version of `identity.writer` as high as this one, and none of `identity.deployment` that
        is higher; the engine has asked, but another process may have committed since. Raises `CommitConflictError`
        then, and where the commit has to be made again on top of another; `CommitUncertainError` where nobody can tell
        whether it was made. The engine asks again and repeats.

        Replaces what earlier executions have written of `identity.replaces`.
        """

    def version(self) -> int | None:
        """The version of the target that the last commit made; after none, the one that is known. None without any."""
        return None

    def clean_up(self, attempts: Sequence[WriteAttempt], committed: bool) -> None:
        """Remove what these attempts have staged and is not part of the target. Called after every write."""

    def close(self) -> None:
        """Called at the end of a job."""


class NoCommitter(Committer[C]):
    """For a sink that remembers nothing: each attempt writes again."""

    def last_version(self, name: str) -> int | None:
        return None

    def commit(self, commits: Sequence[Commit[C]]) -> None:
        """Do nothing: the written rows are visible already."""


def remove_staging(attempts: Sequence[WriteAttempt], committed: bool) -> None:
    """Remove what these attempts have staged in their folders, and after a commit what killed attempts have staged."""
    for attempt in attempts:
        if attempt.staging is not None:
            folder = storage_path(attempt.staging, "staging folder")
            # who has committed is the only one: what killed attempts have left goes as well
            remove_tree(folder.parent if committed else folder)


Batches = Iterable[pa.RecordBatch]
Ship = Callable[[Callable[..., Iterator[pa.RecordBatch]]], Callable[..., Iterator[pa.RecordBatch]]]
"""Wraps a function so that it reaches Spark's workers with its author's code."""


class MakesWriters(Protocol[C]):
    """A sink, as its tasks see it."""

    def writer(self, task: WriterTask) -> Writer[C]:
        """A writer for the rows of one task."""


def stage_by_writers(
    sink: MakesWriters[C], committable: type[C], frame: DataFrame, attempts: Sequence[WriteAttempt], ship: Ship
) -> list[list[C]]:
    """Write all rows with the sink's writers, in one job; returns the committables of each attempt.

    With several attempts the column `PARTITION_INDEX` has the index of a row's attempt.
    """
    # what is shipped is the same for every epoch; the attempts are not
    run = functools.partial(_run, ship(_Task(sink)), tuple(attempts))
    rows = frame.mapInArrow(run, "attempt int, committable binary").collect()
    committables: list[list[C]] = [[] for _ in attempts]
    decoder = msgspec.msgpack.Decoder(committable)
    for row in rows:
        committables[row.attempt].append(decoder.decode(row.committable))
    return committables


def _run(
    task: Callable[..., Iterator[pa.RecordBatch]], attempts: tuple[WriteAttempt, ...], batches: Batches
) -> Iterator[pa.RecordBatch]:
    return task(attempts, batches)


class _Task(Generic[C]):
    """The writers of one task, one for each attempt that it has rows of; at least one, also without rows."""

    def __init__(self, sink: MakesWriters[C]) -> None:
        self._sink = sink

    def __call__(self, attempts: Sequence[WriteAttempt], batches: Batches) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        number, retry = context.partitionId(), context.attemptNumber()
        writers: dict[int, Writer[C]] = {}
        with ExitStack() as opened:

            def writer(index: int) -> Writer[C]:
                if index not in writers:
                    new_writer = self._sink.writer(WriterTask(attempts[index], number, retry))
                    writers[index] = opened.enter_context(closing(new_writer))
                return writers[index]

            if len(attempts) == 1:
                writer(0)
            for batch in batches:
                for index, rows in _by_attempt(batch, len(attempts)):
                    writer(index).write(rows)
            prepared = [
                (index, committable) for index, writer in writers.items() for committable in writer.prepare_commit()
            ]
        encoded = [msgspec.msgpack.encode(committable) for _, committable in prepared]
        indices = pa.array([index for index, _ in prepared], pa.int32())
        yield pa.RecordBatch.from_arrays([indices, pa.array(encoded, pa.binary())], ["attempt", "committable"])


def _by_attempt(batch: pa.RecordBatch, attempts: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of a batch, by attempt, in order."""
    import pyarrow.compute as pc

    names = [name for name in batch.schema.names if name not in (PARTITION_INDEX, EMITTED)]
    if attempts == 1:
        yield 0, batch.select(names)
        return
    of_row = batch.column(PARTITION_INDEX)
    for index in pc.unique(of_row).to_pylist():
        yield index, batch.filter(pc.equal(of_row, index)).select(names)


def arrow_stream(batches: Sequence[pa.RecordBatch]) -> bytes:
    """Batches as an Arrow stream, compressed."""
    buffer = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(buffer, batches[0].schema, options=options) as stream:
        for batch in batches:
            stream.write_batch(batch)
    return bytes(buffer.getvalue())


INLINE_BYTES = 256 << 10
"""Bytes of a task that travel within their committable."""


class StagedContent(Committable, frozen=True, kw_only=True):
    """Content of one task on its way to the driver: in here, or in a file, of which the driver reads one at a time."""

    content: bytes = b""
    file: str = ""

    def read(self, what: str) -> bytes:
        """The content, which `what` describes. Raises `UnavailableError` where another job has removed its file."""
        if not self.file:
            return self.content
        try:
            content: bytes = storage_path(self.file, what).read_bytes()
        except FileNotFoundError:
            raise UnavailableError(
                f"the {what} {self.file} are gone: another job has taken over and removed them; nothing was committed,"
                " and another attempt stages them again"
            ) from None
        return content


S = TypeVar("S", bound=StagedContent)
P = TypeVar("P", bound=Sized)


class StagingWriter(Writer[S], Generic[P, S]):
    """Stages what one task writes; the length of a part is the number of its rows."""

    committable: type[S]
    suffix: ClassVar[str]
    """The end of the names of the files."""

    chunk_bytes: ClassVar[int]
    """Bytes that a worker holds before it writes them to a file."""

    def __init__(self, attempt: WriteAttempt) -> None:
        self._folder = attempt.staging
        self._parts: list[P] = []
        self._bytes = 0
        self._staged: list[S] = []

    @abstractmethod
    def part(self, batch: pa.RecordBatch) -> tuple[P, int]:
        """The part to stage for a batch, and its bytes."""

    @abstractmethod
    def encode(self, parts: Sequence[P]) -> tuple[bytes, int]:
        """The content of some parts, and the number of its rows."""

    def write(self, batch: pa.RecordBatch) -> None:
        part, size = self.part(batch)
        self._parts.append(part)
        self._bytes += size
        if self._bytes > self.chunk_bytes:
            self._stage()

    def prepare_commit(self) -> Sequence[S]:
        if any(map(len, self._parts)):
            self._stage(inline=not self._staged and self._bytes <= INLINE_BYTES)
        return self._staged

    def _stage(self, inline: bool = False) -> None:
        (content, rows), file = self.encode(self._parts), ""
        if not inline and self._folder is not None:
            path = storage_path(self._folder, "staging folder") / f"{uuid4().hex}.{self.suffix}"
            put(path, content)
            file, content = str(path), b""
        self._staged.append(self.committable(rows=rows, bytes=self._bytes, content=content, file=file))
        self._parts, self._bytes = [], 0


class SparkSink(Sink[In], Generic[In, C]):
    """A sink that Spark writes: `writer` in Spark's tasks, `committer` on the driver, `engine/commit.py` between them.

    A sink whose rows Spark can write by itself, such as Parquet, overrides `stage` instead of `writer`.
    """

    committable: type[C]
    """The type that its writers prepare."""

    commits_in_writers: bool = False
    """Whether writers make rows visible themselves, under the identity of their attempt."""

    @abstractmethod
    def committer(self, schema: pa.Schema) -> Committer[C]:
        """The committer of a job, for rows of this schema.

        It may create a missing table. Raises `SinkError` where the rows do not fit the target, and `UnavailableError`
        where the target is away.
        """

    def writer(self, task: WriterTask) -> Writer[C]:
        """A writer for the rows of one of Spark's tasks, which has them in the order of emission.

        The rows of a key that an operator before the sink emitted are in one task.
        """
        raise NotImplementedError

    def stage(self, frame: DataFrame, attempts: Sequence[WriteAttempt], ship: Ship) -> list[list[C]]:
        """Write all rows where readers do not see them yet; returns the committables of each attempt.

        With several attempts (`takes_together`), the column `PARTITION_INDEX` has the index of a row's attempt, and for
        a sink that `upserts` the column `EMITTED` the order of a key's rows within a partition. The engine counts the
        rows while they are written, so run one job over them.

        In later epochs `ship` returns what it returned in the first: pass attempts as arguments, not inside.
        """
        return stage_by_writers(self, self.committable, frame, attempts, ship)

    def takes_together(self) -> bool:
        """Whether several partitions can be written at once; otherwise they are written one by one."""
        return not self.upserts

    def location(self, identity: WriteIdentity) -> str:
        """Where a write goes, for people."""
        return self.describe()

    def elsewhere(self, path: str) -> Self | None:
        """The same sink, writing to another place; None where what it writes cannot be read back."""
        return None

    def exists(self) -> bool:
        """Whether what it wrote is still there, as far as it knows."""
        return True

    def dataset(self, records: RecordType | None = None) -> ds.Dataset:
        """All rows that it wrote. `records` is their record type, for files that do not store their columns' types.

        Raises `UnsupportedError` where they cannot be read back.
        """
        raise UnsupportedError(f"sink '{self.name}' ({self.describe()}): what it wrote cannot be read back")

    def partitions(
        self, writes: Sequence[WriteIdentity], records: RecordType | None = None
    ) -> Mapping[WriteIdentity, ds.Dataset]:
        """The rows that BATCH runs of some partitions wrote; a partition without rows may be left out.

        `writes` are writes of these partitions, of any execution. Raises `PartitionsUnknownError` where the rows of one
        cannot be told from others.
        """
        raise PartitionsUnknownError(
            f"sink '{self.name}' ({self.describe()}): its table does not say which partition wrote a row"
        )

    def rewritten(self, epochs: Epochs, records: RecordType) -> Rewritten:
        """What some epochs of a stream did to the table.

        Raises `UnsupportedError` where the table does not say which epoch wrote a row, and `SinkError` where it no
        longer does.
        """
        raise UnsupportedError(
            f"sink '{self.name}' ({self.describe()}): its table does not say which epoch of a stream wrote a row"
        )

    def schema_of(self, records: RecordType) -> pa.Schema:
        """The columns of `dataset` where the table is as declared."""
        return records.schema

    def preview(self, spark: SparkSession, rows: int) -> pa.Table | None:
        """The first rows that it wrote, or None where they cannot be read back."""
        return None
