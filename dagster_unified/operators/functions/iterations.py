"""How a function takes part in an iteration: epochs and their end, and functions of delta iterations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from typing import Any, ClassVar, Generic

import pyarrow as pa

from dagster_unified.errors import PipelineError
from dagster_unified.operators.functions.base import FlatMapFunction, Function, OutputTag, RuntimeContext
from dagster_unified.operators.functions.checkpoints import (
    CheckpointedFunction,
    FunctionInitializationContext,
    FunctionSnapshotContext,
)
from dagster_unified.operators.functions.type_variables import In, Out, R, S, T
from dagster_unified.operators.state.handles import ListStateDescriptor
from dagster_unified.values import check_count


class EpochCollector(ABC, Generic[In]):
    """Collects the results of an `IterationListener`; Flink: `Collector`."""

    @abstractmethod
    def collect(self, value: In) -> None:
        """Emit a record of the epoch that ends; for a `map_batches` function, an Arrow batch of records."""


class EpochContext(ABC):
    """The context of an `IterationListener`; Flink ML: `IterationListener.Context`."""

    @abstractmethod
    def output(self, tag: OutputTag[R], value: R) -> None:
        """Emit to a side output."""

    @abstractmethod
    def get_current_key(self) -> Any:
        """The current key; raises `UnsupportedError` on a stream that is not keyed."""


class IterationListener(ABC, Generic[Out]):
    """A function in the body of an iteration that is called at the end of epochs; a second base of a function class.

    It is called once in each subtask, also where no record came. A function with keyed state is called for each key
    that got a record in the epoch, with that key's state, and at the end of the iteration for each key that has state,
    or where it has declared none, for each key that had records: a `KeyedProcessFunction`, a `KeyedBatchFunction`, or
    on a keyed stream a function that overrides `open`. Its results belong to the epoch that ends, so that they reach
    the next epoch where they are fed back; they have no event time. A function that is not keyed keeps only its state
    for later epochs. FLIP-176: `IterationListener`.

    Examples:
        >>> class Rounds(FlatMapFunction[int, int], iterations.IterationListener[int]):
        ...     def flat_map(self, value: int) -> list[int]:
        ...         return []
        ...     def on_epoch_watermark_incremented(self, epoch_watermark, context, collector) -> None:
        ...         collector.collect(epoch_watermark)
        >>> class Halved(iterations.IterationBody):
        ...     def process(self, variables, data):
        ...         smaller = variables[0].map(lambda n: n // 2, int).filter(lambda n: n > 0)
        ...         return iterations.IterationBodyResult([smaller], [smaller.flat_map(Rounds()).set_parallelism(1)])
        >>> collect(iterations.iterate_bounded_streams_until_termination([numbers], [], Halved())[0])
        [0, 1]
    """

    in_one_subtask: ClassVar[bool] = False
    """Whether its operator has one subtask, which gets all records of an epoch."""

    in_all_rounds: ClassVar[bool] = False
    """Whether its operator lives over all epochs also in a body whose operators live for one."""

    def on_epoch_watermark_incremented(
        self, epoch_watermark: int, context: EpochContext, collector: EpochCollector[Out]
    ) -> None:
        """Called when no record of this epoch, or of an earlier one, can come any more. The first epoch is 0."""

    def on_iteration_terminated(self, context: EpochContext, collector: EpochCollector[Out]) -> None:
        """Called when the iteration has ended. Records emitted to a feedback stream are dropped."""


def iteration_listeners(function: Any) -> Iterator[IterationListener[Any]]:
    """The author's functions in a function, itself included, that listen to epochs."""
    if isinstance(function, IterationListener):
        yield function
    for part in getattr(function, "wrapped_functions", ()):
        yield from iteration_listeners(part)


def hears_of_epochs(function: Any) -> bool:
    """Whether a function, or an author's function in it, listens to epochs."""
    return next(iteration_listeners(function), None) is not None


class TerminateOnMaxIter(FlatMapFunction[Any, int], IterationListener[int]):
    """Termination criteria: the iteration ends after `max_iter` epochs. Flink ML: `TerminateOnMaxIter`.

    Use it as `stream.flat_map(TerminateOnMaxIter(20))`, on any stream of the body.
    """

    in_all_rounds = True

    def __init__(self, max_iter: int) -> None:
        check_count("TerminateOnMaxIter: max_iter", max_iter)
        self.max_iter = max_iter

    def flat_map(self, value: Any) -> list[int]:
        return []

    def on_epoch_watermark_incremented(
        self, epoch_watermark: int, context: EpochContext, collector: EpochCollector[int]
    ) -> None:
        if epoch_watermark + 1 < self.max_iter:
            collector.collect(0)


class TerminateOnMaxIterOrTol(FlatMapFunction[float, int], IterationListener[int]):
    """Termination criteria: the iteration ends after `max_iter` epochs, or when its value falls below `tol`.

    Use it on a stream of one value an epoch, such as a loss: `loss.flat_map(TerminateOnMaxIterOrTol(100, 1e-6))`. Of
    several values the last counts, and after an epoch without one the iteration goes on. The value is also a gauge,
    `value`. Flink ML: `TerminateOnMaxIterOrTol`.
    """

    in_one_subtask = True
    in_all_rounds = True

    def __init__(self, max_iter: int, tol: float) -> None:
        check_count("TerminateOnMaxIterOrTol: max_iter", max_iter)
        if not isinstance(tol, (int, float)) or isinstance(tol, bool):
            raise PipelineError(f"TerminateOnMaxIterOrTol: tol is a number, not {tol!r}")
        self.max_iter, self.tol = max_iter, tol
        self.value = self.last = inf

    def open(self, runtime_context: RuntimeContext) -> None:
        runtime_context.get_metrics_group().gauge("value", lambda: self.last)

    def flat_map(self, value: float) -> list[int]:
        self.value = value
        return []

    def on_epoch_watermark_incremented(
        self, epoch_watermark: int, context: EpochContext, collector: EpochCollector[int]
    ) -> None:
        if epoch_watermark + 1 < self.max_iter and self.value >= self.tol:
            collector.collect(0)
        self.last, self.value = self.value, inf


class EmitsEachEpoch(IterationListener[Out]):
    """Emits its results at the end of each epoch, and at the end of the iteration those that came since."""

    in_all_rounds = True

    @abstractmethod
    def emit(self, collector: EpochCollector[Out]) -> None:
        """Emit the results so far, and forget them."""

    def on_epoch_watermark_incremented(
        self, epoch_watermark: int, context: EpochContext, collector: EpochCollector[Out]
    ) -> None:
        self.emit(collector)

    def on_iteration_terminated(self, context: EpochContext, collector: EpochCollector[Out]) -> None:
        self.emit(collector)


class AllReduce(FlatMapFunction[T, T], EmitsEachEpoch[T]):
    """Reduces the records that a subtask gets in an epoch, and emits the result at the epoch's end."""

    def __init__(self, function: Callable[[T, T], T]) -> None:
        self.function = function
        self.reduced: list[T] = []

    @property
    def wrapped_functions(self) -> tuple[Any, ...]:
        """The author's function."""
        return (self.function,)

    def flat_map(self, value: T) -> list[T]:
        self.reduced = [self.function(self.reduced[0], value)] if self.reduced else [value]
        return []

    def emit(self, collector: EpochCollector[T]) -> None:
        for record in self.reduced:
            collector.collect(record)
        self.reduced = []


class ForwardInputsOfLastRound(FlatMapFunction[T, T], CheckpointedFunction, IterationListener[T]):
    """Emits the records of the last epoch when the iteration has ended, and nothing before."""

    in_all_rounds = True

    def __init__(self, records: Any) -> None:
        self._descriptor = ListStateDescriptor("records", records)

    def initialize_state(self, context: FunctionInitializationContext) -> None:
        self.state = context.get_operator_state_store().get_list_state(self._descriptor)
        self.last = list(self.state.get())
        self.current: list[T] = []

    def snapshot_state(self, context: FunctionSnapshotContext) -> None:
        self.state.update(self.last)

    def flat_map(self, value: T) -> list[T]:
        self.current.append(value)
        return []

    def on_epoch_watermark_incremented(
        self, epoch_watermark: int, context: EpochContext, collector: EpochCollector[T]
    ) -> None:
        self.last, self.current = self.current, []

    def on_iteration_terminated(self, context: EpochContext, collector: EpochCollector[T]) -> None:
        for record in (*self.last, *self.current):  # these came when the iteration had ended
            collector.collect(record)


class DeltaFunction(Function, ABC, Generic[S, T]):
    """The body of a delta iteration, for one key: its record in the solution set, joined with its workset.

    There is an example at `iterate_delta`. Flink: *Delta Iterate*; a co-group of workset and solution set.
    """

    @abstractmethod
    def update(self, solution: S | None, workset: Sequence[T]) -> tuple[S | None, Iterable[T]]:
        """The record that replaces the key's, None to keep it, and worksets that are sent to keys for the next epoch.

        `solution` is None where the solution set has no record of the key, and a change then adds one. `workset` is
        what was sent to the key for this epoch, in no defined order. Return a new record as the change, and do not
        change `solution`.
        """


class BatchDeltaFunction(Function, ABC):
    """The body of a delta iteration over Arrow batches: many keys at once. Both streams are keyed by fields.

    Examples:
        >>> import pyarrow as pa
        >>> import pyarrow.compute as pc
        >>> class Halving(iterations.BatchDeltaFunction):
        ...     def update_batch(self, solution, workset):
        ...         amounts = pc.add(solution["amount"], workset["amount"])
        ...         total = workset.set_column(1, "amount", amounts).select(["shop", "amount"])
        ...         half = workset.set_column(1, "amount", pc.divide(workset["amount"], 2))
        ...         return total, half.filter(pc.greater(half["amount"], 0))
        >>> of_shops = sales.key_by("shop").window(GlobalWindows.create_with_end_of_stream_trigger())
        >>> by_shop = of_shops.max_by("amount").key_by("shop")
        >>> sums = {"amount": "sum", "at": "min"}
        >>> totals = iterations.iterate_delta(by_shop, sales.key_by("shop"), Halving(), combine=sums)
        >>> sorted((sale.shop, sale.amount) for sale in collect(totals))
        [('north', 20), ('south', 11)]
    """

    @abstractmethod
    def update_batch(
        self, solution: pa.RecordBatch, workset: pa.RecordBatch
    ) -> tuple[pa.RecordBatch | None, pa.RecordBatch | None]:
        """The changes of the solution set, and the workset of the next epoch; None for nothing.

        A row of `solution` belongs to the key in the same row of `workset`; where the solution set has none, all of it
        is null. With `combine=` by columns each key has one row. How keys are cut into batches is not defined. A change
        has the columns of the key and those that change; others stay as they are. A change for a new key has all
        columns.
        """
