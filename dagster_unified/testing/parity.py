"""Holds a pipeline to the promise over bounded input, and has what such a test needs: records and shared objects."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal

from dagster_unified.api.stream import DataStream
from dagster_unified.connectors.foreach import PrintSink
from dagster_unified.errors import UnsupportedError
from dagster_unified.graph.nodes import Graph, SinkNode
from dagster_unified.operators.functions.type_variables import T
from dagster_unified.operators.time import wall_clock
from dagster_unified.testing.run import Result, run_pipeline


def assert_same_in_both_modes(
    pipeline: Any,
    inputs: Mapping[str, Sequence[Any]] | None = None,
    options: Mapping[str, Any] | None = None,
    clock: Callable[[], int] = wall_clock,
    seed: int | None = 0,
) -> None:
    """Run `pipeline` in both modes, in memory, and compare the final results.

    Raises `AssertionError` with the first differences. A sink with a `key` is compared by its last record per key, and
    so is one right after a rolling operation; any other as a bag of records. `seed` shuffles what comes in no defined
    order, as in `run_pipeline`; a failure's notes say which it was.

    Examples:
        >>> sink = sales.key_by("shop").sum("amount").print("totals")
        >>> assert_same_in_both_modes(pipeline)
    """
    graph = pipeline.graph()
    batch = final_result(graph, run_pipeline(pipeline, "BATCH", inputs, options, clock, seed=seed))
    streaming = final_result(graph, run_pipeline(pipeline, "STREAMING", inputs, options, clock, seed=seed))
    for sink, expected in batch.items():
        only_batch, only_streaming = expected - streaming[sink], streaming[sink] - expected
        if only_batch or only_streaming:
            error = AssertionError(
                f"{graph.name}: sink '{sink}' ends differently\n  only in BATCH: {_first(only_batch)}\n  only in"
                f" STREAMING: {_first(only_streaming)}"
            )
            error.add_note(f"records that come in no defined order were shuffled with seed={seed}")
            raise error


def final_result(graph: Graph, result: Result) -> dict[str, Counter[str]]:
    """What each sink holds in the end, records as text.

    Examples:
        >>> sink = numbers.key_by(lambda n: 0, key_type=int).sum().print("total")
        >>> result = run_pipeline(pipeline, "STREAMING")
        >>> result.sinks["total"], final_result(pipeline.graph(), result)
        ([1, 3, 6], {'total': Counter({'6': 1})})
    """
    final = {}
    for node in graph.sinks:
        records = result.sinks[node.name]
        get = _key(graph, node)
        if get is not None:
            records = list({repr(get(r)): r for r in records}.values())
        final[node.name] = Counter(map(repr, records))
    return final


def _key(graph: Graph, node: SinkNode) -> Callable[[Any], Any] | None:
    """Return what identifies a row of a sink's table, where a later record replaces an earlier one."""
    if node.sink.key:
        return lambda r: [getattr(r, k) for k in node.sink.key]
    edge = graph.inputs(node.id)[0]
    before = graph.node(edge.source)
    if before.key is None or not before.emits_updates:
        return None
    computed, records = before.key.computed, before.records
    if computed is not None:
        return getattr(computed.function, "get_key", computed.function)  # type: ignore[no-any-return]
    assert records is not None
    places = [records.names.index(f) for f in before.key.fields]
    return lambda r: [column[0] for i, column in enumerate(records.columns([r])) if i in places]


def _first(differences: Counter[str], limit: int = 5) -> str:
    shown = list(differences.elements())[:limit]
    more = sum(differences.values()) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "") if shown else "nothing"


_living: weakref.WeakValueDictionary[int, InTheTest] = weakref.WeakValueDictionary()


class InTheTest:
    """An object that is not copied with the functions that refer to it, in the process of the test."""

    def __reduce__(self) -> Any:
        _living[id(self)] = self
        return _object_of_test, (id(self), os.getpid())


def _object_of_test(identity: int, process: int) -> InTheTest:
    if os.getpid() != process or identity not in _living:
        raise UnsupportedError(
            "a function refers to an object of a test (Shared, ManualClock), which is in the test's process only: the"
            " harness runs functions there and Spark does not; emit what the test has to see"
        )
    return _living[identity]


class Shared(InTheTest, Generic[T]):
    """Holds a value that a test and the functions of a pipeline share while the harness runs them: a test double.

    The harness runs copies of functions, as Spark's workers do: what they append to a list of the test's, the test does
    not see. It sees what they do to the value of a `Shared`. On Spark the function is refused.

    Examples:
        >>> calls = Shared([])
        >>> class Called(MapFunction[int, int]):
        ...     def map(self, value: int) -> int:
        ...         calls.value.append(value)
        ...         return value
        >>> collect(numbers.map(Called())), calls.value
        ([1, 2, 3], [1, 2, 3])
    """

    def __init__(self, value: T) -> None:
        self.value = value


_SINK = "collected"


def collect(
    stream: DataStream[T],
    mode: Literal["BATCH", "STREAMING"] = "BATCH",
    inputs: Mapping[str, Sequence[Any]] | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[T]:
    """Run a stream's pipeline in memory and return the stream's records, in the order in which they were emitted.

    The pipeline stays as it is, and its sinks write nothing. `inputs` and the rest are `run_pipeline`'s. What a
    function raises comes as a `UserFunctionError`.

    Examples:
        >>> from dagster_unified.api import Pipeline
        >>> numbers = Pipeline("numbers").from_collection([1, 2, 3])
        >>> collect(numbers.filter(lambda n: n > 1))
        [2, 3]
    """
    with_sink = stream._pipeline.with_sink(stream._upstream, PrintSink(_SINK), stream._records(_SINK))
    records: list[T] = run_pipeline(with_sink, mode, inputs, options).sinks.get(_SINK, [])
    return records
