"""The state of an iteration of a stream as tables of a savepoint, and back.

The tables of an unbounded one's operators are those of all operators with state. Besides, a savepoint has the number of
the last epoch, and what was fed back in it: a table of records for each operator that has not taken them yet. A bounded
one, which has not gone round, has such tables of all that came in. They are sent anew, to as many key groups or
subtasks as there are then. Knows the log, levels and the savepoint; no query.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import pyarrow as pa

from dagster_unified.engine.iterations.epoch_log import BEFORE, Epoch, EpochLog, Input, StoredState
from dagster_unified.engine.iterations.files import StoredMessage
from dagster_unified.engine.iterations.levels import SparkLevels
from dagster_unified.engine.iterations.rescaling import rescaled
from dagster_unified.engine.iterations.worker import read_output
from dagster_unified.engine.session import cores
from dagster_unified.engine.state_tables.frames import operator_tables
from dagster_unified.engine.state_tables.savepoints import (
    StartingState,
    described,
    record_columns,
    stateful_in_body,
    uid_in,
    write_records,
    write_table,
)
from dagster_unified.errors import StateError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.body import compiled
from dagster_unified.graph.plan import Plan
from dagster_unified.operators.rounds.spec import BodyPass, Driver, InputBuffer, Loop
from dagster_unified.operators.routing import ByKey, ByPartitioner, CopyToAll, Route
from dagster_unified.state.manifest import Feedback, IterationState, OperatorState
from dagster_unified.state.schemas import from_spark, to_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from upath import UPath


class Written(NamedTuple):
    """What a savepoint has of an iteration."""

    operators: list[OperatorState]
    iteration: IterationState


def write_iteration(
    plan: Plan, node: g.IterationNode, spark: SparkSession, iteration: str, epoch: int, folder: UPath, attempt: str
) -> Written | None:
    """Write what the log in the folder `iteration` has after an epoch of the query.

    None where nothing came to the iteration, and where a bounded one has run its epochs. Nobody writes to the log.
    Raises `StateError` where it is ahead of the query's epoch.
    """
    where = f"{plan.name}: iteration '{node.name}'"
    log = EpochLog(iteration, where)
    last = log.last
    if log.begun is None:
        return None
    if last is not None and last.micro_batch > epoch:
        raise StateError(
            f"{where}: it has gone round in epoch {last.micro_batch}, which was not committed; start the job, and stop"
            " it with a savepoint"
        )
    if not node.takes_input_in_all_rounds:
        return _write_input(plan, node, spark, log, epoch, folder, attempt) if last is None else None
    if last is None:
        return None
    left = log.left()
    levels = SparkLevels(spark, compiled(plan, node, left.parallelism, log.begun.groups), iteration, _nothing)
    passes = by_uid(node, levels.loop)
    operators = []
    for table in operator_tables(plan, spark, stateful_in_body(plan, node, left.parallelism), {}):
        level, one = passes[table.operator.uid]
        pages = levels.pages(level, one.number, left.states)
        operators.append(write_table(table, partial(table.files, pages), folder, attempt))
    feedback = [
        _write_waiting(node, levels, buffer, messages, False, folder, attempt)
        for buffer, messages in _by_buffer(levels.loop, last.fed_back)
    ]
    return Written(operators, IterationState(node.uid, node.name, last.number, feedback))


def _write_input(
    plan: Plan, node: g.IterationNode, spark: SparkSession, log: EpochLog, epoch: int, folder: UPath, attempt: str
) -> Written | None:
    """Write what came into a bounded iteration until an epoch of the query."""
    assert log.begun is not None
    levels = SparkLevels(spark, compiled(plan, node, log.begun.parallelism, log.begun.groups), log.folder, _nothing)
    taken = [found for micro_batch, found in log.inputs.items() if micro_batch <= epoch]
    came = {False: [p for one in taken for p in one.once], True: [p for one in taken for p in one.replayed]}
    waiting = [
        _write_waiting(node, levels, buffer, messages, replayed, folder, attempt)
        for replayed, own in came.items()
        for buffer, messages in _by_buffer(levels.loop, own)
    ]
    return Written([], IterationState(node.uid, node.name, BEFORE, waiting, bounded=True)) if waiting else None


def _nothing() -> None:
    """Nobody stops the tasks that write a savepoint."""


def by_uid(node: g.IterationNode, loop: Loop) -> dict[str, tuple[int, BodyPass]]:
    """The passes with state, and the levels that they are in, by what a savepoint knows their operators by."""
    return {
        uid_in(node, one.program.steps[0].uid): (number, one)
        for number, level in enumerate(loop.levels)
        for one in level.passes
        if one.driver is Driver.GROUPED
    }


def _by_buffer(loop: Loop, messages: Iterable[StoredMessage]) -> Iterator[tuple[InputBuffer, list[StoredMessage]]]:
    found: dict[int, list[StoredMessage]] = {}
    for message in messages:
        found.setdefault(message.slot, []).append(message)
    for number, waiting in found.items():
        buffer = loop.buffers[number]
        if len({_kind_of(route) for own in loop.inputs for route in own.routes if route.target == number}) > 1:
            raise StateError(
                f"{loop.where}: records wait for operator '{buffer.reader}' that come to it in several ways, some to"
                " all subtasks or by a partitioner, and a savepoint does not tell them apart; give one of the"
                " streams an operator of its own before they are united"
            )
        yield buffer, waiting


def _kind_of(route: Route) -> object:
    """How records go along a route, as far as it matters that they go the same way again."""
    if route.everywhere or isinstance(route.selector, CopyToAll):
        return CopyToAll
    if isinstance(route.selector, ByPartitioner):
        return route.selector.partitioner
    return ByKey if isinstance(route.selector, ByKey) else None


def _write_waiting(
    node: g.IterationNode,
    levels: SparkLevels,
    buffer: InputBuffer,
    messages: list[StoredMessage],
    replayed: bool,
    folder: UPath,
    attempt: str,
) -> Feedback:
    """Writes the records that wait in a buffer: what went to one target, in its order, is in one file."""
    schema = _records(levels.loop, buffer)
    name = next(one.name for one in node.body.nodes if one.uid == buffer.reader)
    kind = f"~{'broadcast' if buffer.broadcast else 'feedback'}{'-replayed' if replayed else ''}"
    table = described(uid_in(node, buffer.reader), name, schema, attempt, kind)
    tasks = min(len({message.target for message in messages}), cores(levels.spark))
    shares: list[list[StoredMessage]] = [[] for _ in range(tasks)]
    for message in messages:
        shares[message.target % tasks].append(message)
    reading = partial(read_output, levels.folder, buffer.schema, schema, tuple(map(msgspec.msgpack.encode, shares)))
    return Feedback(write_records(levels.spark, table, schema, reading, tasks, folder), buffer.broadcast, replayed)


def _records(loop: Loop, buffer: InputBuffer) -> pa.Schema:
    """The columns of the records that come to a buffer: those of an input, and their event time."""
    return record_columns(loop.route_to(buffer.number)[0].schema)


def start_iteration(start: StartingState, node: g.IterationNode, levels: SparkLevels) -> Epoch | None:
    """What a savepoint has of an iteration, as the epoch that it goes on after; None where there is nothing."""
    loop, stored = levels.loop, list[StoredState]()
    for uid, (level, one) in by_uid(node, loop).items():
        pages = start.pages_in_body(uid, one.groups)
        if pages is not None:
            stored += levels.store(level, one.number, pages)
    held = next((one for one in start.manifest.iterations if one.uid == node.uid and not one.bounded), None)
    if held is None and not stored:
        return None
    states, files = rescaled(stored, loop, levels.folder)
    levels.files += files
    waiting = [message for one in (held.feedback if held else ()) for message in _sent_again(start, node, levels, one)]
    return Epoch(
        number=held.round if held is not None else 0,
        feedback=sum(message.rows for message in waiting),
        criteria=0,
        fed_back=waiting,
        outputs=[],
        states=states,
        metrics="{}",
        seconds=0.0,
        micro_batch=BEFORE,
        closes=True,
        parallelism=loop.parallelism,
    )


def start_input(start: StartingState, node: g.IterationNode, levels: SparkLevels) -> Input | None:
    """What a savepoint has of the input of a bounded iteration; None where there is nothing."""
    held = next((one for one in start.manifest.iterations if one.uid == node.uid and one.bounded), None)
    if held is None:
        return None
    came: dict[bool, list[StoredMessage]] = {False: [], True: []}
    for one in held.feedback:
        came[one.replayed] += _sent_again(start, node, levels, one)
    return Input(came[False], came[True])


def _sent_again(start: StartingState, node: g.IterationNode, levels: SparkLevels, one: Feedback) -> list[StoredMessage]:
    loop = levels.loop
    inputs = [own for number, own in enumerate(loop.inputs) if (number in loop.replayed) == one.replayed]
    read = [loop.buffers[route.target] for own in inputs for route in own.routes]
    wanted_by = (one.table.uid, one.broadcast)
    buffer = next((found for found in read if (uid_in(node, found.reader), found.broadcast) == wanted_by), None)
    if buffer is None:
        if start.plan.execution.savepoint.ignore_unclaimed or not one.table.rows:
            return []
        raise StateError(
            f"{loop.where}: the savepoint in {start.folder} has {one.table.rows:,} records that wait for operator"
            f" '{one.table.uid}', and no {'replayed ' * one.replayed}input goes to an operator with that uid; give the"
            " operator its uid again, or drop them with execution.savepoint.ignore-unclaimed-state=true"
        )
    wanted, stored = from_spark(to_spark(_records(loop, buffer))), from_spark(one.table.schema)
    if wanted != stored:
        raise StateError(
            f"{loop.where}: records that wait for operator '{one.table.uid}' have the columns {_shown(stored)} in the"
            f" savepoint, and {_shown(wanted)} now; keep the input's type, or stop the job where nothing waits"
        )
    return levels.send_again(buffer.number, str(start.folder), one.table)


def _shown(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def divided(
    plan: Plan, node: g.IterationNode, levels: SparkLevels, before: Loop, states: list[StoredState]
) -> Mapping[int, list[StoredState]]:
    """The operator state of a loop that had other subtasks `before`, by pass, for those that it has now."""
    passes, former = by_uid(node, levels.loop), by_uid(node, before)
    found: dict[int, list[StoredState]] = {}
    kept = [one for one in stateful_in_body(plan, node, levels.loop.parallelism) if one.subtasks is not None]
    for table in operator_tables(plan, levels.spark, kept, {}):
        level, one = passes[table.operator.uid]
        count = former[table.operator.uid][1].subtasks
        if count != one.subtasks:
            pages = table.divided(levels.pages(level, one.number, states), count, one.subtasks)
            found[one.number] = levels.store(level, one.number, pages)
    return found
