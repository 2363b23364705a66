"""The broadcast state pattern in the fluent API: `stream.connect(rules.broadcast(descriptor)).process(function)`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Generic

from dagster_unified.api.base import BaseStream
from dagster_unified.api.located import located
from dagster_unified.api.record_types import agreed_output, main_output
from dagster_unified.errors import PipelineError
from dagster_unified.graph import nodes
from dagster_unified.graph.nodes import ExchangeKind, Key, Naming, Node, Partitioning
from dagster_unified.operators.broadcast import Broadcasting, checked
from dagster_unified.operators.functions.broadcast import BroadcastProcessFunction, KeyedBroadcastProcessFunction
from dagster_unified.operators.functions.type_variables import A, B, T
from dagster_unified.operators.state.map import MapStateDescriptor


class BroadcastStream(Generic[T]):
    """A stream whose every record goes to every instance of the operator that it is connected to.

    It fills maps there: the broadcast state. There is an example at `BroadcastConnectedStream.process`.
    """

    def __init__(self, stream: BaseStream[T], descriptors: tuple[MapStateDescriptor[Any, Any], ...]) -> None:
        self._stream = stream
        self._descriptors = checked(descriptors, stream._where("broadcast"))


@located
class BroadcastConnected(Generic[A, B]):
    """A stream and a broadcast stream."""

    def __init__(self, stream: BaseStream[A], broadcast: BroadcastStream[B]) -> None:
        where = stream._where("connect")
        stream._pipeline.check_same(broadcast._stream._pipeline, where)
        exchanges = [u.partitioning.kind for u in stream._upstream if u.partitioning is not None]
        if ExchangeKind.BROADCAST in exchanges:
            raise PipelineError(
                f"{where}: both streams are broadcast; leave broadcast() out on the one whose records are to be "
                "processed"
            )
        self._broadcast = broadcast

    def _process(self, stream: BaseStream[A], key: Key | None, function: Any, output_type: Any) -> Node:
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
        return stream._pipeline._add(
            nodes.BroadcastNode,
            upstream,
            name,
            naming=Naming.FUNCTION,
            records=records,
            function=Broadcasting(function, self._broadcast._descriptors),
            key=Key() if key is None else key,
            timestamped=None if key is None else True,
        )
