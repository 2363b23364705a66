"""Hands rows to a sink, in both modes alike: counts them, and names the sink where it cannot be written to.

Knows Spark and the sink protocol; not what computed the rows.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from dagster_unified.connectors.protocol.sink import SparkSink
from dagster_unified.engine.commit import SinkCommits, WriteContext, WriteResult
from dagster_unified.engine.dataframe.observations import observed
from dagster_unified.engine.failures import CLOSED
from dagster_unified.errors import PipelineError, SinkError, UnifiedError
from dagster_unified.graph.nodes import SinkNode

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_CLOSED_IN_JAVA = re.compile(
    r"Mkdirs failed to create|mkdir of .* failed|Permission denied|Read-only file system|[Nn]ot a"
    r" directory|Access(?:Denied|ControlException)"
)

_JAVA_CLASS = re.compile(r"^(?:Caused by)?[: ]*(?:[\w$]+\.)+[\w$]+: ")
"""What precedes an exception's own words where Java prints it."""


def write(node: SinkNode, commits: SinkCommits[Any], frame: DataFrame, context: WriteContext) -> WriteResult:
    """Writes rows to a sink, and counts them, also where the sink has them already and takes none."""
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
    """Writes several partitions at once; None where the sink has to write them one by one."""
    pipeline = contexts[0].identity.pipeline
    sink = spark_sink(pipeline, node)
    if not sink.takes_together():
        return None
    with _named(node, pipeline), closing(SinkCommits(sink)) as commits:
        return commits.write(frame, contexts)


def spark_sink(pipeline: str, node: SinkNode) -> SparkSink[Any, Any]:
    """The sink of a node."""
    if not isinstance(node.sink, SparkSink):
        raise PipelineError(f"{pipeline}: sink '{node.name}' is a {type(node.sink).__name__}, which Spark cannot write")
    return node.sink


@contextmanager
def _named(node: SinkNode, pipeline: str) -> Iterator[None]:
    """Names the pipeline where a sink does not, and the sink whose path cannot be written to.

    The latter is terminal: the path would not be there at the next attempt either.
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
        if target is None or line is None or not _tells_of(line, target.place):
            raise
        raise _unwritable(node, pipeline, _JAVA_CLASS.sub("", line.strip())) from error


def _tells_of(line: str, place: str) -> bool:
    """Whether a line names a place, something in it or hidden beside it, or a folder that it is in."""
    path = PurePosixPath(place.split("://")[-1])
    folders = [str(folder) for folder in path.parents if folder.name]
    beside = str(path.with_name(f".{path.name}."))
    return (
        str(path) in line
        or beside in line
        or any(re.search(rf"{re.escape(folder)}(?![^\s:,])", line) for folder in folders)
    )


def _has_no_folder(node: SinkNode) -> bool:
    """Whether the sink's folder cannot exist: a file has its name, or nothing can be created there."""
    target = node.sink.target()
    return target is not None and (os.path.isfile(target.place) or not os.path.isdir(os.path.dirname(target.place)))


def _unwritable(node: SinkNode, pipeline: str, reason: str) -> SinkError:
    return SinkError(
        f"{pipeline}: sink '{node.name}' ({node.sink.describe()}) cannot be written to: {reason}; give it a path in a"
        " folder that this process and Spark's workers may write to"
    )
