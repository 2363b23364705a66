"""A savepoint of a STREAMING job's state as tables: from Spark's checkpoint at one epoch.

The checkpoint is a copy that nobody writes to, so a running job goes on meanwhile. Knows Spark's state reader, the
layout of its checkpoints, and the savepoint's tables.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import quote

import msgspec
from upath import UPath

from dagster_unified.connectors.paths import for_spark
from dagster_unified.connectors.positions import Position
from dagster_unified.connectors.spark_log import offsets_of_sources
from dagster_unified.engine.dataframe.inputs import spark_source
from dagster_unified.engine.state_tables.frames import operator_tables
from dagster_unified.engine.state_tables.savepoints import stateful, write_table
from dagster_unified.engine.streaming.checkpoint import Deployed, last_number
from dagster_unified.engine.streaming.control import ControlFile
from dagster_unified.engine.streaming.topology import MAIN, Topology
from dagster_unified.errors import StateError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.plan import Plan, library_version
from dagster_unified.operators.drivers.key_groups import ControlEvent
from dagster_unified.operators.numbers import INDEX
from dagster_unified.operators.time import wall_clock
from dagster_unified.state import manifest as manifests
from dagster_unified.state.manifest import Manifest, OperatorState

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class FrozenCheckpoint:
    """Spark's checkpoint of the query of lanes, and the time that its job has reached.

    Nobody writes to the checkpoint any more.
    """

    folder: UPath
    epoch: int | None
    """None where there was no data, and so there is nothing in it."""

    event: ControlEvent

    def positions(self, plan: Plan, stages: Topology) -> dict[str, Position]:
        """What was read of each source at the epoch, by its uid."""
        if self.epoch is None:
            sources = [plan.graph.node(head.source) for head in stages.heads]
            return {
                n.uid: spark_source(plan.name, cast("g.SourceNode", n)).stream_position(None, None) for n in sources
            }
        offsets = offsets_of_sources(self.folder / "offsets" / str(self.epoch))
        found = {}
        for number, head in enumerate(stages.heads):
            node = plan.graph.node(head.source)
            assert isinstance(node, g.SourceNode)
            offset = None if offsets[number] == "-" else offsets[number]
            found[node.uid] = spark_source(plan.name, node).stream_position(
                self.folder / "sources" / str(number), offset
            )
        return found


def frozen(folder: UPath, epoch: int | None) -> FrozenCheckpoint:
    """The checkpoint at an epoch, in the folder of a deployment or of a savepoint, to which nobody writes."""
    event = ControlFile(str(folder / "control" / MAIN)).read()
    return FrozenCheckpoint(folder / "spark" / MAIN, epoch, event or ControlEvent())


def stopped(place: UPath) -> FrozenCheckpoint:
    """That of a stopped job at its last epoch; raises `StateError` where there is none, or one was begun."""
    folder = place / "spark" / MAIN
    committed, begun = last_number(folder / "commits"), last_number(folder / "offsets")
    if committed is None:
        raise StateError(f"there is no state to save in {folder}: no epoch was committed yet")
    if begun is not None and begun > committed:
        raise StateError(
            f"epoch {begun} in {folder} was begun and not committed: the job was killed; start it, and stop it"
            " with a savepoint"
        )
    return frozen(place, committed)


def write_tables(
    plan: Plan,
    spark: SparkSession,
    deployed: Deployed,
    stages: Topology,
    checkpoint: FrozenCheckpoint,
    path: str,
    reason: str,
) -> Manifest:
    """Write a savepoint of the state that a checkpoint holds."""
    folder, attempt = manifests.check_free(path, "savepoint"), manifests.new_attempt()
    lanes = {track.program.steps[0].uid: lane for level in stages.levels for lane, track in level.items()}
    nodes = [node for node in stateful(plan) if node.uid in lanes]
    states: list[OperatorState] = []
    if checkpoint.epoch is not None:
        with _readable(checkpoint.folder) as location:
            state = _State(spark, location, checkpoint.epoch, len(stages.levels))
            tables = operator_tables(plan, spark, nodes, {})
            states = [write_table(table, state.pages(lanes[table.node.uid]), folder, attempt) for table in tables]
    found = Manifest(
        library=library_version(),
        pipeline=plan.name,
        mode="STREAMING",
        taken=wall_clock(),
        reason=reason,
        fingerprint=deployed.fingerprint,
        max_parallelism=deployed.max_parallelism,
        event=msgspec.structs.replace(checkpoint.event, end=False),
        operators=states,
        positions=checkpoint.positions(plan, stages),
        epochs={} if checkpoint.epoch is None else {MAIN: checkpoint.epoch},
    )
    manifests.commit(folder, found)
    return found


@contextmanager
def _readable(folder: UPath) -> Iterator[str]:
    """The folder under a name that Spark's state reader takes: it looks for `a b` in `a%20b`."""
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
    """What Spark's state reader finds in a checkpoint at an epoch."""

    spark: SparkSession
    location: str
    epoch: int
    operators: int
    _found: dict[int, int] | None = None

    def pages(self, lane: int) -> DataFrame:
        """The pages of an operator's key groups, in the columns of `CARRIED_LAYOUT`."""
        from pyspark.sql import functions as F

        operator = self._operator_of(lane)
        group, own = F.col("key.group").cast("long").alias("group"), F.col("key.lane") == lane
        number = F.lit(INDEX).cast("long").alias("page")
        index = self._read(operator, "index").where(own).select(group, number, F.col("value.data").alias("state"))
        columns = (F.col("user_map_key.number").cast("long").alias("page"), F.col("user_map_value.data").alias("state"))
        return index.unionByName(self._read(operator, "pages").where(own).select(group, *columns))

    def _operator_of(self, lane: int) -> int:
        """Spark's number of the stateful operator that has the lane's state; it does not count them by level."""
        if self.operators == 1:  # each question loads all of the operator's state
            return 0
        if self._found is None:
            self._found = {}
            for operator in range(self.operators):
                for row in self._read(operator, "index").select("key.lane").distinct().collect():
                    self._found[row["lane"]] = operator
        return self._found.get(lane, 0)

    def _read(self, operator: int, variable: str) -> DataFrame:
        reader = self.spark.read.format("statestore").option("operatorId", operator).option("stateVarName", variable)
        return reader.option("batchId", self.epoch).load(self.location)
