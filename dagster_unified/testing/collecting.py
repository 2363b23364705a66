"""The records of one stream, in memory: for trying an operator out and for a test of a few lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dagster_unified.api.stream import DataStream
from dagster_unified.connectors.printing import PrintSink
from dagster_unified.operators.functions.type_variables import T
from dagster_unified.testing.run import run_pipeline

_SINK = "collected"


def collect(
    stream: DataStream[T],
    mode: Literal["BATCH", "STREAMING"] = "BATCH",
    inputs: Mapping[str, Sequence[Any]] | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[T]:
    """Runs a stream's pipeline in memory and returns the stream's records, in the order in which they were emitted.

    The pipeline stays as it is, and its sinks write nothing. `inputs` and the rest are `run_pipeline`'s. What a
    function raises comes as a `UserFunctionError`.

    Examples:
        >>> from dagster_unified.api import Pipeline
        >>> numbers = Pipeline("numbers").from_collection([1, 2, 3])
        >>> collect(numbers.filter(lambda n: n > 1))
        [2, 3]
    """
    with_sink = stream._pipeline.with_sink(stream._upstream, PrintSink(_SINK), stream._records(_SINK))
    found: list[T] = run_pipeline(with_sink, mode, inputs, options).sinks.get(_SINK, [])
    return found
