"""The state of an unbounded iteration as one stream that a BATCH stage leaves, and back.

The stream has the pages of all its operators, as `CARRIED_LAYOUT` has those of one: the key groups of an operator are
numbered behind those of the operators before it. Knows levels and the plan; neither stages nor where a stream is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from dagster_unified.engine.iterations.epoch_log import BEFORE, Epoch, StoredState
from dagster_unified.engine.iterations.levels import SparkLevels
from dagster_unified.engine.iterations.rescaling import rescaled
from dagster_unified.engine.iterations.savepoints import by_uid
from dagster_unified.engine.state_tables.frames import operator_tables
from dagster_unified.engine.state_tables.savepoints import stateful_in_body, write_table
from dagster_unified.graph import nodes as g
from dagster_unified.graph.body import compiled
from dagster_unified.graph.plan import Plan
from dagster_unified.operators.rounds.spec import BodyPass, Loop
from dagster_unified.state.manifest import OperatorState

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from upath import UPath


class _Share(NamedTuple):
    """The part of the stream that is one operator's."""

    level: int
    one: BodyPass
    first: int
    """The number of its first group in the stream."""

    def taken_from(self, left: DataFrame) -> DataFrame:
        """Its pages, by its own groups."""
        from pyspark.sql import functions as F

        own = F.col("group") - self.first
        return left.where(own.between(0, self.one.groups - 1)).withColumn("group", own.cast("int"))

    def as_part(self, pages: DataFrame) -> DataFrame:
        """The inverse."""
        from pyspark.sql import functions as F

        return pages.withColumn("group", (F.col("group") + self.first).cast("int"))


def _shares(plan: Plan, node: g.IterationNode, loop: Loop) -> Iterator[tuple[str, _Share]]:
    """The operators with state, by what a savepoint knows them by."""
    passes, first = by_uid(node, loop), 0
    for operator in stateful_in_body(plan, node, loop.parallelism):
        level, one = passes[operator.uid]
        yield operator.uid, _Share(level, one, first)
        first += one.groups


def left_by(plan: Plan, node: g.IterationNode, levels: SparkLevels) -> DataFrame:
    """The stream of what an iteration has left in its last epoch."""
    found: DataFrame | None = None
    for _, share in _shares(plan, node, levels.loop):
        part = share.as_part(levels.pages(share.level, share.one.number, levels.states))
        found = part if found is None else found.unionByName(part)
    assert found is not None
    return found


def epoch_before(plan: Plan, node: g.IterationNode, levels: SparkLevels, left: DataFrame, number: int) -> Epoch:
    """The epoch `number` of another run, after which an iteration goes on with what that has left."""
    stored: list[StoredState] = []
    for _, share in _shares(plan, node, levels.loop):
        stored += levels.store(share.level, share.one.number, share.taken_from(left))
    states, files = rescaled(stored, levels.loop, levels.folder)
    levels.files += files
    return Epoch(
        number, 0, 0, [], [], states, "{}", 0.0, micro_batch=BEFORE, closes=True, parallelism=levels.loop.parallelism
    )


def write_left(
    plan: Plan,
    node: g.IterationNode,
    spark: SparkSession,
    left: DataFrame,
    parallelism: int,
    folder: UPath,
    attempt: str,
) -> list[OperatorState]:
    """Writes what an iteration of so many subtasks has left into a savepoint."""
    shares = dict(_shares(plan, node, compiled(plan, node, parallelism)))
    return [
        write_table(table, partial(table.files, shares[table.operator.uid].taken_from(left)), folder, attempt)
        for table in operator_tables(plan, spark, stateful_in_body(plan, node, parallelism), {})
    ]
