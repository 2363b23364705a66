"""The log of an iteration: what came in, what each epoch left, and which files are still needed.

    <folder>/begun.json               the iteration as it was begun
    <folder>/input-0000000007.json    what a micro-batch brought
    <folder>/epoch-0000000012.json    an epoch: what it fed back and emitted, where its state is, in which micro-batch
    <folder>/ended.json               the state that is left, once an unbounded iteration has ended
    <folder>/<name>-<token>           a file of a task

The feedback edge is this log: what the last epoch fed back is what the next one begins with (Flink paper, 4.4). BATCH
has one micro-batch. A manifest is written last and at once. Epochs of the newest micro-batch stay, and the one before
them; a file is deleted once neither of the newest two epochs needs it and no epoch that stays has emitted it. Knows no
Spark.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from itertools import chain
from typing import Generic, TypeVar

import msgspec

from dagster_unified.engine.iterations.files import Block, IterationFolder, StoredMessage, stands
from dagster_unified.engine.iterations.loop import EndedEpoch
from dagster_unified.errors import StateError
from dagster_unified.operators.iteration import Loop
from dagster_unified.operators.metrics import GaugeRange, merge

FORMAT = 3
"""Of the log's files."""

BEFORE = -1
"""The micro-batch that stands for what a savepoint or another run has left."""

_BEGUN, _ENDED = "begun.json", "ended.json"

M = TypeVar("M", bound=msgspec.Struct)


class StoredState(msgspec.Struct, frozen=True, array_like=True):
    """The place of a subtask's state in a level, and the files that hold it."""

    level: int
    subtask: int
    index: Block
    files: list[str]


class Epoch(EndedEpoch[StoredMessage], frozen=True, kw_only=True):
    """A committed epoch."""

    states: list[StoredState]
    seconds: float
    parallelism: int = 0
    """How many subtasks it had."""

    @staticmethod
    def of(ended: EndedEpoch[StoredMessage], states: list[StoredState], seconds: float, parallelism: int) -> Epoch:
        """Return an ended epoch with the state that it left."""
        fields = msgspec.structs.asdict(ended)
        return Epoch(**fields, states=states, seconds=seconds, parallelism=parallelism)

    @staticmethod
    def before(number: int, states: list[StoredState], parallelism: int, fed_back: list[StoredMessage]) -> Epoch:
        """Return what a savepoint or another run has left, as the epoch that an iteration goes on after."""
        return Epoch(
            number=number,
            feedback=sum(message.rows for message in fed_back),
            criteria=0,
            fed_back=fed_back,
            outputs=[],
            states=states,
            seconds=0.0,
            micro_batch=BEFORE,
            closes=True,
            parallelism=parallelism,
        )

    @property
    def gauges(self) -> dict[str, GaugeRange]:
        """The values of its functions' gauges at its end."""
        return merge([self.metrics]).gauges

    def needs(self) -> list[Block]:
        """Return the blocks that the next epochs read."""
        pages = [Block(file, 0, 1) for state in self.states for file in state.files]
        coming = chain(self.fed_back, *self.later)
        return [state.index for state in self.states] + pages + [message.block for message in coming]

    def files(self) -> set[str]:
        """Return the files that the next epochs read."""
        return {block.file for block in self.needs()}

    def gives(self) -> list[Block]:
        """Return the blocks that left the iteration."""
        return [message.block for message in self.outputs]


class Input(msgspec.Struct, frozen=True):
    """The records that a micro-batch brought: those that come once, and those that come in every epoch."""

    once: list[StoredMessage]
    replayed: list[StoredMessage]
    metrics: str = "{}"
    """The metrics of the operators before."""

    def files(self) -> set[str]:
        """Return the files that they are in."""
        return {message.block.file for message in (*self.once, *self.replayed)}


class Begun(msgspec.Struct, frozen=True):
    """What must not change while an iteration has state: `slots` are the buffers of its records, with their columns."""

    parallelism: int
    bounded: bool
    operators: list[list[str]]
    slots: list[str]
    groups: list[int] = []
    """The key groups of each pass; 0 for one whose state is that of its subtasks, or has none."""

    subtasks: list[int] = []
    """The subtasks of each pass: as many as the iteration has, or its own number."""

    format: int = 1

    @staticmethod
    def of(loop: Loop, bounded: bool) -> Begun:
        """Return what must not change of an iteration that runs this loop."""
        passes = sorted(
            (body_pass for level in loop.levels for body_pass in level.passes), key=lambda body_pass: body_pass.number
        )
        buffers = {
            buffer.number: buffer
            for body_pass in passes
            for buffer in (body_pass.main, body_pass.broadcast)
            if buffer is not None
        }
        buffers |= {buffer.number: buffer for buffer in loop.outputs}
        return Begun(
            loop.parallelism,
            bounded,
            [[step.uid for step in body_pass.program.steps] for body_pass in passes],
            [f"{number} {buffer.schema}" for number, buffer in sorted(buffers.items())],
            [0 if body_pass.groups == body_pass.subtasks else body_pass.groups for body_pass in passes],
            [body_pass.subtasks for body_pass in passes],
            FORMAT,
        )

    def differs(self, other: Begun) -> str:
        """Describe the differences from a loop that is started now; empty where there are none.

        The number of subtasks may change: key groups go from one to another.
        """
        if self.bounded != other.bounded:
            return f"it was {_kind(self)}, and is {_kind(other)} now"
        if self.operators != other.operators:
            return "the operators of its body are others than those whose state it has"
        if self.slots != other.slots:
            return "the records that go round are of other types than those that it has"
        split = [
            n for n, subtasks in zip(self.groups, other.subtasks, strict=True) if n and subtasks == other.parallelism
        ]
        most = min(split, default=other.parallelism + 1) - 1
        if self.parallelism != other.parallelism and other.parallelism > most:
            return (
                f"it has state of {self.parallelism} subtasks, of which there can be up to {most}, and is started with"
                f" {other.parallelism}"
            )
        return ""


class Ended(msgspec.Struct, frozen=True):
    """The state of an iteration that has ended, and how many subtasks it had."""

    states: list[StoredState]
    parallelism: int


class Manifests(Generic[M]):
    """Numbered manifests of one kind in a folder."""

    def __init__(self, folder: IterationFolder, kind: str, manifest: type[M]) -> None:
        self._folder, self._kind, self._type = folder, kind, manifest
        self._name = re.compile(rf"{kind}-(-?\d+)\.json")

    def numbers(self, names: Iterable[str]) -> list[int]:
        """Return the numbers of those among some files, in their order."""
        return sorted(int(match[1]) for match in map(self._name.fullmatch, names) if match)

    def name(self, number: int) -> str:
        """Return the name of a manifest."""
        return f"{self._kind}-{number:010d}.json"

    def read(self, number: int) -> M | None:
        """Read a manifest; None where there is none, or none that can be read."""
        return self._folder.read(self.name(number), self._type)

    def write(self, number: int, manifest: M) -> None:
        """Write a manifest, also where there is one."""
        self._folder.write(self.name(number), manifest)

    def create(self, number: int, manifest: M) -> None:
        """Write a manifest; raises `LeaseLostError` where another process has, in a bucket."""
        self._folder.create(self.name(number), manifest, number)

    def remove(self, number: int) -> None:
        """Delete a manifest, if it is there."""
        self._folder.remove(self.name(number))


class EpochLog:
    """The log of one iteration."""

    def __init__(self, folder: str, where: str, can_run_again: bool = False) -> None:
        """`can_run_again` says that input can be taken in once more, so that nothing that is damaged is an error.

        Of a bounded iteration epochs can always run again. Raises `StateError` where what is needed is gone.
        """
        self.folder, self._where = folder, where
        self._folder = IterationFolder(folder)
        if self._folder.is_shared:
            os.makedirs(folder, exist_ok=True)
        sizes = self._folder.sizes()
        self._epochs = Manifests(self._folder, "epoch", Epoch)
        self._input_manifests = Manifests(self._folder, "input", Input)
        self.begun = self._folder.read(_BEGUN, Begun)
        if self.begun is not None and self.begun.format != FORMAT and any(map(_is_state, sizes)):
            raise self._error(
                f"its state in {folder} is of format {self.begun.format}, and this version reads {FORMAT}; stop the job"
                " with a savepoint by the version that wrote it, and start from that"
            )
        self.epochs = self._standing(sizes, can_run_again or (self.begun is not None and self.begun.bounded))
        """The epochs that stay; only the last one has what others go on with."""

        inputs = {number: self._input_manifests.read(number) for number in self._input_manifests.numbers(sizes)}
        self.inputs = {number: input_ for number, input_ in inputs.items() if input_ is not None}
        """The input, by micro-batch."""

        self._check_input(sizes, can_run_again)
        self._retained = {block.file for epoch in self.epochs for block in epoch.gives()}
        for input_ in self.inputs.values():
            self._keep_replayed(input_)
        self._alive = {name for name in sizes if not name.endswith(".json")} - self._retained

    @property
    def last(self) -> Epoch | None:
        """The last epoch that is committed."""
        return self.epochs[-1] if self.epochs else None

    @property
    def holds_state(self) -> bool:
        """Whether it has more than the record of what was begun."""
        return bool(self.epochs or self.inputs)

    def begin(self, begun: Begun) -> None:
        """Record what the iteration is; raises `StateError` where it has state as another one."""
        if self.begun is not None and self.holds_state and (difference := self.begun.differs(begun)):
            raise self._error(f"{difference}; start it as it was, or the job without state")
        if self.begun != begun:
            self._folder.write(_BEGUN, begun)
            self.begun = begun

    def take(self, micro_batch: int, input_: Input) -> None:
        """Commit a micro-batch's input."""
        self._input_manifests.write(micro_batch, input_)
        self.inputs = dict(sorted([*self.inputs.items(), (micro_batch, input_)]))
        self._keep_replayed(input_)
        self._alive |= input_.files() - self._retained

    def commit(self, epoch: Epoch, written: Iterable[str]) -> None:
        """Commit an epoch, in which these files were written, and delete files that nothing needs any more."""
        self._epochs.create(epoch.number, epoch)
        last = self.last
        needed = epoch.files() | (last.files() if last is not None else set())
        self._alive |= set(written)
        if last is not None:
            if last.micro_batch != epoch.micro_batch:
                self._forget(self.epochs[:-1], epoch.micro_batch)
                self.epochs = [last]
            self.epochs[-1] = bare(last)
        self.epochs.append(epoch)
        self._retained |= {block.file for block in epoch.gives()}
        self._alive -= self._retained
        for name in self._alive - needed:
            self._folder.remove(name)
        self._alive &= needed

    def start(self, before: Epoch, written: Iterable[str]) -> None:
        """Commit the state of a savepoint or another run, as the epoch before all others."""
        self._alive |= self._retained
        self._reset()
        self.commit(before, written)

    def end(self, states: list[StoredState], parallelism: int) -> None:
        """Note the state that is left when the iteration has ended."""
        self._folder.write(_ENDED, Ended(states, parallelism))

    def left(self) -> Ended:
        """Return the state that the last epoch, or the end of the iteration, has left."""
        ended = self._folder.read(_ENDED, Ended)
        if ended is not None:
            return ended
        return Ended(self.last.states, self.last.parallelism) if self.last is not None else Ended([], 0)

    def has(self, micro_batch: int) -> bool:
        """Return whether something of a micro-batch is committed."""
        return micro_batch in self.inputs or bool(self.of(micro_batch))

    def of(self, micro_batch: int) -> list[Epoch]:
        """Return the epochs of a micro-batch."""
        return [epoch for epoch in self.epochs if epoch.micro_batch == micro_batch]

    def _forget(self, epochs: Iterable[Epoch], micro_batch: int) -> None:
        """Forget epochs, and the input of earlier micro-batches, except what comes in every epoch."""
        for epoch in epochs:
            self._epochs.remove(epoch.number)
            released = {block.file for block in epoch.gives()}
            self._retained -= released
            self._alive |= released
        for number, input_ in list(self.inputs.items()):
            if number < micro_batch and not input_.replayed:
                self._input_manifests.remove(number)
                del self.inputs[number]

    def _keep_replayed(self, input_: Input) -> None:
        self._retained |= {message.block.file for message in input_.replayed}

    def _standing(self, sizes: dict[str, int], can_run_again: bool) -> list[Epoch]:
        """Return the epochs up to the last that one can go on after; delete later ones where they can run again."""
        numbers = self._epochs.numbers(sizes)
        epochs: list[Epoch] = []
        damage = ""
        for number in numbers:
            epoch = self._epochs.read(number)
            if epoch is None or (epochs and number != epochs[-1].number + 1):
                damage = f"what is committed of one of its epochs cannot be read in {self.folder}"
                break
            if not stands(sizes, epoch.gives()):
                damage = f"files of its epoch {number} are gone from {self.folder}"
                break
            epochs.append(epoch)
        while epochs and not stands(sizes, epochs[-1].needs()):
            damage = damage or f"files of its epoch {epochs[-1].number} are gone from {self.folder}"
            epochs.pop()
        if not can_run_again:
            if damage:
                raise self._error(f"{damage}; go back to a savepoint, or start the job without state")
        elif epochs and epochs[0].number and epochs[0].micro_batch != BEFORE:
            epochs = []
        for number in numbers[len(epochs) :]:
            self._epochs.remove(number)
        return [bare(epoch) for epoch in epochs[:-1]] + epochs[-1:]

    def _check_input(self, sizes: dict[str, int], can_run_again: bool) -> None:
        """Forget everything where input is gone that epochs read, if it can be taken in once more."""
        has_begun = self.last is not None and self.last.micro_batch != BEFORE
        messages = [message for input_ in self.inputs.values() for message in input_.replayed]
        if not has_begun:
            messages += [message for input_ in self.inputs.values() for message in input_.once]
        is_whole = stands(sizes, [message.block for message in messages])
        if can_run_again:
            if not is_whole or (not self.epochs and self._epochs.numbers(sizes)):
                self._reset()
        elif not is_whole and self.begun is not None and self.begun.bounded:
            raise self._error(
                f"files of its input are gone from {self.folder}; go back to a savepoint, or start the job without"
                " state"
            )

    def _reset(self) -> None:
        for epoch in self.epochs:
            self._epochs.remove(epoch.number)
        for number in self.inputs:
            self._input_manifests.remove(number)
        self.epochs, self.inputs, self._retained = [], {}, set()

    def _error(self, what: str) -> StateError:
        return StateError(f"{self._where}: {what}")


def bare(epoch: Epoch) -> Epoch:
    """Return an epoch without what others go on with, which is in its manifest."""
    return msgspec.structs.replace(epoch, fed_back=[], later=[], states=[])


def _is_state(name: str) -> bool:
    return name.endswith(".json") and name != _BEGUN


def _kind(begun: Begun) -> str:
    return "bounded" if begun.bounded else "unbounded"
