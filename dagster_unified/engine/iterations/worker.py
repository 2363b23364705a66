"""What a Spark worker runs of an iteration: it takes records in, or runs a level of an epoch.

Only control goes through the JVM: records and state are files. Knows the operators and the files; no session.
"""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from multiprocessing.connection import Connection

import msgspec
import pyarrow as pa

from dagster_unified.engine.iterations.epoch_log import StoredState
from dagster_unified.engine.iterations.files import (
    INPUT,
    EpochFile,
    IterationFolder,
    MappedFiles,
    PagedStates,
    StoredMessage,
    StoredPages,
)
from dagster_unified.engine.shipping import Payload
from dagster_unified.engine.worker import this_subtask
from dagster_unified.operators.drivers.batch import rows_of, spare_the_garbage_collector
from dagster_unified.operators.functions.base import Subtask
from dagster_unified.operators.iteration import Loop, Message, SubtaskEpoch, again, into, run_subtask
from dagster_unified.operators.routing import Sender, in_columns
from dagster_unified.operators.time import wall_clock
from dagster_unified.spark_internals.placing import EXECUTOR
from dagster_unified.state.manifest import OperatorState
from dagster_unified.state.tables import read_batches

Answer = Callable[[bytes, int], bytes]
"""Carries out an order in a task, of which it is told the attempt."""

REPORT = pa.schema([pa.field("report", pa.string())])
ANSWER = pa.schema([pa.field("answer", pa.binary()), pa.field(EXECUTOR, pa.string())])

_COLLECT_EVERY = 32
"""Orders of a task after which Python collects garbage, which is spared for records, while the driver commits."""

_TOGETHER = 1 << 20
"""Rows that a task takes in before it writes them."""

_READ_LATE = 50
"""Epochs by which a query may be behind the one that hands something on, before it copies that from a bucket again."""


class Report(msgspec.Struct):
    """A task's report of its work."""

    files: list[str] = []
    sent: list[StoredMessage] = []
    fed_back: list[StoredMessage] = []
    late: list[StoredMessage] = []
    feedback: int = 0
    criteria: int = 0
    states: list[StoredState] = []
    metrics: str = "{}"


class Order(msgspec.Struct, array_like=True):
    """A level of an epoch for one subtask, with its input and where its state is."""

    level: int
    subtask: int
    epoch: int
    terminated: bool
    state: StoredState | None
    inbox: list[StoredMessage]


def take_in(payload: Payload, folder: str, number: int, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Take the records of an input into the iteration: each goes to where it is read."""
    loop: Loop = payload.load()
    input_route, sender = loop.inputs[number], Sender(this_subtask().number)
    kind = INPUT if number in loop.replayed else "once-"
    with EpochFile(folder, f"{kind}{number}") as file:
        sent = _send_all(file, batches, lambda batch: into(input_route, batch, sender))
    yield _row(Report(sent=sent, files=[file.name] if sent else []))


def _send_all(
    file: EpochFile, batches: Iterable[pa.RecordBatch], messages_of: Callable[[pa.RecordBatch], Iterable[Message]]
) -> list[StoredMessage]:
    """Write the messages made of some batches, many rows together."""
    stored: list[StoredMessage] = []
    messages: list[Message] = []
    rows = 0
    for batch in batches:
        messages += messages_of(batch) if batch.num_rows else ()
        rows += batch.num_rows
        if rows >= _TOGETHER:
            stored += file.send(messages)
            messages, rows = [], 0
    return stored + file.send(messages)


def run_subtasks(
    answer: Answer, orders: Sequence[bytes], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Carry out the order of the subtask that this task is."""
    places = [place for batch in batches for place in batch.column(EXECUTOR).to_pylist()]
    spare_the_garbage_collector()
    number, attempt = this_subtask()
    answers = pa.array([answer(orders[number], attempt)], pa.binary())
    yield pa.RecordBatch.from_arrays([answers, pa.array(places)], schema=ANSWER)


def stay(address: str, answer: Answer, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Carry out orders that come through a socket, until the driver has no more."""
    for _ in batches:
        pass
    spare_the_garbage_collector()
    attempt = this_subtask().attempt
    connected = socket.socket(socket.AF_UNIX)
    connected.settimeout(None)  # whatever a function has made the default of this process
    try:
        connected.connect(address)
    except (FileNotFoundError, ConnectionRefusedError):  # the driver has ended without this task
        return
    with Connection(connected.detach()) as driver:
        carried_out = 0
        while (order := _next(driver)) is not None:
            driver.send_bytes(answer(order, attempt))
            carried_out += 1
            if carried_out % _COLLECT_EVERY == 0:
                gc.collect()
    yield from ()


def _next(driver: Connection) -> bytes | None:
    try:
        return driver.recv_bytes()
    except (EOFError, ConnectionResetError):
        return None


def carry_out(payload: Payload, folder: str, encoded_order: bytes, attempt: int) -> bytes:
    """Carry out an order for a loop; return the report as `decode_answer` reads it."""
    loop: Loop = payload.load()
    order = msgspec.msgpack.decode(encoded_order, type=Order)
    level, subtask, stored = loop.levels[order.level], Subtask(order.subtask, attempt), order.state
    files = MappedFiles(folder, order.epoch)
    files.folder.drop_copies(order.epoch - 2 * loop.staleness)  # records come so late, to one that may be so far behind
    states = PagedStates(files, stored.index if stored is not None else None)
    inbox = files.by_buffer(order.inbox, loop.buffers)
    is_stale = loop.staleness > 0
    work = SubtaskEpoch(level, subtask, order.epoch, order.terminated, inbox, states, wall_clock, is_stale)
    out = run_subtask(work)
    report = Report(feedback=out.feedback, criteria=out.criteria, metrics=out.metrics.encode())
    leaving = {buffer.number for buffer in loop.outputs}
    name = f"{order.epoch}-{order.level}-{subtask.number}"
    with EpochFile(folder, f"epoch-{name}", order.epoch) as file:
        report.sent = file.send(sent for sent in out.sent if sent.buffer not in leaving)
        report.fed_back, report.late = file.send(out.fed_back), file.send(out.late)
    if states.changed:
        with EpochFile(folder, f"state-{name}", order.epoch) as state_file:  # which no other subtask copies
            index, files_of_state = states.save(state_file)
        report.states.append(StoredState(order.level, subtask.number, index, files_of_state))
        report.files.append(state_file.name)
    elif stored is not None:
        report.states.append(stored)
    with EpochFile(folder, f"output-{name}", order.epoch) as output:  # which stays
        report.sent += output.send(sent for sent in out.sent if sent.buffer in leaving)
    report.files += [written.name for written in (file, output) if written.size]
    return msgspec.msgpack.encode(report)


def read_output(
    folder: str,
    emitted_columns: pa.Schema,
    wanted: pa.Schema,
    emitted: Sequence[bytes],
    batches: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Yield the records that some subtasks `emitted`, which rows name, in the `wanted` columns."""
    files = MappedFiles(folder)
    names = tuple(name if name in emitted_columns.names else None for name in wanted.names)
    for batch in batches:
        for subtask in batch.column("id").to_pylist():
            for message in msgspec.msgpack.decode(emitted[subtask], type=list[StoredMessage]):
                yield in_columns(files.batch_of(message, emitted_columns), names, wanted)


def read_pages(
    folder: str, pass_number: int, states: Sequence[bytes], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Yield the pages of a pass in some `states`, which rows name, in the columns of `CARRIED_LAYOUT`."""
    files = MappedFiles(folder)
    for batch in batches:
        for number in batch.column("id").to_pylist():
            state = msgspec.msgpack.decode(states[number], type=StoredState)
            for group, store in PagedStates(files, state.index).stores(pass_number):
                yield from rows_of(group, store)


def store_pages(
    folder: str, level: int, pass_number: int, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Store such pages as the state of a pass, of whichever subtasks it is."""
    report, stored = Report(), StoredPages()
    with EpochFile(folder, f"restored-{level}") as file:
        for batch in batches:
            groups, pages = batch.column("group").to_pylist(), batch.column("page").to_pylist()
            for group, page, data in zip(groups, pages, batch.column("state"), strict=True):
                stored.append((pass_number, group, page, file.put(data.as_buffer())))
        if stored:
            index = file.put(msgspec.msgpack.encode(stored))
            report = Report(files=[file.name], states=[StoredState(level, 0, index, [file.name])])
    yield _row(report)


def send_again(
    payload: Payload, folder: str, buffer: int, savepoint: str, table: OperatorState, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Send the records of a savepoint's table to a buffer, those of the files whose numbers are in the column `id`."""
    loop: Loop = payload.load()
    input_route, route = loop.route_to(buffer)
    for number in chain.from_iterable(batch.column("id").to_pylist() for batch in batches):
        sender, report = Sender(number), Report()
        table_of_file = msgspec.structs.replace(table, files=[table.files[number]])
        with EpochFile(folder, f"restored-feedback-{number}") as file:
            for rows in read_batches(savepoint, table_of_file):
                report.sent += file.send(again(input_route, route, rows, sender))
        report.files += [file.name] if file.size else []
        yield _row(report)


def write_output(
    folder: str, schema: pa.Schema, epoch: int, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Write the records of a stream in an epoch, in their order, for another query to read."""
    names, subtask = tuple(schema.names), this_subtask().number
    IterationFolder(folder).drop_copies(epoch - _READ_LATE)
    with EpochFile(folder, f"handed-{epoch}", epoch) as file:
        sent = _send_all(file, batches, lambda batch: [Message(0, subtask, in_columns(batch, names, schema))])
    yield _row(Report(sent=sent))


def write_output_again(
    folder: str, schema: pa.Schema, savepoint: str, table: OperatorState, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Write the records of a savepoint's table for another query to read."""
    for _ in batches:
        pass
    report = Report()
    with EpochFile(folder, "handed-before") as file:
        for rows in read_batches(savepoint, table):
            report.sent += file.send([Message(0, 0, in_columns(rows, tuple(schema.names), schema))])
    yield _row(report)


def decode_report(text: str) -> Report:
    """Decode a task's report."""
    return msgspec.json.decode(text, type=Report)


def decode_answer(answer: bytes) -> Report:
    """Decode the answer to an order."""
    return msgspec.msgpack.decode(answer, type=Report)


def _row(report: Report) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([msgspec.json.encode(report).decode()])], schema=REPORT)
