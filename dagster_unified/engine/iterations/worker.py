"""What a Spark worker runs of an iteration: it takes records in, or runs a level of a round.

Only control goes through the JVM: records and state are files. Knows the operators and the files; no session.
"""

from __future__ import annotations

from base64 import b85decode
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec
import pyarrow as pa

from dagster_unified.engine.iterations.files import (
    INPUT,
    MappedFiles,
    PagedStates,
    RoundFile,
    StoredPages,
    StoredParcel,
)
from dagster_unified.engine.iterations.journal import StoredState
from dagster_unified.engine.iterations.places import Place
from dagster_unified.engine.shipping import Payload
from dagster_unified.engine.worker import this_subtask
from dagster_unified.operators.drivers.batch import spare_the_garbage_collector
from dagster_unified.operators.drivers.carried import rows_of
from dagster_unified.operators.functions.base import Subtask
from dagster_unified.operators.rounds.block import Block, take_block
from dagster_unified.operators.rounds.sending import Sending, Sent, in_columns
from dagster_unified.operators.rounds.spec import Level, Loop
from dagster_unified.operators.rounds.task import Turn
from dagster_unified.operators.time import wall_clock
from dagster_unified.state.manifest import OperatorState
from dagster_unified.state.tables import read_batches

REPORT = pa.schema([pa.field("report", pa.string())])

_TOGETHER = 1 << 20
"""Rows that a task takes in before it writes them."""

_READ_LATE = 50
"""Epochs by which a query may be behind the one that hands something on, before it copies that from a bucket again."""


class Report(msgspec.Struct):
    """What a task has done."""

    files: list[str] = []
    sent: list[StoredParcel] = []
    fed_back: list[StoredParcel] = []
    feedback: int = 0
    criteria: int = 0
    epochs: int = 1
    states: list[StoredState] = []
    metrics: str = "{}"


class Share(msgspec.Struct, array_like=True):
    """What a subtask is given in a level of a round."""

    inbox: list[StoredParcel] = []
    replayed: list[StoredParcel] = []
    """What comes in each epoch."""

    state: StoredState | None = None


@dataclass(frozen=True)
class Job:
    """A level of all rounds, as it goes to the workers."""

    payload: Payload
    """The loop."""

    folder: str
    level: int


class Told(msgspec.Struct, frozen=True, array_like=True):
    """What the subtasks of a level are told of a round, or of a block of epochs."""

    epoch: int
    terminated: bool
    shares: list[bytes]
    """Of each subtask, which reads its own alone: all together are long where there are many subtasks."""

    epochs: int = 1


ROUND = "dagster_unified.round"
"""The property of a Spark job that has what its tasks are told, in base 85."""


def take_in(payload: Payload, folder: str, number: int, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Takes the records of an input into the iteration: each goes to where it is read."""
    loop: Loop = payload.load()
    intake, sending = loop.inputs[number], Sending(this_subtask().number)
    sent: list[Sent] = []
    report, rows = Report(), 0
    kind = INPUT if number in loop.replayed else "once-"
    with RoundFile(folder, f"{kind}{number}") as file:
        for batch in batches:
            if batch.num_rows:
                sent += sending.into(intake, batch)
                rows += batch.num_rows
            if rows >= _TOGETHER:
                report.sent += file.send(sent)
                sent, rows = [], 0
        report.sent += file.send(sent)
        if report.sent:
            report.files.append(file.name)
    yield _row(report)


def run_level_as_told(job: Job, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs the level of a round of which a property of the Spark job tells."""
    from pyspark import TaskContext

    context = TaskContext.get()
    said = context.getLocalProperty(ROUND) if context is not None else None
    assert said is not None
    yield from run_level(job, msgspec.msgpack.decode(b85decode(said), type=Told), batches)


def run_level(job: Job, told: Told, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs a level of a round in the subtask that this task is."""
    for _ in batches:
        pass
    spare_the_garbage_collector()
    loop: Loop = job.payload.load()
    level, afresh = loop.levels[job.level], lambda: job.payload.load().levels[job.level]
    yield _row(turn_of(job, told, loop, level, this_subtask(), afresh))


def turn_of(job: Job, told: Told, loop: Loop, level: Level, subtask: Subtask, afresh: Callable[[], Level]) -> Report:
    """Runs a level of a round in one subtask, with functions that have not run yet; `afresh` gives such for more."""
    share = msgspec.msgpack.decode(told.shares[subtask.number], type=Share)
    schemas = {slot.number: slot.schema for one in level.passes for slot in (one.own, one.broadcast) if slot}
    held = share.state
    files = MappedFiles(job.folder, told.epoch)
    files.place.drop_copies(told.epoch)
    states = PagedStates(files, held.index if held is not None else None)
    inbox = files.by_slot([*share.replayed, *share.inbox], schemas)
    later = files.by_slot(share.replayed, schemas) if told.epochs > 1 else {}
    block = Block(told.epochs, later, loop.has_criteria)
    out = take_block(Turn(level, subtask, told.epoch, told.terminated, inbox, states, wall_clock), block, afresh)
    report = Report(feedback=out.feedback, criteria=out.criteria, epochs=out.epochs, metrics=out.metrics.encode())
    leaving = {slot.number for slot in loop.outputs}
    with RoundFile(job.folder, f"epoch-{told.epoch}-{job.level}-{subtask.number}", told.epoch) as file:
        report.sent = file.send(sent for sent in out.sent if sent.slot not in leaving)
        report.fed_back = file.send(out.fed_back)
        if states.changed:
            index, held_in = states.save(file)
            report.states.append(StoredState(job.level, subtask.number, index, held_in))
        elif held is not None:
            report.states.append(held)
    name = f"output-{told.epoch}-{job.level}-{subtask.number}"  # which stays
    with RoundFile(job.folder, name, told.epoch) as output:
        report.sent += output.send(sent for sent in out.sent if sent.slot in leaving)
    report.files = [written.name for written in (file, output) if written.size]
    return report


def read_output(
    folder: str, held: pa.Schema, wanted: pa.Schema, emitted: Sequence[bytes], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """The records that some subtasks `emitted`, which rows name; they are held in other columns than are wanted."""
    files = MappedFiles(folder)
    names = tuple(name if name in held.names else None for name in wanted.names)
    for batch in batches:
        for subtask in batch.column("id").to_pylist():
            for parcel in msgspec.msgpack.decode(emitted[subtask], type=list[StoredParcel]):
                yield in_columns(files.batch_of(parcel, held), names, wanted)


def read_pages(
    folder: str, one: int, states: Sequence[bytes], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """The pages of a pass in some `states`, which rows name, in the columns of `CARRIED_LAYOUT`."""
    files = MappedFiles(folder)
    for batch in batches:
        for number in batch.column("id").to_pylist():
            state = msgspec.msgpack.decode(states[number], type=StoredState)
            for group, store in PagedStates(files, state.index).stores(one):
                yield from rows_of(group, store)


def store_pages(folder: str, level: int, one: int, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Stores such pages as the state of a pass, of whichever subtasks it is."""
    report, stored = Report(), StoredPages()
    with RoundFile(folder, f"restored-{level}") as file:
        for batch in batches:
            groups, pages = batch.column("group").to_pylist(), batch.column("page").to_pylist()
            for group, page, data in zip(groups, pages, batch.column("state"), strict=True):
                stored.append((one, group, page, file.put(data.as_buffer())))
        if stored:
            index = file.put(msgspec.msgpack.encode(stored))
            report = Report(files=[file.name], states=[StoredState(level, 0, index, [file.name])])
    yield _row(report)


def send_again(
    payload: Payload, folder: str, slot: int, savepoint: str, table: OperatorState, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Sends the records of a savepoint's table to a slot, those of the files whose numbers are in the column `id`."""
    loop: Loop = payload.load()
    intake, way = loop.way_to(slot)
    for number in chain.from_iterable(batch.column("id").to_pylist() for batch in batches):
        sending, report = Sending(number), Report()
        own = msgspec.structs.replace(table, files=[table.files[number]])
        with RoundFile(folder, f"restored-feedback-{number}") as file:
            for rows in read_batches(savepoint, own):
                report.sent += file.send(sending.again(intake, way, rows))
        report.files += [file.name] if file.size else []
        yield _row(report)


def hand_on(folder: str, schema: pa.Schema, epoch: int, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Writes the records that a stream has in an epoch, in their order, for another query to read."""
    names = tuple(schema.names)
    own, report = this_subtask().number, Report()
    sent: list[Sent] = []
    rows = 0
    Place(folder).drop_copies(epoch - _READ_LATE)
    with RoundFile(folder, f"handed-{epoch}", epoch) as file:
        for batch in batches:
            sent.append(Sent(0, own, in_columns(batch, names, schema)))
            rows += batch.num_rows
            if rows >= _TOGETHER:
                report.sent += file.send(sent)
                sent, rows = [], 0
        report.sent += file.send(sent)
    yield _row(report)


def hand_on_again(
    folder: str, schema: pa.Schema, savepoint: str, table: OperatorState, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Writes the records of a savepoint's table for another query to read."""
    for _ in batches:
        pass
    report = Report()
    with RoundFile(folder, "handed-before") as file:
        for rows in read_batches(savepoint, table):
            report.sent += file.send([Sent(0, 0, in_columns(rows, tuple(schema.names), schema))])
    yield _row(report)


def decode_report(text: str) -> Report:
    """The inverse of how a task reports."""
    return msgspec.json.decode(text, type=Report)


def _row(report: Report) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([msgspec.json.encode(report).decode()])], schema=REPORT)
