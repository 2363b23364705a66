"""Writes rows to sinks and commits them, once: identity, fencing, conflicts and lost answers, for all sinks alike."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Generic
from uuid import uuid4

from dagster_unified.connectors.protocol.commits import (
    C,
    Commit,
    CommitConflictError,
    Committer,
    CommitUncertainError,
    Ship,
    SparkSink,
    WriteAttempt,
    WriteIdentity,
)
from dagster_unified.engine.dataframe.passes import observed
from dagster_unified.engine.failures import CLOSED
from dagster_unified.errors import LeaseLostError, PipelineError, SinkError, UnifiedError
from dagster_unified.graph.fingerprint import digest
from dagster_unified.graph.nodes import SinkNode
from dagster_unified.operators.layout import EMITTED, PARTITION_INDEX

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_ATTEMPTS = 20
"""Commits that are tried before a conflict, or an answer that stays lost, is an error."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 2.0
"""Seconds between them; each pause is twice the one before."""


@dataclass(frozen=True)
class WriteContext:
    """One write: its identity, and what the engine adds."""

    identity: WriteIdentity
    stage: str
    """The stage that writes, for messages."""

    before_commit: Callable[[], None] = lambda: None
    """Raises where this job may not write any more."""

    ship: Ship = lambda function: function
    """Makes a function one that reaches Spark's workers with its author's code, the same for every epoch."""

    staging: str | None = None
    """A folder for what writers stage, which the driver and all workers reach."""


@dataclass
class WriteResult:
    """The result of a write to a sink: where, how many rows and bytes.

    `repeated` means that this identity had committed before, and that nothing was written now.
    """

    location: str
    bytes: int = 0
    repeated: bool = False
    rows: int = 0
    version: int | None = None
    """The version of the target that the write made, where it has versions; of one that is repeated, the latest."""


class SinkCommits(Generic[C]):
    """The commits of one sink, by one job. Keeps the sink's committer from epoch to epoch until it is closed."""

    def __init__(self, sink: SparkSink[Any, C]) -> None:
        self.sink = sink
        self._committer: Committer[C] | None = None

    def write(self, frame: DataFrame, contexts: Sequence[WriteContext]) -> list[WriteResult]:
        """Write rows under these identities, unless the target has them; several at once where the sink can.

        With several the column `PARTITION_INDEX` has the index of a row's identity.
        """
        sink, committer = self.sink, self._open(frame)
        attempts = [_attempt(context) for context in contexts]
        due = [index for index, attempt in enumerate(attempts) if _is_due(committer, attempt.identity)]
        committed: dict[int, Commit[C]] = {}
        if due:
            committed = self._write(frame, contexts, attempts, due)
        return [
            WriteResult(
                sink.location(attempt.identity),
                sum(c.bytes for c in committed[index].committables) if index in committed else 0,
                repeated=index not in committed,
                version=committer.version(),
            )
            for index, attempt in enumerate(attempts)
        ]

    def close(self) -> None:
        """Close the committer. The next write opens another."""
        if self._committer is not None:
            committer, self._committer = self._committer, None
            committer.close()

    def _open(self, frame: DataFrame) -> Committer[C]:
        if self._committer is None:
            from pyspark.sql.pandas.types import to_arrow_schema

            rows = frame.drop(PARTITION_INDEX, EMITTED)
            schema = to_arrow_schema(rows.schema, timezone="UTC", prefers_large_types=False)
            self._committer = self.sink.committer(schema)
        return self._committer

    def _write(
        self,
        frame: DataFrame,
        contexts: Sequence[WriteContext],
        attempts: Sequence[WriteAttempt],
        due: Sequence[int],
    ) -> dict[int, Commit[C]]:
        """Stage and commit the attempts that are due; return the commits by the attempt's index."""
        sink, committer = self.sink, self._open(frame)
        started = [attempts[index] for index in due]
        rows = frame if len(contexts) == len(due) else _only(frame, due)
        try:
            if sink.commits_in_writers:
                _check(contexts, due)
            committer.begin(started)
            staged = sink.stage(rows, started, contexts[0].ship)
            _check(contexts, due)
            commits = {
                index: Commit(attempt, committables, _goes_back(committer, attempt.identity))
                for index, attempt, committables in zip(due, started, staged, strict=True)
            }
        except BaseException:
            with suppress(Exception):  # the error that ended the write is the one to show
                committer.clean_up(started, committed=False)
            raise
        # an error in here may hide a commit that was made: what is staged stays, unless it is known that none was
        committed = _commit(
            committer,
            commits,
            check=lambda: _check(contexts, due),
            give_up=lambda: committer.clean_up(started, committed=False),
        )
        for was_committed in (True, False):
            retried = [attempts[index] for index in due if (index in committed) == was_committed]
            if retried:
                committer.clean_up(retried, was_committed)
        return committed


def _attempt(context: WriteContext) -> WriteAttempt:
    attempt_id = uuid4().hex
    staging = None if context.staging is None else f"{context.staging}/{digest(context.identity.origin)}/{attempt_id}"
    return WriteAttempt(context.identity, attempt_id, context.stage, staging)


def _check(contexts: Sequence[WriteContext], due: Sequence[int]) -> None:
    for index in due:
        contexts[index].before_commit()


def _only(frame: DataFrame, indices: Sequence[int]) -> DataFrame:
    """Return the rows of some attempts, numbered anew."""
    from pyspark.sql import functions as F

    rows = frame.where(F.col(PARTITION_INDEX).isin(*indices))
    if len(indices) == 1:
        return rows.drop(PARTITION_INDEX)  # the rows of a single attempt have no index
    number = F.array_position(F.lit(list(indices)), F.col(PARTITION_INDEX)) - 1
    return rows.withColumn(PARTITION_INDEX, number.cast("int"))


def _is_due(committer: Committer[Any], identity: WriteIdentity) -> bool:
    """Return whether the target lacks this write. Raises `LeaseLostError` where it is on a later timeline."""
    if identity.deployment is not None:
        timeline = committer.last_version(identity.deployment)
        if timeline is not None and timeline > identity.timeline:
            raise LeaseLostError(
                f"{identity.pipeline}: sink '{identity.sink}' has been written by a job that went back to a savepoint"
                f" after this one began (timeline {timeline}, this job is on {identity.timeline}); this job may not"
                " write any more"
            )
    done = committer.last_version(identity.writer)
    return done is None or done < identity.version


def _goes_back(committer: Committer[Any], identity: WriteIdentity) -> bool:
    return identity.timeline > 0 and committer.last_version(identity.writer) is None


def _commit(
    committer: Committer[C], commits: dict[int, Commit[C]], check: Callable[[], None], give_up: Callable[[], None]
) -> dict[int, Commit[C]]:
    """Commit; return those that another process had not committed meanwhile.

    After a conflict, or without knowing whether a commit was made, it asks the target and tries the rest again, if
    this job may still write: a conflict may be the first that it hears of its successor. Calls `give_up` where it
    ends without having committed anything.
    """
    pause, uncertain = _FIRST_PAUSE, False
    try:
        for _ in range(_ATTEMPTS):
            due = {index: commit for index, commit in commits.items() if _is_due(committer, commit.identity)}
            if not due:
                return commits if uncertain else {}
            try:
                committer.commit(list(due.values()))
                return due
            except (CommitConflictError, CommitUncertainError) as error:
                last = error
                uncertain = uncertain or isinstance(error, CommitUncertainError)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            check()
        raise last
    except (CommitConflictError, LeaseLostError):
        if not uncertain:
            with suppress(Exception):
                give_up()
        raise


_CLOSED_IN_JAVA = re.compile(
    r"Mkdirs failed to create|mkdir of .* failed|Permission denied|Read-only file system|[Nn]ot a"
    r" directory|Access(?:Denied|ControlException)"
)

_JAVA_CLASS = re.compile(r"^(?:Caused by)?[: ]*(?:[\w$]+\.)+[\w$]+: ")
"""The text that Java prints before an exception's own words."""


def write(node: SinkNode, commits: SinkCommits[Any], frame: DataFrame, context: WriteContext) -> WriteResult:
    """Write rows to a sink and count them, also where the sink has them already and takes none."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as F

    counts = Observation()
    counted = frame.observe(counts, F.count(F.lit(1)).alias("rows"))
    with _named(node, context.identity.pipeline):
        (result,) = commits.write(counted, [context])
    if result.repeated:  # nothing has run, and asking for what was observed would wait for ever
        counted.write.format("noop").mode("overwrite").save()
    return replace(result, rows=int(observed(counts).get("rows") or 0))


def write_partitions(node: SinkNode, frame: DataFrame, contexts: Sequence[WriteContext]) -> list[WriteResult] | None:
    """Write several partitions at once; None where the sink has to write them one by one."""
    pipeline = contexts[0].identity.pipeline
    sink = spark_sink(pipeline, node)
    if not sink.takes_together():
        return None
    with _named(node, pipeline), closing(SinkCommits(sink)) as commits:
        return commits.write(frame, contexts)


def spark_sink(pipeline: str, node: SinkNode) -> SparkSink[Any, Any]:
    """Return the sink of a node."""
    if not isinstance(node.sink, SparkSink):
        raise PipelineError(f"{pipeline}: sink '{node.name}' is a {type(node.sink).__name__}, which Spark cannot write")
    return node.sink


@contextmanager
def _named(node: SinkNode, pipeline: str) -> Iterator[None]:
    """Name the pipeline in an error of a sink that does not, and the sink whose path cannot be written to.

    The latter is terminal: the next attempt would not find the path either.
    """
    try:
        yield
    except UnifiedError as error:
        if not str(error).startswith("sink '"):
            raise
        raise type(error)(f"{pipeline}: {error}") from error
    except OSError as error:
        if error.errno not in CLOSED and not (error.errno in (errno.ENOENT, errno.EEXIST) and _has_no_folder(node)):
            raise
        at = f" {error.filename}" if error.filename else ""
        raise _unwritable(node, pipeline, f"{error.strerror}{':' + at if at else ''}") from error
    except Exception as error:
        target = node.sink.target()
        line = next((line for line in str(error).splitlines() if _CLOSED_IN_JAVA.search(line)), None)
        if target is None or line is None or not _tells_of(line, target.place.uri):
            raise
        raise _unwritable(node, pipeline, _JAVA_CLASS.sub("", line.strip())) from error


def _tells_of(line: str, place: str) -> bool:
    """Return whether a line names a place, something in it or hidden beside it, or a folder that holds it."""
    path = PurePosixPath(place.split("://")[-1])
    folders = [str(folder) for folder in path.parents if folder.name]
    beside = str(path.with_name(f".{path.name}."))
    return (
        str(path) in line
        or beside in line
        or any(re.search(rf"{re.escape(folder)}(?![^\s:,])", line) for folder in folders)
    )


def _has_no_folder(node: SinkNode) -> bool:
    """Return whether the sink's folder cannot exist: a file has its name, or nothing can be created there."""
    target = node.sink.target()
    return target is not None and (
        os.path.isfile(target.place.uri) or not os.path.isdir(os.path.dirname(target.place.uri))
    )


def _unwritable(node: SinkNode, pipeline: str, reason: str) -> SinkError:
    return SinkError(
        f"{pipeline}: sink '{node.name}' ({node.sink.describe()}) cannot be written to: {reason}; give it a path in a"
        " folder that this process and Spark's workers may write to"
    )
