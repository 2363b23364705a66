"""What an author writes for two streams in one operator: connected, joined, grouped together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Generic, TypeAlias

from dagster_unified.operators.functions.base import (
    Function,
    KeyedProcessFunction,
    OutputTag,
    ProcessFunction,
    SideOutput,
)
from dagster_unified.operators.functions.type_variables import In1, In2, Key, KeyOut, Out, R


class CoMapFunction(Function, ABC, Generic[In1, In2, Out]):
    """One record in, of either stream, one record out; there is an example at `DataStream.connect`."""

    @abstractmethod
    def map1(self, value: In1) -> Out:
        """What a record of the first stream becomes."""

    @abstractmethod
    def map2(self, value: In2) -> Out:
        """What a record of the second stream becomes."""


class CoFlatMapFunction(Function, ABC, Generic[In1, In2, Out]):
    """One record in, of either stream, any number out; there is an example at `ConnectedStreams.flat_map`."""

    @abstractmethod
    def flat_map1(self, value: In1) -> Iterable[Out]:
        """What a record of the first stream becomes."""

    @abstractmethod
    def flat_map2(self, value: In2) -> Iterable[Out]:
        """What a record of the second stream becomes."""


class CoProcessFunction(Function, ABC, Generic[In1, In2, Out]):
    """A process function over two streams (Flink: *Process Function*, "Low-level Joins").

    Where both are keyed, it has state and timers of the key that both share. Where one of them is keyed, there is state
    for its records, and there are no timers. In BATCH the order of the two streams is as at `ConnectedStreams`; in
    STREAMING records come as they arrive.

    Examples:
        >>> class Amounts(CoProcessFunction[Sale, int, int]):
        ...     def process_element1(self, value: Sale, ctx: CoProcessFunction.Context) -> list[int]:
        ...         return [value.amount]
        ...     def process_element2(self, value: int, ctx: CoProcessFunction.Context) -> list[int]:
        ...         return [10 * value]
        >>> sorted(collect(sales.connect(numbers).process(Amounts())))
        [3, 4, 5, 10, 20, 30]
    """

    Context: TypeAlias = ProcessFunction.Context

    @abstractmethod
    def process_element1(self, value: In1, ctx: ProcessFunction.Context) -> Iterable[Out | SideOutput] | None:
        """What a record of the first stream leads to."""

    @abstractmethod
    def process_element2(self, value: In2, ctx: ProcessFunction.Context) -> Iterable[Out | SideOutput] | None:
        """What a record of the second stream leads to."""

    def on_timer(
        self, timestamp: int, ctx: KeyedProcessFunction.OnTimerContext[Any]
    ) -> Iterable[Out | SideOutput] | None:
        """A timer has come; only where both streams are keyed."""
        return None


class KeyedCoProcessFunction(Function, ABC, Generic[Key, In1, In2, Out]):
    """A process function over two keyed streams, with state and timers of the key that both share.

    In BATCH all records of a key from both come before the next key, sorted by event time; in STREAMING they come as
    they arrive. There is an example at `KeyedConnectedStreams.process`.
    """

    class Context(KeyedProcessFunction.Context[KeyOut]):
        """The context that `process_element1` and `process_element2` get with a record."""

    class OnTimerContext(Context[KeyOut], KeyedProcessFunction.OnTimerContext[KeyOut]):
        """The context that `on_timer` gets with a timestamp."""

    requires_time_sorted_input: bool = False

    @abstractmethod
    def process_element1(self, value: In1, ctx: Context[Key]) -> Iterable[Out | SideOutput] | None:
        """What a record of the first stream leads to."""

    @abstractmethod
    def process_element2(self, value: In2, ctx: Context[Key]) -> Iterable[Out | SideOutput] | None:
        """What a record of the second stream leads to."""

    def on_timer(self, timestamp: int, ctx: OnTimerContext[Key]) -> Iterable[Out | SideOutput] | None:
        """A timer has come."""
        return ()


class JoinFunction(Function, ABC, Generic[In1, In2, Out]):
    """Returns one record for each pair of one key and window (Flink: *Joining*).

    In BATCH it is called when a key is over, in STREAMING when the window fires.

    Examples:
        >>> class Pair(JoinFunction[Sale, Sale, str]):
        ...     def join(self, first: Sale, second: Sale) -> str:
        ...         return f"{first.shop}: {first.amount} and {second.amount}"
        >>> days = TumblingEventTimeWindows.of(timedelta(days=1))
        >>> pairs = timed.join(timed.where("amount > 4")).where("shop").equal_to("shop").window(days)
        >>> sorted(collect(pairs.apply(Pair())))
        ['north: 3 and 5', 'north: 5 and 5']
    """

    @abstractmethod
    def join(self, first: In1, second: In2) -> Out:
        """The pair as one record."""


class FlatJoinFunction(Function, ABC, Generic[In1, In2, Out]):
    """Returns any number of records for each pair of one key and window (Flink: *Joining*).

    In BATCH it is called when a key is over, in STREAMING when the window fires.

    Examples:
        >>> class Larger(FlatJoinFunction[Sale, Sale, int]):
        ...     def join(self, first: Sale, second: Sale) -> list[int]:
        ...         return [second.amount] if second.amount > first.amount else []
        >>> days = TumblingEventTimeWindows.of(timedelta(days=1))
        >>> pairs = timed.join(timed).where("shop").equal_to("shop").window(days)
        >>> collect(pairs.apply(Larger()))
        [5]
    """

    @abstractmethod
    def join(self, first: In1, second: In2) -> Iterable[Out] | None:
        """What the pair gives."""


class CoGroupFunction(Function, ABC, Generic[In1, In2, Out]):
    """Returns any number of records for all records of one key and window; one of the two lists may be empty.

    In BATCH it is called when a key is over, in STREAMING when the window fires.

    Examples:
        >>> class Unmatched(CoGroupFunction[Sale, Sale, str]):
        ...     def co_group(self, first: list[Sale], second: list[Sale]) -> list[str]:
        ...         return [sale.shop for sale in first] if not second else []
        >>> days = TumblingEventTimeWindows.of(timedelta(days=1))
        >>> groups = timed.co_group(timed.where("amount > 4")).where("shop").equal_to("shop").window(days)
        >>> collect(groups.apply(Unmatched()))
        ['south']
    """

    @abstractmethod
    def co_group(self, first: list[In1], second: list[In2]) -> Iterable[Out] | None:
        """What the two groups give."""


class ProcessJoinFunction(Function, ABC, Generic[In1, In2, Out]):
    """Returns any number of records for each pair of an interval join (Flink: *Joining*, "Interval Join").

    Records are paired in the order of event time, in both modes. There is an example at `KeyedStream.interval_join`.
    """

    class Context(ABC):
        """The context that `process_element` gets with a pair."""

        @abstractmethod
        def get_left_timestamp(self) -> int:
            """The left record's event time."""

        @abstractmethod
        def get_right_timestamp(self) -> int:
            """The right record's event time."""

        @abstractmethod
        def get_timestamp(self) -> int:
            """The later of the two, which the results carry."""

        @abstractmethod
        def output(self, tag: OutputTag[R], value: R) -> None:
            """Emits to a side output."""

    @abstractmethod
    def process_element(self, left: In1, right: In2, ctx: Context) -> Iterable[Out | SideOutput] | None:
        """What the pair gives."""
