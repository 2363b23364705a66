"""The types of streams and of metrics that a program gets from a method, for annotations: nobody constructs them."""

from dagster_unified.api.connected import BroadcastStream
from dagster_unified.api.stream import (
    BroadcastConnectedStream,
    CoGroupedStreams,
    ConnectedStreams,
    DataStreamSink,
    JoinedStreams,
    KeyedBroadcastConnectedStream,
    KeyedConnectedStreams,
    WindowedStream,
)
from dagster_unified.operators.metrics import MetricGroup

__all__ = [
    "BroadcastConnectedStream", "BroadcastStream", "CoGroupedStreams", "ConnectedStreams", "DataStreamSink",
    "JoinedStreams", "KeyedBroadcastConnectedStream", "KeyedConnectedStreams", "MetricGroup", "WindowedStream",
]  # fmt: skip
