"""A savepoint of a STREAMING job's state as tables: from Spark's checkpoint at one epoch.

The checkpoint is a copy that nobody writes to, so a running job goes on meanwhile. Knows Spark's state reader, the
layout of its checkpoints, and the savepoint's tables.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import quote

import msgspec
from upath import UPath

from dagster_unified.connectors.protocol.positions import OffsetsRead, Position
from dagster_unified.connectors.protocol.splits import SplitSource
from dagster_unified.engine.dataframe.frames import spark_source
from dagster_unified.engine.iterations.files import text_of
from dagster_unified.engine.iterations.savepoints import Written, write_iteration
from dagster_unified.engine.state_tables.savepoints import operator_tables, stateful, stateful_in_all, write_table
from dagster_unified.engine.streaming.checkpoint import (
    Deployed,
    check_sources,
    last_number,
)
from dagster_unified.engine.streaming.control import ControlFile
from dagster_unified.engine.streaming.cross_query import write_unread_input
from dagster_unified.engine.streaming.iterations import FOLDER as ITERATIONS
from dagster_unified.errors import StateError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.plan import Plan
from dagster_unified.graph.queries import MAIN, KeyGroupQueryPlan
from dagster_unified.operators.drivers.key_groups import ControlEvent
from dagster_unified.operators.time import wall_clock
from dagster_unified.spark_internals.spark_log import offsets_of_sources
from dagster_unified.state import manifest as manifests
from dagster_unified.state.manifest import Manifest, OperatorState
from dagster_unified.storage.paths import children, for_spark
from dagster_unified.version import library_version

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class FrozenCheckpoint:
    """The state that a job has written up to some epochs, in the folder of a deployment or of a savepoint.

    Nobody writes to it any more. `sources` is where the job keeps its decisions about its sources.
    """

    place: UPath
    sources: UPath
    epochs: Mapping[str, int | None]
    """Of each query of key groups; None where it had no data, and so there is nothing of it."""


def stopped(place: UPath, sources: UPath, names: Iterable[str]) -> FrozenCheckpoint:
    """Return the checkpoint of a stopped job at its last epochs.

    Raises `StateError` where there is none, or an epoch was begun.
    """
    epochs = {}
    for name in names:
        folder = place / "spark" / name
        committed, begun = last_number(folder / "commits"), last_number(folder / "offsets")
        if committed is None and name == MAIN:
            raise StateError(f"there is no state to save in {folder}: no epoch was committed yet")
        if begun is not None and (committed is None or begun > committed):
            raise StateError(
                f"epoch {begun} in {folder} was begun and not committed: the job was killed; start it, and stop it"
                " with a savepoint"
            )
        epochs[name] = committed
    return FrozenCheckpoint(place, sources, epochs)


@dataclass
class _Query:
    """A query of key groups at an epoch of its checkpoint."""

    spec: KeyGroupQueryPlan
    checkpoint: FrozenCheckpoint

    @property
    def epoch(self) -> int | None:
        return self.checkpoint.epochs.get(self.spec.name)

    @property
    def place(self) -> UPath:
        return self.checkpoint.place

    @property
    def plan(self) -> Plan:
        return self.spec.plan

    @property
    def folder(self) -> UPath:
        return self.place / "spark" / self.spec.name

    def event(self) -> ControlEvent:
        """Return the event time that it has reached."""
        return ControlFile(str(self.place / "control" / self.spec.name)).read() or ControlEvent()

    def sources(self) -> list[tuple[g.SourceNode, UPath, str | None]]:
        """Its sources, each with its folder in Spark's checkpoint and the offset up to which it was read, if any."""
        nodes = [cast("g.SourceNode", self.plan.graph.node(head.source)) for head in self.spec.stages.heads]
        offsets = ["-"] * len(nodes)
        if self.epoch is not None:
            offsets = offsets_of_sources(self.folder / "offsets" / str(self.epoch))
        return [
            (node, self.folder / "sources" / str(number), None if offset == "-" else offset)
            for number, (node, offset) in enumerate(zip(nodes, offsets, strict=False))
        ]

    def positions(self) -> dict[str, Position]:
        return {
            node.uid: self._position(node, folder, offset)
            for node, folder, offset in self.sources()
            if not isinstance(node, g.QueryInputNode)
        }

    def _position(self, node: g.SourceNode, folder: UPath, offset: str | None) -> Position:
        source = spark_source(self.plan.name, node)
        position = source.stream_position(None if offset is None else folder, offset)
        if isinstance(source, SplitSource) and isinstance(position, OffsetsRead):
            identities = source.kept_identities(self.checkpoint.sources / node.uid)
            return msgspec.structs.replace(position, identities=dict(identities))
        return position

    def write_operators(
        self, spark: SparkSession, folder: UPath, attempt: str, tasks: int | None
    ) -> list[OperatorState]:
        """Write the tables of its operators, each in so many tasks at most."""
        levels = self.spec.stages.levels
        lanes = {routed.program.steps[0].uid: lane for level in levels for lane, routed in level.items()}
        operators = [operator for operator in stateful(self.plan) if operator.uid in lanes]
        if self.epoch is None or not operators:
            return []
        tables = operator_tables(self.plan, spark, operators, {})
        with self._naming_what_is_missing(), _readable(self.folder) as location:
            state = _State(spark, location, self.epoch, len(levels), tasks)
            return [
                write_table(
                    table, partial(table.files_of_groups, state.pages(lanes[table.operator.uid])), folder, attempt
                )
                for table in tables
            ]

    @contextmanager
    def _naming_what_is_missing(self) -> Iterator[None]:
        """Raise `StateError` that names what the checkpoint lacks, where its state cannot be read.

        Spark only says `requirement failed`.
        """
        try:
            yield
        except Exception as error:
            missing = self._missing()
            if not missing:
                raise
            raise StateError(
                f"{self.plan.name}: the state of query '{self.spec.name}' at epoch {self.epoch} cannot be read, since"
                f" {self.folder} has no {', no '.join(missing)}; somebody or something has removed files of the"
                " checkpoint: put them back, or restore an earlier savepoint"
            ) from error

    def _missing(self) -> list[str]:
        """Return the paths that Spark needs to read the state and the folder lacks."""
        assert self.epoch is not None
        needed = ["metadata", f"offsets/{self.epoch}", f"commits/{self.epoch}"]
        missing = [name for name in needed if not (self.folder / name).exists()]
        for operator in range(len(self.spec.stages.levels)):
            state = f"state/{operator}"
            state_files = children(self.folder / state) if (self.folder / state).exists() else {}
            if "_metadata" not in state_files:
                missing.append(f"{state}/_metadata")
            parts = {int(name) for name in state_files if name.isdigit()}
            missing += [f"{state}/{part}" for part in range(max(parts, default=0) + 1) if part not in parts]
            for part in sorted(parts):
                names = [path.name for path in (self.folder / state / str(part)).rglob("*")]
                if not any(re.match(rf"{self.epoch + 1}[._]", name) for name in names):
                    missing.append(f"{state}/{part} of version {self.epoch + 1}")
        return missing

    def write_iterations(self, spark: SparkSession, folder: UPath, attempt: str) -> list[Written]:
        loops = [node for node in self.plan.graph.nodes if isinstance(node, g.IterationNode)]
        tables = []
        for node in loops if self.epoch is not None else ():
            iteration_folder = self.place / ITERATIONS / node.uid
            if not iteration_folder.exists():
                raise StateError(
                    f"{self.plan.name}: the state of iteration '{node.name}' was deleted when the job finished; ask for"
                    " a savepoint where the job is drained"
                )
            assert self.epoch is not None
            tables.append(
                write_iteration(self.plan, node, spark, text_of(iteration_folder), self.epoch, folder, attempt)
            )
        return [table for table in tables if table is not None]

    def write_unread_input(self, spark: SparkSession, folder: UPath, attempt: str) -> list[OperatorState]:
        """Write the tables of what other queries have handed on, and this one has not read."""
        return [
            write_unread_input(node, spark, text_of(self.place / ITERATIONS / node.uid), offset, folder, attempt)
            for node, _, offset in self.sources()
            if isinstance(node, g.QueryInputNode)
        ]


def write_tables(
    plan: Plan,
    spark: SparkSession,
    deployed: Deployed,
    queries: Sequence[KeyGroupQueryPlan],
    checkpoint: FrozenCheckpoint,
    path: str,
    reason: str,
    tasks: int | None = None,
) -> Manifest:
    """Write a savepoint of the state that a checkpoint holds, in so many tasks at once at most.

    Raises `StateError` where a query has nothing in it that the job's start had not, and where two operators would have
    one table.
    """
    stateful_in_all(plan, spark)
    check_sources(deployed, {query.name: query.sources for query in queries})
    folder, attempt = manifests.check_free(path, "savepoint"), manifests.new_attempt()
    exported = [_Query(spec, checkpoint) for spec in queries]
    without = next((query.spec.name for query in exported if query.epoch is None), None)
    if without is not None and deployed.start:
        remedy = "copy that one's folder, or ask" if all(query.epoch is None for query in exported) else "ask"
        raise StateError(
            f"{plan.name}: query '{without}' has committed no epoch since the job started from the savepoint"
            f" {deployed.start}, which holds its state; {remedy} again once query '{without}' has run"
        )
    operators = [state for query in exported for state in query.write_operators(spark, folder, attempt, tasks)]
    loops = [loop for query in exported for loop in query.write_iterations(spark, folder, attempt)]
    manifest = Manifest(
        library=library_version(),
        pipeline=plan.name,
        mode="STREAMING",
        taken=wall_clock(),
        reason=reason,
        fingerprint=deployed.fingerprint,
        max_parallelism=deployed.max_parallelism,
        event=_together([query.event() for query in exported]),
        operators=[*operators, *(state for loop in loops for state in loop.operators)],
        iterations=[loop.iteration for loop in loops],
        handed_on=[table for query in exported for table in query.write_unread_input(spark, folder, attempt)],
        positions={uid: position for query in exported for uid, position in query.positions().items()},
        epochs={query.spec.name: query.epoch for query in exported if query.epoch is not None},
    )
    manifests.commit(folder, manifest)
    return manifest


def _together(events: Sequence[ControlEvent]) -> ControlEvent:
    """Return the event time of several queries: each operator and assigner belongs to one of them."""
    return ControlEvent(
        number=max(event.number for event in events),
        watermarks={uid: time for event in events for uid, time in event.watermarks.items()},
        now=max(event.now for event in events),
        last_event_times={uid: time for event in events for uid, time in event.last_event_times.items()},
        assigned={uid: time for event in events for uid, time in event.assigned.items()},
        parts={uid: times for event in events for uid, times in event.parts.items()},
        generated={uid: time for event in events for uid, time in event.generated.items()},
        remembered={uid: by_subtask for event in events for uid, by_subtask in event.remembered.items()},
        ended=sorted({uid for event in events for uid in event.ended}),
    )


@contextmanager
def _readable(folder: UPath) -> Iterator[str]:
    """Return the folder under a name that Spark's state reader takes: it looks for `a b` in `a%20b`."""
    location = for_spark(folder)
    path = location.partition("://")[2]
    if quote(path) == path:
        yield location
    elif folder.protocol in ("", "file"):
        with tempfile.TemporaryDirectory(prefix="dagster-unified-") as links:
            link = Path(links) / "checkpoint"
            link.symlink_to(str(folder))
            yield f"file://{link}"
    else:
        raise StateError(
            f"Spark's state reader cannot read {folder}: it takes no names with spaces and other characters that a URL"
            " writes with %; choose another execution.checkpointing.dir"
        )


@dataclass
class _State:
    """An epoch's state, as Spark's state reader finds it in a checkpoint."""

    spark: SparkSession
    location: str
    epoch: int
    operators: int
    tasks: int | None
    """In how many tasks at most it is read."""

    _operators: dict[int, int] | None = None

    def pages(self, lane: int) -> DataFrame:
        """Return the pages of an operator's key groups, in the columns of `CARRIED_LAYOUT`, group by group."""
        from pyspark.sql import functions as F

        pages = self._read(self._operator_of(lane)).where(F.col("key.lane") == lane)
        if self.tasks is not None:
            pages = pages.coalesce(self.tasks)
        return pages.select(
            F.col("key.group").cast("long").alias("group"),
            F.col("user_map_key.number").cast("long").alias("page"),
            F.col("user_map_value.data").alias("state"),
        )

    def _operator_of(self, lane: int) -> int:
        """Return Spark's number of the stateful operator with the lane's state; it does not count them by level."""
        if self.operators == 1:  # each question loads all of the operator's state
            return 0
        if self._operators is None:
            self._operators = {}
            for operator in range(self.operators):
                for row in self._read(operator).select("key.lane").distinct().collect():
                    self._operators[row["lane"]] = operator
        return self._operators.get(lane, 0)

    def _read(self, operator: int) -> DataFrame:
        reader = self.spark.read.format("statestore").option("operatorId", operator).option("stateVarName", "pages")
        return reader.option("batchId", self.epoch).load(self.location)


def without_tables(plan: Plan) -> str:
    """Return why a savepoint of a STREAMING job has no tables; empty where it has."""
    aggregates = [node.name for node in plan.graph.nodes if node.aggregates_natively]
    if not aggregates:
        return ""
    option = plan.execution.native_aggregates
    return (
        f"only Spark can read the state of the native aggregate '{aggregates[0]}', which"
        f" state.native-aggregates={option} leaves to it"
    )
