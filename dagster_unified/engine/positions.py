"""What has been read of a plan's sources, and the plan that reads what comes after it.

Knows the plan, and what sources say of themselves; not how a run reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from dagster_unified.connectors.protocol.positions import FilesRead, OffsetsRead, Position, SparkOffset, Unread
from dagster_unified.engine.dataframe.frames import spark_source
from dagster_unified.errors import StateError, UnifiedError, UnsupportedError
from dagster_unified.graph.nodes import Graph, SourceNode
from dagster_unified.graph.plan import Plan, Region
from dagster_unified.spark_internals.spark_log import offsets_of_sources

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from upath import UPath


def with_fixed_ranges(plan: Plan, region: Region) -> Plan:
    """Return the plan in which the sources of a BATCH stage have decided what it reads."""
    fixed = {}
    for node in (source for source in plan.graph.sources if source.id in region.nodes):
        source = spark_source(plan.name, node)
        with _naming(plan):
            decided = source.with_fixed_range()
        if decided is not source:
            fixed[node.id] = replace(node, source=decided)
    return _with_sources(plan, fixed) if fixed else plan


def batch_positions(plan: Plan, spark: SparkSession, region: Region) -> dict[str, Position]:
    """Return the position in each source, by uid, up to which a BATCH stage will read; ask before it reads."""
    positions: dict[str, Position] = {}
    for node in (source for source in plan.graph.sources if source.id in region.nodes):
        with _naming(plan):
            positions[node.uid] = spark_source(plan.name, node).batch_position(spark)
    return positions


Read: TypeAlias = str | dict[str, str | int | dict[str, int]]
"""What was read of a source, as JSON that people can read."""


def shown(position: Position) -> Read:
    """Return a position as JSON; files are counted, since there may be many."""
    if isinstance(position, OffsetsRead):
        return {"of": position.origin, "offsets": position.offsets}
    if isinstance(position, FilesRead):
        return {"of": position.root, "files": position.count}
    if isinstance(position, SparkOffset):
        return {"of": position.format, "offset": position.offset}
    return position.describe()


def batch_reads(plan: Plan, spark: SparkSession, region: Region) -> dict[str, Read]:
    """Return what a BATCH stage will read of each source, by the source's name, as far as they can tell.

    Ask before it reads. A partition of a topic or of a table with versions is shown by its offsets.
    """
    reads: dict[str, Read] = {}
    for node in (source for source in plan.graph.sources if source.id in region.nodes):
        source = spark_source(plan.name, node)
        with suppress(UnsupportedError):
            stop = source.stops_at()
            reads[source.name] = shown(source.batch_position(spark) if stop is None else stop)
    return reads


def stops_of(plan: Plan, region: Region) -> dict[str, Position]:
    """Return where the sources of a BATCH stage stop, by uid, as far as another run can stop there as well."""
    nodes = [node for node in plan.graph.sources if node.id in region.nodes]
    stops = {node.uid: spark_source(plan.name, node).stops_at() for node in nodes}
    return {uid: stop for uid, stop in stops.items() if stop is not None}


def stopping(graph: Graph, stops: Mapping[str, Position]) -> Graph:
    """Return the graph whose sources stop where others have stopped; `stops` is by uid.

    Raises `StateError` or `UnsupportedError` where one cannot.
    """
    moved = {}
    for node in graph.sources:
        if node.uid in stops:
            moved[node.id] = replace(node, source=spark_source(graph.name, node).until(stops[node.uid]))
    return replace(graph, nodes=tuple(moved.get(node.id, node) for node in graph.nodes))


def streamed_positions(plan: Plan, checkpoint: UPath, sources: Sequence[str], epoch: int) -> dict[str, Position]:
    """Return the position in each source of a STREAMING query, by uid, that an epoch has reached.

    `checkpoint` is Spark's, and `sources` are the uids of its sources in the order in which Spark numbers them. Sources
    that cannot tell are left out, and so are all where Spark keeps the epoch no more.
    """
    nodes = {node.uid: node for node in plan.graph.sources}
    positions: dict[str, Position] = {}
    with suppress(FileNotFoundError):
        offsets = offsets_of_sources(checkpoint / "offsets" / str(epoch))
        for number, (uid, offset) in enumerate(zip(sources, offsets, strict=False)):
            if uid in nodes:
                log, read = checkpoint / "sources" / str(number), None if offset == "-" else offset
                with suppress(UnifiedError):
                    source = spark_source(plan.name, nodes[uid])
                    positions[uid] = source.stream_position(None if read is None else log, read)
    return positions


def check_positions(plan: Plan) -> None:
    """Raise `UnsupportedError` where a STREAMING run over a source cannot tell what it has read."""
    for node in plan.graph.sources:
        with _naming(plan):
            spark_source(plan.name, node).stream_position(None, None)


def after(plan: Plan, positions: Mapping[str, Position], ignore_unclaimed: bool) -> Plan:
    """Return the plan whose sources read what comes after these positions, which are by uid.

    Raises `StateError` where a position is of no source, unless that is ignored, and where a source cannot go on.
    """
    nodes = {node.uid: node for node in plan.graph.sources}
    lost = [uid for uid, position in positions.items() if uid not in nodes and not isinstance(position, Unread)]
    if lost and not ignore_unclaimed:
        raise StateError(
            f"{plan.name}: the savepoint says what was read of source '{lost[0]}', and no source has that uid: there"
            f" are {', '.join(nodes)}; give the source its uid again, or forget what was read with"
            " execution.savepoint.ignore-unclaimed-state=true"
        )
    moved = {}
    for uid, node in nodes.items():
        position = positions.get(uid, Unread())
        if not isinstance(position, Unread):
            with _naming(plan):
                moved[node.id] = replace(node, source=spark_source(plan.name, node).after(position))
    return _with_sources(plan, moved)


@contextmanager
def _naming(plan: Plan) -> Iterator[None]:
    """Name the pipeline in the error of a source."""
    try:
        yield
    except UnifiedError as error:
        raise type(error)(f"{plan.name}: {error}") from error


def _with_sources(plan: Plan, sources: Mapping[int, SourceNode]) -> Plan:
    graph = replace(plan.graph, nodes=tuple(sources.get(node.id, node) for node in plan.graph.nodes))
    return replace(plan, graph=graph)
