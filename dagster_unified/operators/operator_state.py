"""Functions with operator state: lists of a subtask, on a stream without a key.

Such a function is driven as with one key, whose state is the subtask's. A driver with several subtasks runs a copy of
the function for each, from `initialize_state` to `snapshot_state`, as if it were restored from a checkpoint each time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from dagster_unified.errors import PipelineError, UnsupportedError
from dagster_unified.operators.failures import RAISED, user_failure
from dagster_unified.operators.functions.base import Function, NoTimers, RuntimeContext
from dagster_unified.operators.functions.checkpoints import (
    CheckpointedFunction,
    FunctionInitializationContext,
    FunctionSnapshotContext,
    OperatorStateStore,
    checkpointed,
    listeners,
)
from dagster_unified.operators.functions.iterations import IterationListener, iteration_listeners
from dagster_unified.operators.keyed import KeyedProcessOperator
from dagster_unified.operators.operator import OperatorContext
from dagster_unified.operators.program.blocks import Emitting
from dagster_unified.operators.state.arrow_list import ArrowListStateDescriptor
from dagster_unified.operators.state.backend import KeyedStateBackend
from dagster_unified.operators.state.descriptors import StateDescriptor
from dagster_unified.operators.state.handles import ListStateDescriptor

LIST, UNION = "list", "union"
"""How the elements of a state are shared out to subtasks that start from a savepoint."""

KEY, RESTORED = 0, 1
"""The keys of a subtask's state, and of its state from a savepoint until its first record comes."""


class CheckpointedOperator(NoTimers, KeyedProcessOperator):
    """Runs a function with operator state."""

    tells_listeners = True  # the copies of its function are notified when they are opened

    def __init__(self, function: Any, context: OperatorContext) -> None:
        super().__init__(function, context)
        self.state.by_key = False
        self.kinds: dict[str, str] = {}
        """The function's states, `LIST` or `UNION` by name."""

        self._pristine = function
        self._context: Callable[[KeyedStateBackend | None], RuntimeContext] | None = None
        self._opened: list[Function] = []
        self._runs = False

    @property
    def subtask_key(self) -> Hashable:
        return KEY

    @property
    def time_sorted(self) -> bool:
        return False

    def open(self, context: Callable[[KeyedStateBackend | None], RuntimeContext]) -> None:
        """Only remember the context: a copy is opened with the first record of each subtask."""
        self._context = context

    def close(self) -> None:
        self._runs = False
        while self._opened:
            self._opened.pop().close()

    def process(self, records: Sequence[Any], timestamps: Sequence[int | None]) -> None:
        if not self._runs:
            self._start()
        super().process(records, timestamps)

    def end_of_epoch(self, epoch: int) -> None:
        if not self._runs:
            self._start()
        super().end_of_epoch(epoch)

    def end_of_iteration(self) -> None:
        if not self._runs:
            self._start()
        super().end_of_iteration()

    @property
    def listeners(self) -> Sequence[IterationListener[Any]]:
        return tuple(iteration_listeners(self.function))  # of the copy that runs

    def _emitter(self) -> Emitting:
        return Emitting(self.out)

    def snapshot(self) -> None:
        """Let the function put its content into the state; the next record gets a copy restored from it."""
        if not self._runs:
            return
        self.select(KEY)
        epoch = 0 if self.committed is None else self.committed + 1
        author = self._author()
        try:
            author.snapshot_state(_Snapshot(epoch))
            self.check_state()
        except RAISED as error:
            raise user_failure(error, self.where, author.snapshot_state, "snapshot_state()") from error
        for name in self.kinds:
            self.state.current.setdefault(name, [])
        self._runs = False

    def declare(self) -> None:
        """Let a copy of the function declare its states."""
        self.function = self._copied()
        self.select(KEY)
        self._initialize(restored=False)
        self.state.drop(KEY)

    def state_from_savepoint(self, state: dict[str, list[Any]]) -> dict[Hashable, dict[str, Any]]:
        """The state of a subtask that starts from a savepoint with this state.

        Its union lists are those of all subtasks; a subtask without records must not write them as its own: its state
        is what its function makes of it in a snapshot. A function that gets a record gets all.
        """
        if UNION not in self.kinds.values():
            return {KEY: dict(state)}
        self.select(KEY)
        self.state.current.update({name: list(elements) for name, elements in state.items()})
        self.restored = True
        self._start()
        self.snapshot()
        return {KEY: dict(self.state.current), RESTORED: dict(state)}

    def get_current_key(self) -> Any:
        raise UnsupportedError("there is no key; call key_by, and use keyed state instead of operator state")

    def _start(self) -> None:
        self.close()  # the copy before; its gauges were asked until now
        waiting = self.state.keys.get(RESTORED)
        if waiting:
            self.state.current.update(waiting)
            waiting.clear()
        assert self._context is not None
        self.function = function = self._copied()
        self._initialize(self.restored)
        self._opened.append(function)
        try:
            function.open(self._context(None))
        except RAISED as error:
            raise user_failure(error, self.where, function.open, "open()") from error
        if self.committed is not None:
            for listener in listeners(function):
                listener.notify_checkpoint_complete(self.committed)
        self._runs = True

    def _initialize(self, restored: bool) -> None:
        author = self._author()
        try:
            author.initialize_state(_Initialization(_Store(self.where, self.state, self.kinds), restored))
        except RAISED as error:
            raise user_failure(error, self.where, author.initialize_state, "initialize_state()") from error

    def _author(self) -> CheckpointedFunction:
        function = checkpointed(self.function)
        assert function is not None
        return function

    def _copied(self) -> Any:
        try:
            return deepcopy(self._pristine)
        except Exception as error:
            raise PipelineError(
                f"{self.where}: its function has operator state and cannot be copied for each subtask: {error}; create"
                " connections, locks and open files in open(), not before"
            ) from error


def redistributed(
    states: Sequence[Mapping[str, list[Any]]], kinds: Mapping[str, str], count: int
) -> list[dict[str, list[Any]]]:
    """The state of `count` subtasks, from the states of the subtasks before, in order.

    The elements of a list are split evenly; every subtask gets all elements of a union list (Flink:
    `RoundRobinOperatorStateRepartitioner`).
    """
    subtasks: list[dict[str, list[Any]]] = [{} for _ in range(count)]
    for name, kind in kinds.items():
        elements = [element for state in states for element in state.get(name, ())]
        size, more = divmod(len(elements), count)
        start = 0
        for number, state in enumerate(subtasks):
            end = start + size + (number < more)
            state[name] = elements[start:end] if kind == LIST else list(elements)
            start = end
    return subtasks


class _Store(OperatorStateStore):
    def __init__(self, where: str, state: KeyedStateBackend, kinds: dict[str, str]) -> None:
        self._where, self._state, self._kinds = where, state, kinds

    def get_list_state(self, descriptor: Any) -> Any:
        return self._bound(descriptor, LIST)

    def get_union_list_state(self, descriptor: Any) -> Any:
        return self._bound(descriptor, UNION)

    def _bound(self, descriptor: Any, kind: str) -> Any:
        if not isinstance(descriptor, (ListStateDescriptor, ArrowListStateDescriptor)):
            raise PipelineError(f"operator state is a list, so give a ListStateDescriptor, not {descriptor!r}")
        if descriptor.ttl is not None:
            raise PipelineError(
                f"operator state '{descriptor.name}' cannot have a time to live; leave elements out in snapshot_state"
            )
        if self._kinds.setdefault(descriptor.name, kind) != kind:
            raise PipelineError(
                f"operator state '{descriptor.name}' is declared as a list and as a union list; give one of them"
                " another name"
            )
        typed: StateDescriptor[Any] = descriptor
        return self._state.bind(typed)


class _Initialization(FunctionInitializationContext):
    def __init__(self, store: OperatorStateStore, restored: bool) -> None:
        self._store, self._restored = store, restored

    def get_operator_state_store(self) -> OperatorStateStore:
        return self._store

    def is_restored(self) -> bool:
        return self._restored


class _Snapshot(FunctionSnapshotContext):
    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def get_checkpoint_id(self) -> int:
        return self._epoch
