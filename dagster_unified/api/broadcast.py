"""The broadcast state pattern in the fluent API: `stream.connect(rules.broadcast(descriptor)).process(function)`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dagster_unified.api.connected import agreed_type
from dagster_unified.errors import PipelineError
from dagster_unified.graph import nodes
from dagster_unified.graph.nodes import ExchangeKind, Key, Naming, Partitioning
from dagster_unified.operators.broadcast import Broadcasting, BroadcastProcessFunction, KeyedBroadcastProcessFunction, checked
from dagster_unified.operators.state import MapStateDescriptor
from dagster_unified.records import element_type

if TYPE_CHECKING:
    from dagster_unified.api.stream import DataStream


class BroadcastStream:
    """A stream whose every record goes to every instance of the operator that it is connected to, with the maps that it fills there."""

    def __init__(self, stream: DataStream, descriptors: tuple[MapStateDescriptor[Any, Any], ...]) -> None:
        self._stream = stream
        self._descriptors = checked(descriptors, stream._where("broadcast"))


class BroadcastConnectedStream:
    """A stream, keyed or not, and a broadcast stream."""

    def __init__(self, stream: DataStream, broadcast: BroadcastStream) -> None:
        if stream._pipeline is not broadcast._stream._pipeline:
            raise PipelineError(f"{stream._where('connect')}: the streams belong to different pipelines, '{stream._pipeline.name}' and '{broadcast._stream._pipeline.name}'")
        if any(u.partitioning is not None and u.partitioning.kind is ExchangeKind.BROADCAST for u in stream._upstream):
            raise PipelineError(f"{stream._where('connect')}: both streams are broadcast; leave broadcast() out on the one whose records are to be processed")
        self._stream, self._broadcast = stream, broadcast

    def process(self, function: BroadcastProcessFunction[Any, Any, Any] | KeyedBroadcastProcessFunction[Any, Any, Any, Any], output_type: Any = None) -> DataStream:
        """A `KeyedBroadcastProcessFunction` where the stream is keyed, with state and timers of the key; else a `BroadcastProcessFunction`.

        In BATCH all broadcast records come first; they travel with the program to each partition, so that they have to fit into memory.
        In STREAMING each key group holds a copy of the state in its checkpoint.
        """
        from dagster_unified.api.stream import KeyedStream

        stream = self._stream
        keyed = isinstance(stream, KeyedStream)
        wanted = KeyedBroadcastProcessFunction if keyed else BroadcastProcessFunction
        if not isinstance(function, wanted):
            hint = "" if keyed or not isinstance(function, KeyedBroadcastProcessFunction) else "; call key_by before connect"
            raise PipelineError(f"{stream._where('process')}: expected a {wanted.__name__}, got {function!r}{hint}")
        name = type(function).__name__
        if output_type is None:
            output_type = agreed_type(function, ("process_element", "process_broadcast_element"), element_type, stream._where(name))
        records = stream._output(name, function.process_element, output_type, element_type)
        upstream = [*stream._upstream, *(replace(u, partitioning=Partitioning(ExchangeKind.BROADCAST, explicit=True)) for u in self._broadcast._stream._upstream)]
        key = stream._key_selector if isinstance(stream, KeyedStream) else Key()
        spec = Broadcasting(function, self._broadcast._descriptors)
        return stream._after(upstream, nodes.BroadcastNode, name, naming=Naming.FUNCTION, records=records, function=spec, key=key, timestamped=True if keyed else None)
