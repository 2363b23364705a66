"""The state of an iteration: as tables of a savepoint, as a stream of a BATCH stage, and for other subtasks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import pyarrow as pa

from dagster_unified.engine.iterations.epoch_log import BEFORE, Epoch, EpochLog, Input, StoredState
from dagster_unified.engine.iterations.files import Block, EpochFile, MappedFiles, StoredMessage, StoredPages
from dagster_unified.engine.iterations.levels import SparkLevels
from dagster_unified.engine.iterations.worker import read_output
from dagster_unified.engine.session import cores
from dagster_unified.engine.state_tables.savepoints import (
    StartingState,
    described,
    operator_tables,
    record_columns,
    stateful_in_body,
    uid_in,
    write_records,
    write_table,
)
from dagster_unified.errors import StateError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.loops import compile_loop
from dagster_unified.graph.plan import Plan
from dagster_unified.operators.iteration import BodyPass, Driver, InputBuffer, Loop
from dagster_unified.operators.routing import ByKey, ByPartitioner, CopyToAll, Route
from dagster_unified.state.manifest import Feedback, IterationState, OperatorState, from_spark, to_spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from upath import UPath

Page = tuple[int, int, int, Block]
"""A pass, a key group, a page, and where that is."""


def rescaled(
    states: Iterable[StoredState], loop: Loop, folder: str, divided: Mapping[int, list[StoredState]] | None = None
) -> tuple[list[StoredState], list[str]]:
    """Return an epoch's state for the subtasks of `loop`, and the files that were written.

    Operator state belongs to subtasks: `divided` has it, by pass, for the present number of them.
    """
    divided = divided or {}
    files = MappedFiles(folder)
    by_subtask: dict[tuple[int, int], list[Page]] = {}
    pages = {level: _pages(files, [s for s in states if s.level == level]) for level in range(len(loop.levels))}
    for number, level in enumerate(loop.levels):
        for body_pass in level.passes:
            stored_pages = _pages(files, divided[body_pass.number]) if body_pass.number in divided else pages[number]
            pages_of_pass = [page for page in stored_pages if page[0] == body_pass.number]
            if body_pass.groups == body_pass.subtasks:
                pages_of_pass = _in_all(body_pass, pages_of_pass)
            for page in pages_of_pass:
                by_subtask.setdefault((number, page[1] % body_pass.subtasks), []).append(page)
    rescaled_states: list[StoredState] = []
    with EpochFile(folder, "rescaled") as file:
        for (level_number, subtask), pages_of_subtask in by_subtask.items():
            needed = sorted({block.file for *_, block in pages_of_subtask})
            index = file.put(msgspec.msgpack.encode(pages_of_subtask))
            rescaled_states.append(StoredState(level_number, subtask, index, needed))
    return rescaled_states, [file.name] if file.size else []


def _pages(files: MappedFiles, states: Iterable[StoredState]) -> list[Page]:
    pages: list[Page] = []
    for state in states:
        pages += msgspec.msgpack.decode(files.bytes_of(state.index).to_pybytes(), type=StoredPages)
    return pages


def _in_all(body_pass: BodyPass, pages: list[Page]) -> list[Page]:
    """Return the pages of an operator with one group per subtask; broadcast state is copied to all of them."""
    before = {group for _, group, *_ in pages}
    if not pages or before == set(range(body_pass.subtasks)):
        return pages
    first = [page for page in pages if page[1] == min(before)]
    return [(number, group, page, block) for group in range(body_pass.subtasks) for number, _, page, block in first]


class Written(NamedTuple):
    """The part of a savepoint that is an iteration's."""

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
    if not node.is_unbounded:
        return _write_input(plan, node, spark, log, epoch, folder, attempt) if last is None else None
    if last is None:
        return None
    ended = log.left()
    levels = SparkLevels(spark, compile_loop(plan, node, ended.parallelism, log.begun.groups), iteration)
    passes = by_uid(node, levels.loop)
    operators = []
    for table in operator_tables(plan, spark, stateful_in_body(plan, node, ended.parallelism), {}):
        level, body_pass = passes[table.operator.uid]
        pages = levels.pages(level, body_pass.number, ended.states)
        operators.append(write_table(table, partial(table.files, pages), folder, attempt))
    feedback = [
        _write_waiting(node, levels, buffer, messages, False, folder, attempt)
        for buffer, messages in _by_buffer(levels.loop, last.fed_back)
    ]
    return Written(operators, IterationState(node.uid, node.name, last.number, feedback))


def _write_input(
    plan: Plan, node: g.IterationNode, spark: SparkSession, log: EpochLog, epoch: int, folder: UPath, attempt: str
) -> Written | None:
    """Write the input of a bounded iteration up to an epoch of the query."""
    assert log.begun is not None
    levels = SparkLevels(spark, compile_loop(plan, node, log.begun.parallelism, log.begun.groups), log.folder)
    taken = [input_ for micro_batch, input_ in log.inputs.items() if micro_batch <= epoch]
    arrived = {
        False: [p for input_ in taken for p in input_.once],
        True: [p for input_ in taken for p in input_.replayed],
    }
    waiting = [
        _write_waiting(node, levels, buffer, messages, replayed, folder, attempt)
        for replayed, messages_of_kind in arrived.items()
        for buffer, messages in _by_buffer(levels.loop, messages_of_kind)
    ]
    return Written([], IterationState(node.uid, node.name, BEFORE, waiting, bounded=True)) if waiting else None


def by_uid(node: g.IterationNode, loop: Loop) -> dict[str, tuple[int, BodyPass]]:
    """Return the passes with state and their levels, by the uid that a savepoint has for their operators."""
    return {
        uid_in(node, body_pass.program.steps[0].uid): (number, body_pass)
        for number, level in enumerate(loop.levels)
        for body_pass in level.passes
        if body_pass.driver is Driver.GROUPED
    }


def _by_buffer(loop: Loop, messages: Iterable[StoredMessage]) -> Iterator[tuple[InputBuffer, list[StoredMessage]]]:
    by_buffer: dict[int, list[StoredMessage]] = {}
    for message in messages:
        by_buffer.setdefault(message.buffer, []).append(message)
    for number, waiting in by_buffer.items():
        buffer = loop.buffers[number]
        routes = [route for input_route in loop.inputs for route in input_route.routes if route.target == number]
        if len({_kind_of(route) for route in routes}) > 1:
            raise StateError(
                f"{loop.where}: records wait for operator '{buffer.reader}' that come to it in several ways, some to"
                " all subtasks or by a partitioner, and a savepoint does not tell them apart; give one of the"
                " streams an operator of its own before they are united"
            )
        yield buffer, waiting


def _kind_of(route: Route) -> object:
    """Return how records travel along a route, as far as a savepoint has to send them the same way again."""
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
    """Write the records that wait in a buffer; those for one target are in one file, in their order."""
    schema = _records(levels.loop, buffer)
    name = next(operator.name for operator in node.body.nodes if operator.uid == buffer.reader)
    kind = f"~{'broadcast' if buffer.broadcast else 'feedback'}{'-replayed' if replayed else ''}"
    table = described(uid_in(node, buffer.reader), name, schema, attempt, kind)
    tasks = min(len({message.target for message in messages}), cores(levels.spark))
    shares: list[list[StoredMessage]] = [[] for _ in range(tasks)]
    for message in messages:
        shares[message.target % tasks].append(message)
    reading = partial(read_output, levels.folder, buffer.schema, schema, tuple(map(msgspec.msgpack.encode, shares)))
    return Feedback(write_records(levels.spark, table, schema, reading, tasks, folder), buffer.broadcast, replayed)


def _records(loop: Loop, buffer: InputBuffer) -> pa.Schema:
    return record_columns(loop.route_to(buffer.number)[0].schema)


def start_iteration(start: StartingState, node: g.IterationNode, levels: SparkLevels) -> Epoch | None:
    """Return an iteration's part of a savepoint as the epoch that it goes on after; None where there is nothing."""
    loop, stored = levels.loop, list[StoredState]()
    for uid, (level, body_pass) in by_uid(node, loop).items():
        pages = start.pages_in_body(uid, body_pass.groups)
        if pages is not None:
            stored += levels.store(level, body_pass.number, pages)
    stored_iteration = _stored_iteration(start, node, bounded=False)
    if stored_iteration is None and not stored:
        return None
    states, files = rescaled(stored, loop, levels.folder)
    levels.files += files
    waiting: list[StoredMessage] = []
    for feedback in stored_iteration.feedback if stored_iteration is not None else ():
        waiting += _sent_again(start, node, levels, feedback)
    number = stored_iteration.round if stored_iteration is not None else 0
    return Epoch.before(number, states, loop.parallelism, waiting)


def _stored_iteration(start: StartingState, node: g.IterationNode, bounded: bool) -> IterationState | None:
    iterations = start.manifest.iterations
    return next((stored for stored in iterations if (stored.uid, stored.bounded) == (node.uid, bounded)), None)


def start_input(start: StartingState, node: g.IterationNode, levels: SparkLevels) -> Input | None:
    """Return a savepoint's input of a bounded iteration; None where there is nothing."""
    stored = _stored_iteration(start, node, bounded=True)
    if stored is None:
        return None
    arrived: dict[bool, list[StoredMessage]] = {False: [], True: []}
    for feedback in stored.feedback:
        arrived[feedback.replayed] += _sent_again(start, node, levels, feedback)
    return Input(arrived[False], arrived[True])


def _sent_again(
    start: StartingState, node: g.IterationNode, levels: SparkLevels, feedback: Feedback
) -> list[StoredMessage]:
    loop = levels.loop
    inputs = [route_in for number, route_in in enumerate(loop.inputs) if (number in loop.replayed) == feedback.replayed]
    read = [loop.buffers[route.target] for input_route in inputs for route in input_route.routes]
    wanted_by = (feedback.table.uid, feedback.broadcast)
    buffer = next((b for b in read if (uid_in(node, b.reader), b.broadcast) == wanted_by), None)
    if buffer is None:
        if start.plan.execution.savepoint.ignore_unclaimed or not feedback.table.rows:
            return []
        raise StateError(
            f"{loop.where}: the savepoint in {start.folder} has {feedback.table.rows:,} records that wait for operator"
            f" '{feedback.table.uid}', and no {'replayed ' * feedback.replayed}input goes to an operator with that uid;"
            " give the operator its uid again, or drop them with execution.savepoint.ignore-unclaimed-state=true"
        )
    wanted, stored = from_spark(to_spark(_records(loop, buffer))), from_spark(feedback.table.schema)
    if wanted != stored:
        raise StateError(
            f"{loop.where}: records that wait for operator '{feedback.table.uid}' have the columns {_shown(stored)} in"
            f" the savepoint, and {_shown(wanted)} now; keep the input's type, or stop the job where nothing waits"
        )
    return levels.send_again(buffer.number, str(start.folder), feedback.table)


def _shown(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def divided(
    plan: Plan, node: g.IterationNode, levels: SparkLevels, before: Loop, states: list[StoredState]
) -> Mapping[int, list[StoredState]]:
    """Return the operator state of a loop that had other subtasks `before`, by pass, for its present subtasks."""
    passes, former = by_uid(node, levels.loop), by_uid(node, before)
    states_of_pass: dict[int, list[StoredState]] = {}
    operators = stateful_in_body(plan, node, levels.loop.parallelism)
    with_operator_state = [operator for operator in operators if operator.subtasks is not None]
    for table in operator_tables(plan, levels.spark, with_operator_state, {}):
        level, body_pass = passes[table.operator.uid]
        count = former[table.operator.uid][1].subtasks
        if count != body_pass.subtasks:
            pages = table.divided(levels.pages(level, body_pass.number, states), count, body_pass.subtasks)
            states_of_pass[body_pass.number] = levels.store(level, body_pass.number, pages)
    return states_of_pass


class _Share(NamedTuple):
    """One operator's part of the stream."""

    level: int
    body_pass: BodyPass
    first: int
    """The number of its first group in the stream."""

    def taken_from(self, pages: DataFrame) -> DataFrame:
        """Take its pages out of the stream, numbered by its own groups."""
        from pyspark.sql import functions as F

        own_group = F.col("group") - self.first
        return pages.where(own_group.between(0, self.body_pass.groups - 1)).withColumn("group", own_group.cast("int"))

    def as_part(self, pages: DataFrame) -> DataFrame:
        """Number its pages by the groups of the stream: the inverse of `taken_from`."""
        from pyspark.sql import functions as F

        return pages.withColumn("group", (F.col("group") + self.first).cast("int"))


def _shares(plan: Plan, node: g.IterationNode, loop: Loop) -> Iterator[tuple[str, _Share]]:
    """Yield the operators with state, by the uid that a savepoint has for them."""
    passes, first = by_uid(node, loop), 0
    for operator in stateful_in_body(plan, node, loop.parallelism):
        level, body_pass = passes[operator.uid]
        yield operator.uid, _Share(level, body_pass, first)
        first += body_pass.groups


def left_by(plan: Plan, node: g.IterationNode, levels: SparkLevels) -> DataFrame:
    """Return the stream of the state that an iteration's last epoch left."""
    pages: DataFrame | None = None
    for _, share in _shares(plan, node, levels.loop):
        part = share.as_part(levels.pages(share.level, share.body_pass.number, levels.states))
        pages = part if pages is None else pages.unionByName(part)
    assert pages is not None
    return pages


def epoch_before(plan: Plan, node: g.IterationNode, levels: SparkLevels, pages: DataFrame, number: int) -> Epoch:
    """Return another run's epoch `number`, after which an iteration goes on with the state that it left."""
    stored: list[StoredState] = []
    for _, share in _shares(plan, node, levels.loop):
        stored += levels.store(share.level, share.body_pass.number, share.taken_from(pages))
    states, files = rescaled(stored, levels.loop, levels.folder)
    levels.files += files
    return Epoch.before(number, states, levels.loop.parallelism, [])


def write_left(
    plan: Plan,
    node: g.IterationNode,
    spark: SparkSession,
    pages: DataFrame,
    parallelism: int,
    folder: UPath,
    attempt: str,
) -> list[OperatorState]:
    """Write into a savepoint the state that an iteration of so many subtasks left."""
    shares = dict(_shares(plan, node, compile_loop(plan, node, parallelism)))
    return [
        write_table(table, partial(table.files, shares[table.operator.uid].taken_from(pages)), folder, attempt)
        for table in operator_tables(plan, spark, stateful_in_body(plan, node, parallelism), {})
    ]
