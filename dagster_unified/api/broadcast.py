"""The broadcast state pattern in the fluent API: `stream.connect(rules.broadcast(descriptor)).process(function)`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic

from dagster_unified.api.located import located
from dagster_unified.api.record_types import NOT_GIVEN, agreed_output, main_output
from dagster_unified.errors import PipelineError
from dagster_unified.graph import nodes
from dagster_unified.graph.nodes import ExchangeKind, Key, Naming, Partitioning
from dagster_unified.operators.broadcast import (
    Broadcasting,
    BroadcastProcessFunction,
    KeyedBroadcastProcessFunction,
    checked,
)
from dagster_unified.operators.functions.type_variables import A, B, K, R, T
from dagster_unified.operators.state.map import MapStateDescriptor

if TYPE_CHECKING:
    from typing_extensions import TypeForm

    from dagster_unified.api.stream import DataStream, KeyedStream


class BroadcastStream(Generic[T]):
    """A stream whose every record goes to every instance of the operator that it is connected to.

    It fills maps there: the broadcast state. There is an example at `BroadcastConnectedStream.process`.
    """

    def __init__(self, stream: DataStream[T], descriptors: tuple[MapStateDescriptor[Any, Any], ...]) -> None:
        self._stream = stream
        self._descriptors = checked(descriptors, stream._where("broadcast"))


@located
class _BroadcastConnected(Generic[A, B]):
    """A stream and a broadcast stream."""

    def __init__(self, stream: DataStream[A], broadcast: BroadcastStream[B]) -> None:
        where = stream._where("connect")
        stream._pipeline.check_same(broadcast._stream._pipeline, where)
        exchanges = [u.partitioning.kind for u in stream._upstream if u.partitioning is not None]
        if ExchangeKind.BROADCAST in exchanges:
            raise PipelineError(
                f"{where}: both streams are broadcast; leave broadcast() out on the one whose records are to be "
                "processed"
            )
        self._broadcast = broadcast

    def _process(self, stream: DataStream[A], key: Key | None, function: Any, output_type: Any) -> DataStream[Any]:
        """The operator; its stream is keyed by `key`, if at all."""
        wanted = BroadcastProcessFunction if key is None else KeyedBroadcastProcessFunction
        if not isinstance(function, wanted):
            misplaced = key is None and isinstance(function, KeyedBroadcastProcessFunction)
            hint = "; call key_by before connect" if misplaced else ""
            raise PipelineError(f"{stream._where('process')}: expected a {wanted.__name__}, got {function!r}{hint}")
        name = type(function).__name__
        if output_type is None:
            methods = ("process_element", "process_broadcast_element")
            output_type = agreed_output(function, methods, main_output, stream._where(name))
        records = stream._output(name, function.process_element, output_type, main_output)
        everywhere = Partitioning(ExchangeKind.BROADCAST, explicit=True)
        upstream = [
            *stream._upstream,
            *(replace(u, partitioning=everywhere) for u in self._broadcast._stream._upstream),
        ]
        return stream._after(
            upstream,
            nodes.BroadcastNode,
            name,
            naming=Naming.FUNCTION,
            records=records,
            function=Broadcasting(function, self._broadcast._descriptors),
            key=Key() if key is None else key,
            timestamped=None if key is None else True,
        )


@located
class BroadcastConnectedStream(_BroadcastConnected[A, B]):
    """A stream that is not keyed, and a broadcast stream."""

    def __init__(self, stream: DataStream[A], broadcast: BroadcastStream[B]) -> None:
        super().__init__(stream, broadcast)
        self._stream = stream

    def process(
        self, function: BroadcastProcessFunction[A, B, R], output_type: TypeForm[R] = NOT_GIVEN
    ) -> DataStream[R]:
        """Runs a `BroadcastProcessFunction`.

        In BATCH all broadcast records come first; they travel with the program to each partition, so that they have to
        fit into memory. In STREAMING each key group holds a copy of the state in its checkpoint.

        Examples:
            >>> LIMITS = MapStateDescriptor("limits", str, int)
            >>> class Above(BroadcastProcessFunction):
            ...     def process_element(self, value: Sale, ctx) -> list[int]:
            ...         limit = ctx.get_broadcast_state(LIMITS).get("limit")
            ...         return [value.amount] if limit is not None and value.amount > limit else []
            ...     def process_broadcast_element(self, value: int, ctx) -> list[int]:
            ...         ctx.get_broadcast_state(LIMITS).put("limit", value)
            ...         return []
            >>> limit = numbers.filter(lambda n: n == 3)
            >>> sorted(collect(sales.connect(limit.broadcast(LIMITS)).process(Above())))
            [4, 5]
        """
        return self._process(self._stream, None, function, output_type)


@located
class KeyedBroadcastConnectedStream(_BroadcastConnected[A, B], Generic[K, A, B]):
    """A keyed stream, and a broadcast stream; there is an example at `KeyedBroadcastProcessFunction`."""

    def __init__(self, stream: KeyedStream[K, A], broadcast: BroadcastStream[B]) -> None:
        super().__init__(stream, broadcast)
        self._stream = stream

    def process(
        self, function: KeyedBroadcastProcessFunction[K, A, B, R], output_type: TypeForm[R] = NOT_GIVEN
    ) -> DataStream[R]:
        """Runs a `KeyedBroadcastProcessFunction`, with state and timers of the key.

        In BATCH all broadcast records come first; they travel with the program to each partition, so that they have to
        fit into memory. In STREAMING each key group holds a copy of the state in its checkpoint.
        """
        return self._process(self._stream, self._stream._key_selector, function, output_type)
