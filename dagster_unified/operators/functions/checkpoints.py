"""How a function takes part in checkpoints: with state of its own that has no key, and as a listener.

Names and methods are Flink's. Knows no engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, overload

from dagster_unified.operators.functions.type_variables import V
from dagster_unified.operators.state.handles import ListState, ListStateDescriptor

if TYPE_CHECKING:
    from dagster_unified.operators.state.arrow_list import ArrowListState, ArrowListStateDescriptor


class OperatorStateStore(ABC):
    """The operator state of a function; there is an example at `CheckpointedFunction`.

    The elements of a state must fit the descriptor's type, as in keyed state.
    """

    @overload
    def get_list_state(self, descriptor: ListStateDescriptor[V]) -> ListState[V]: ...
    @overload
    def get_list_state(self, descriptor: ArrowListStateDescriptor[V]) -> ArrowListState[V]: ...
    @abstractmethod
    def get_list_state(
        self, descriptor: ListStateDescriptor[V] | ArrowListStateDescriptor[V]
    ) -> ListState[V] | ArrowListState[V]:
        """A list of this subtask; after a change of parallelism all elements are split evenly over the subtasks."""

    @overload
    def get_union_list_state(self, descriptor: ListStateDescriptor[V]) -> ListState[V]: ...
    @overload
    def get_union_list_state(self, descriptor: ArrowListStateDescriptor[V]) -> ArrowListState[V]: ...
    @abstractmethod
    def get_union_list_state(
        self, descriptor: ListStateDescriptor[V] | ArrowListStateDescriptor[V]
    ) -> ListState[V] | ArrowListState[V]:
        """A list of this subtask; after a start from a savepoint every subtask has the elements of all.

        A function takes those that it needs, and writes only its own. From one epoch to the next, also after a failure,
        a subtask has what it wrote itself.
        """


class FunctionInitializationContext(ABC):
    """The context of `CheckpointedFunction.initialize_state`; there is an example at `CheckpointedFunction`."""

    @abstractmethod
    def get_operator_state_store(self) -> OperatorStateStore:
        """The store of the function's state."""

    @abstractmethod
    def is_restored(self) -> bool:
        """Whether the function continues from a snapshot.

        In STREAMING it does from a subtask's second epoch on. In BATCH it does where the run starts from a savepoint,
        or from the partition before.
        """


class FunctionSnapshotContext(ABC):
    """The context of `CheckpointedFunction.snapshot_state`; there is an example at `CheckpointedFunction`."""

    @abstractmethod
    def get_checkpoint_id(self) -> int:
        """The epoch whose records the snapshot has seen; 0 in BATCH."""


class CheckpointedFunction(ABC):
    """A function with operator state: lists of a parallel instance (a subtask), not of a key.

    It is a second base of a function of `map`, `flat_map`, `filter` or `process` on streams without a key, or of one
    after `connect`, and the base of a function object of `map_batches`. `initialize_state` is called before `open`. In
    STREAMING an instance lives for one epoch: it is initialized from the last snapshot, processes the epoch's records,
    and `snapshot_state` puts its memory into its state, which is committed with the epoch and is in savepoints.
    Anything else that it keeps is lost. There are as many subtasks as `set_parallelism` says, or `parallelism.default`,
    or else `pipeline.max-parallelism`.

    In BATCH an instance processes a partition of the data, and there are no checkpoints: `snapshot_state` is called
    only where the run leaves a savepoint or hands state to the next partition (FLIP-140). A result that depends on
    which records a subtask has differs by mode.

    Flink: `CheckpointedFunction`, *Working with State*, "Using Operator State".

    Examples:
        >>> class Pairs(FlatMapFunction[int, int], CheckpointedFunction):
        ...     def initialize_state(self, context: FunctionInitializationContext) -> None:
        ...         self.state = context.get_operator_state_store().get_list_state(ListStateDescriptor("waiting", int))
        ...         self.waiting = self.state.get()
        ...     def snapshot_state(self, context: FunctionSnapshotContext) -> None:
        ...         self.state.update(self.waiting)
        ...     def flat_map(self, value: int) -> list[int]:
        ...         self.waiting.append(value)
        ...         if len(self.waiting) < 2:
        ...             return []
        ...         pair, self.waiting = self.waiting, []
        ...         return [sum(pair)]
        >>> collect(numbers.flat_map(Pairs()))
        [3]
    """

    @abstractmethod
    def initialize_state(self, context: FunctionInitializationContext) -> None:
        """Called before `open`: get the state, and take over its content."""

    @abstractmethod
    def snapshot_state(self, context: FunctionSnapshotContext) -> None:
        """Called after an epoch's records: put what has to last into the state."""


class CheckpointListener(ABC):
    """A function that is notified of committed epochs; any function class may have it as a second base.

    In STREAMING `notify_checkpoint_complete` is called once an epoch is committed, with all that its sinks wrote, and
    before the function gets a record of a later one. Each instance of the function is notified of the latest committed
    epoch after `open`. For the last epoch of a job that has finished, or stops with a savepoint, an instance is opened
    that gets no record. Notification is best effort, as in Flink: if a job is stopped otherwise, the next job's
    functions are notified of its last epoch, and of an epoch twice where the job was restarted after it. What a
    function knows of an epoch has to be in its state, since the notified instance need not be the one that processed
    the epoch's records. In BATCH there are no checkpoints, and it is never called (FLIP-140). Flink:
    `CheckpointListener`.

    Examples:
        >>> class Published(MapFunction[int, int], CheckpointListener):
        ...     def open(self, runtime_context: RuntimeContext) -> None:
        ...         self.published = -1
        ...     def notify_checkpoint_complete(self, epoch: int) -> None:
        ...         self.published = epoch
        ...     def map(self, value: int) -> int:
        ...         return self.published
        >>> collect(numbers.map(Published()))
        [-1, -1, -1]
    """

    @abstractmethod
    def notify_checkpoint_complete(self, epoch: int) -> None:
        """Called after an epoch was committed; `epoch` is its number. An exception fails the job."""


def listeners(function: Any) -> Iterator[CheckpointListener]:
    """The author's functions in a function, itself included, that are notified of committed epochs."""
    if isinstance(function, CheckpointListener):
        yield function
    for part in getattr(function, "wrapped_functions", ()):
        yield from listeners(part)


def checkpointed(function: Any) -> CheckpointedFunction | None:
    """The author's function with operator state in a function, which may be the function itself; or None."""
    if isinstance(function, CheckpointedFunction):
        return function
    inner = map(checkpointed, getattr(function, "wrapped_functions", ()))
    return next((function for function in inner if function is not None), None)
