"""Drive one operator by hand: elements, watermarks, the clock, one at a time.

Flink: the family of `OneInputStreamOperatorTestHarness`. An operator is given as a pipeline's author writes it, so that
keys, windows, triggers and types are the pipeline's own. It runs under the driver of STREAMING, and its state goes
through the encoding of a checkpoint after every call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from dagster_unified.api.pipeline import Pipeline
from dagster_unified.api.stream import DataStream
from dagster_unified.api.watermarks import WatermarkStrategy
from dagster_unified.by_value import InThisProcess
from dagster_unified.errors import PipelineError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.plan import Plan
from dagster_unified.operators.drivers.group import Group, MemoryStore
from dagster_unified.operators.drivers.key_groups import ControlEvent, GroupedOperator
from dagster_unified.operators.functions.base import FIRST, KeyedProcessFunction, OutputTag, RuntimeContext
from dagster_unified.operators.keyed import KeyedProcessOperator, PartlyKeyed
from dagster_unified.operators.metrics import Metrics, Registry
from dagster_unified.operators.operator import BROADCAST, KeyedOptions, OperatorContext
from dagster_unified.operators.operator_state import KEY
from dagster_unified.operators.state.handles import MapStateDescriptor
from dagster_unified.operators.state.pages import Content
from dagster_unified.operators.time import MIN_TIMESTAMP
from dagster_unified.records import UNITED
from dagster_unified.testing.driving import DrivenOperator
from dagster_unified.testing.parity import InTheTest
from dagster_unified.testing.records import Timed
from dagster_unified.testing.run import planned

_Key = bool | int | float | str | tuple[object, ...] | None
"""The keys that come back from state as they went, without a type that says what they are."""

_keys = msgspec.msgpack.Decoder(_Key)


class ManualClock(InTheTest):
    """A processing-time clock that stands still until it is moved. Milliseconds since the epoch.

    Examples:
        >>> clock = ManualClock(1_000)
        >>> clock.advance(500)
        >>> clock()
        1500
    """

    def __init__(self, now: int = 0) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now

    def advance(self, milliseconds: int) -> None:
        """Move the clock forward."""
        self.now += milliseconds


class KeyedHarness:
    """One `KeyedProcessFunction` with its state and timers, in STREAMING semantics.

    State and timers go through the encoding of a checkpoint after every call, which is a micro-batch: the function is
    another object in each, opened and closed.

    Examples:
        >>> from dagster_unified.api import KeyedProcessFunction, ValueStateDescriptor
        >>> class Count(KeyedProcessFunction):
        ...     def open(self, context):
        ...         self.count = context.get_state(ValueStateDescriptor("count", int))
        ...     def process_element(self, value, ctx):
        ...         self.count.update((self.count.value() or 0) + 1)
        ...         ctx.timer_service().register_event_time_timer(ctx.timestamp() + 10)
        ...     def on_timer(self, timestamp, ctx):
        ...         yield f"{ctx.get_current_key()}: {self.count.value()} at {timestamp}"
        >>> harness = KeyedHarness(Count())
        >>> harness.element("a", "x", timestamp=5)
        []
        >>> harness.watermark(15)
        ['a: 1 at 15']
    """

    def __init__(
        self,
        function: KeyedProcessFunction[Any, Any, Any],
        clock: ManualClock | None = None,
        options: KeyedOptions | None = None,
    ) -> None:
        self.clock = clock or ManualClock()
        self.metrics = Metrics()
        self.side_outputs: dict[str, list[Any]] = {}
        self._name = type(function).__name__
        self._options = options or KeyedOptions(incremental_updates=True)
        self._shipped = InThisProcess(function)
        self._store = MemoryStore()
        with self._opened():
            pass

    def element(self, key: Hashable, value: Any, timestamp: int | None = None) -> list[Any]:
        """Process one record; return what the function emits."""
        self._check(key)
        with self._opened() as (grouped, group):
            grouped.process(group, [key], [0], [value], [timestamp])
            return self._taken(grouped, group)

    def watermark(self, timestamp: int) -> list[Any]:
        """Move event time forward; return what timers emit."""
        with self._opened() as (grouped, group):
            grouped.advance(group, timestamp, MIN_TIMESTAMP)
            return self._taken(grouped, group)

    def processing_time(self, now: int) -> list[Any]:
        """Set the clock; return what timers emit."""
        self.clock.now = now
        with self._opened() as (grouped, group):
            grouped.advance(group, MIN_TIMESTAMP, now)
            return self._taken(grouped, group)

    def end_of_input(self) -> list[Any]:
        """End the input: all timers fire, as configured."""
        with self._opened() as (grouped, group):
            grouped.end(group, grouped.operator.last_event_time)
            return self._taken(grouped, group)

    def state(self, key: Hashable) -> dict[str, Any]:
        """Return the raw state of a key, by state name."""
        with self._opened() as (grouped, _):
            contents = [page.content() for page in grouped.contents(self._store)]
        return next((dict(content.keys[key]) for content in contents if key in content.keys), {})

    def close(self) -> None:
        """End the harness. The function has been closed after each call."""
        self._store = MemoryStore()

    @contextmanager
    def _opened(self) -> Iterator[tuple[GroupedOperator, Group]]:
        """Open the function for one call, which is a micro-batch: a new object each time, as on Spark."""
        registry = Registry()
        context = OperatorContext(where=self._name, options=self._options, clock=self.clock, metrics=registry.metrics)
        operator = KeyedProcessOperator(self._shipped.load(), context)
        if operator.time_sorted:
            raise PipelineError(
                f"{self._name}: requires_time_sorted_input makes elements wait in state until the watermark passes"
                " them, which needs their type; use OneInputHarness, which knows it"
            )
        operator.open(lambda state: RuntimeContext(self._name, FIRST, 1, registry, state))
        try:
            grouped = GroupedOperator(operator, _Key, object, holds_back=False, after=lambda: None)
            with grouped.opened(self._store) as group:
                yield grouped, group
        finally:
            operator.close()
            self.metrics.add_later(registry.metrics)

    def _check(self, key: Hashable) -> None:
        """Raise for a key that is another one when it comes back from state, of which the harness has no type."""
        try:
            stored = _keys.decode(msgspec.msgpack.encode(key))
        except (TypeError, ValueError):
            stored = None
        if type(stored) is not type(key) or stored != key:
            raise PipelineError(
                f"{self._name}: a {type(key).__name__} as a key needs its type; use OneInputHarness, which knows it"
            )

    def _taken(self, grouped: GroupedOperator, group: Group) -> list[Any]:
        """Return what was emitted; the state goes back to its pages."""
        grouped.operator.check_state()
        grouped.save(group)
        out = grouped.operator.out
        for tag, (records, _) in out.side.items():
            self.side_outputs.setdefault(tag, []).extend(records)
        return out.records


Snapshot = dict[int, bytes]
"""An operator's state and timers, encoded as in a checkpoint."""

_TIMED: WatermarkStrategy[Any] = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(lambda record: 0)
_OUTPUT = "output"


class _Harness:
    """The base of all harnesses: outputs, time, timers, state, snapshots."""

    def __init__(
        self,
        build: Callable[..., DataStream[Any]],
        types: Sequence[Any],
        side_outputs: Sequence[OutputTag[Any]] = (),
        clock: ManualClock | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        pipeline = Pipeline("harness")
        streams = [
            pipeline.from_collection([], kind, f"input {n}").assign_timestamps_and_watermarks(_TIMED)
            for n, kind in enumerate(types, 1)
        ]
        built = build(*streams)
        built.print(_OUTPUT)
        for tag in side_outputs:
            built.get_side_output(tag).print(f"side output {tag.name}")
        self.clock = clock or ManualClock()
        self.timed_output: list[Timed] = []
        """The operator's output so far, with event times."""

        self._side: dict[str, list[Any]] = {tag.name: [] for tag in side_outputs}
        self._plan = planned(pipeline.graph(), "STREAMING", options)
        self._node = _operator(self._plan)
        self._marks = [MIN_TIMESTAMP] * len(types)
        self._last: int | None = None
        self._driven = self._opened(MemoryStore())

    @property
    def output(self) -> list[Any]:
        """What the operator has emitted so far."""
        return [record for record, _ in self.timed_output]

    @property
    def metrics(self) -> Metrics:
        """What the operator has measured, and its gauges as they were after the last call."""
        return self._driven.metrics

    def side_output(self, tag: OutputTag[Any]) -> list[Any]:
        """Return what the operator has emitted to a side output, one of those that the harness was created with."""
        if tag.name not in self._side:
            raise PipelineError(
                f"harness: side output '{tag.name}' is not collected; make the harness with side_outputs=[{tag!r}]"
            )
        return self._side[tag.name]

    def process_watermark(self, timestamp: int) -> list[Any]:
        """Move event time of all inputs forward; return what the operator emits for it."""
        return self._moved(*([timestamp] * len(self._marks)))

    def set_processing_time(self, now: int) -> list[Any]:
        """Set the clock and fire the processing-time timers that are due; return what the operator emits for it."""
        self.clock.now = now
        return self._run((), ControlEvent(watermarks={self._node.uid: min(self._marks)}, now=now))

    def end_input(self) -> list[Any]:
        """End the input: all timers fire, as configured; return what the operator emits for it."""
        last = {} if self._last is None else {self._node.uid: self._last}
        return self._run(
            (), ControlEvent(watermarks={self._node.uid: min(self._marks)}, end=True, last_event_times=last)
        )

    def num_event_time_timers(self) -> int:
        """Return how many event-time timers are pending, of all keys."""
        return sum(len(content.event_timers) for content in self._contents())

    def num_processing_time_timers(self) -> int:
        """Return how many processing-time timers are pending, of all keys."""
        return sum(len(content.processing_timers) for content in self._contents())

    def keys(self) -> list[Hashable]:
        """Return the keys that have state."""
        return [self._shown(key) for content in self._contents() for key in content.keys]

    def state(self, key: Hashable) -> dict[str, Any]:
        """Return the content of a key's state, by the name of its descriptor.

        Values of a state with a time to live come with the time of their last renewal, in milliseconds since the epoch.
        """
        return next(
            (
                dict(state)
                for content in self._contents()
                for stored_key, state in content.keys.items()
                if self._shown(stored_key) == key
            ),
            {},
        )

    def operator_state(self, name: str) -> list[Any]:
        """Return the content of a list of the function's operator state, by the name of its descriptor."""
        values: list[Any] = self.state(KEY).get(name, [])
        return list(values)

    def snapshot(self) -> Snapshot:
        """Return all state and timers, as a checkpoint holds them."""
        return dict(self._driven.store.pages)

    def restore(self, snapshot: Snapshot) -> None:
        """Go on from a snapshot, of this harness or another of the same operator, with the function opened again."""
        self._driven = self._opened(MemoryStore(snapshot))

    def close(self) -> None:
        """End the harness; the function is closed after each call."""
        self._driven.close()

    def _opened(self, store: MemoryStore) -> DrivenOperator:
        driven = DrivenOperator(self._plan, self._node, self._emit, self.clock, store)
        driven.begin()
        driven.end()
        return driven

    def _emit(self, tag: str | None, timed: list[Timed]) -> None:
        if tag is None:
            self.timed_output += timed
        else:
            self._side[tag] += [record for record, _ in timed]

    def _moved(self, *marks: int) -> list[Any]:
        self._marks = [max(mark, before) for mark, before in zip(marks, self._marks, strict=True)]
        return self._run((), ControlEvent(watermarks={self._node.uid: min(self._marks)}))

    def _run(
        self, records: Sequence[Timed], event: ControlEvent | None = None, broadcast: Sequence[Timed] = ()
    ) -> list[Any]:
        times = [time for _, time in (*records, *broadcast) if time is not None]
        self._last = max(times, default=self._last) if self._last is None else max([*times, self._last])
        before = len(self.timed_output)
        try:
            self._driven.take(records, event, broadcast)
            self._driven.end()
        except BaseException as error:
            self._driven.close(error)
            raise
        return [record for record, _ in self.timed_output[before:]]

    def _contents(self) -> Iterable[Content]:
        return (page.content() for page in self._driven.contents())

    def _shown(self, key: Any) -> Any:
        """Return a key as the author knows it."""
        if isinstance(getattr(self._node, "function", None), PartlyKeyed):
            return key[1] if len(key) == 2 else key[1:]
        return key


class OneInputHarness(_Harness):
    """One operator of one stream, in STREAMING semantics.

    That is a keyed process function, `map` or `flat_map` with state, a window, or a rolling `reduce`.

    Examples:
        >>> from datetime import timedelta
        >>> from typing import NamedTuple
        >>> from dagster_unified.api import TumblingEventTimeWindows
        >>> class Order(NamedTuple):
        ...     shop: str
        ...     amount: int
        >>> hourly = TumblingEventTimeWindows.of(timedelta(hours=1))
        >>> harness = OneInputHarness(lambda orders: orders.key_by("shop").window(hourly).sum("amount"), Order)
        >>> harness.process_element(Order("north", 3), timestamp=1_000)
        []
        >>> harness.process_element(Order("north", 4), timestamp=2_000)
        []
        >>> harness.num_event_time_timers()
        1
        >>> harness.process_watermark(3_600_000)
        [Order(shop='north', amount=7)]
    """

    def __init__(
        self,
        build: Callable[[DataStream[Any]], DataStream[Any]],
        input_type: Any,
        side_outputs: Sequence[OutputTag[Any]] = (),
        clock: ManualClock | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(build, (input_type,), side_outputs, clock, options)

    def process_element(self, value: Any, timestamp: int | None = None) -> list[Any]:
        """Process one record; return what the operator emits for it."""
        return self._run([(value, timestamp)])


class TwoInputHarness(_Harness):
    """One operator of two streams, in STREAMING semantics.

    That is a function behind `connect`, keyed or not, a join, a co-group, or an interval join.

    Examples:
        >>> from dagster_unified.api import CoMapFunction
        >>> class Sides(CoMapFunction):
        ...     def map1(self, value: int) -> str:
        ...         return f"first {value}"
        ...     def map2(self, value: str) -> str:
        ...         return f"second {value}"
        >>> harness = TwoInputHarness(lambda numbers, words: numbers.connect(words).map(Sides()), int, str)
        >>> harness.process_element1(7), harness.process_element2("x")
        (['first 7'], ['second x'])
    """

    def __init__(
        self,
        build: Callable[[DataStream[Any], DataStream[Any]], DataStream[Any]],
        first_type: Any,
        second_type: Any,
        side_outputs: Sequence[OutputTag[Any]] = (),
        clock: ManualClock | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(build, (first_type, second_type), side_outputs, clock, options)
        self._either = self._driven.program.input.records.python

    def process_element1(self, value: Any, timestamp: int | None = None) -> list[Any]:
        """Process one record of the first stream; return what the operator emits for it."""
        return self._run([(self._either(1, value, None), timestamp)])

    def process_element2(self, value: Any, timestamp: int | None = None) -> list[Any]:
        """Process one record of the second stream; return what the operator emits for it."""
        return self._run([(self._either(2, None, value), timestamp)])

    def process_watermark1(self, timestamp: int) -> list[Any]:
        """Move event time of the first stream; the operator's is the smaller of both."""
        return self._moved(timestamp, self._marks[1])

    def process_watermark2(self, timestamp: int) -> list[Any]:
        """Move event time of the second stream; the operator's is the smaller of both."""
        return self._moved(self._marks[0], timestamp)


class BroadcastHarness(_Harness):
    """One operator of a stream, keyed or not, and a broadcast one, in STREAMING semantics, with one key group.

    Examples:
        >>> from dagster_unified.api import BroadcastProcessFunction, MapStateDescriptor
        >>> NAMES = MapStateDescriptor("names", int, str)
        >>> class Named(BroadcastProcessFunction):
        ...     def process_element(self, value: int, ctx) -> list[str]:
        ...         return [ctx.get_broadcast_state(NAMES).get(value) or "?"]
        ...     def process_broadcast_element(self, value: tuple[int, str], ctx):
        ...         ctx.get_broadcast_state(NAMES).put(*value)
        >>> def named(numbers, names):
        ...     return numbers.connect(names.broadcast(NAMES)).process(Named())
        >>> harness = BroadcastHarness(named, int, tuple[int, str])
        >>> harness.process_element(1), harness.process_broadcast_element((1, "one")), harness.process_element(1)
        (['?'], [], ['one'])
        >>> harness.broadcast_state(NAMES)
        {1: 'one'}
    """

    def __init__(
        self,
        build: Callable[[DataStream[Any], DataStream[Any]], DataStream[Any]],
        input_type: Any,
        broadcast_type: Any,
        side_outputs: Sequence[OutputTag[Any]] = (),
        clock: ManualClock | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(build, (input_type, broadcast_type), side_outputs, clock, options)

    def process_element(self, value: Any, timestamp: int | None = None) -> list[Any]:
        """Process one record of the stream; return what the operator emits for it."""
        return self._run([(value, timestamp)])

    def process_broadcast_element(self, value: Any, timestamp: int | None = None) -> list[Any]:
        """Process one broadcast record; return what the operator emits for it."""
        return self._run((), broadcast=[(value, timestamp)])

    def broadcast_state(self, descriptor: MapStateDescriptor[Any, Any]) -> dict[Any, Any]:
        """Return the broadcast map that a descriptor names."""
        codec, data = self._driven.groups.broadcast, self._driven.store.read_page(BROADCAST)
        return {} if codec is None or data is None else codec.decode(data).get(descriptor.name, {})


def _operator(decided: Plan) -> g.Node:
    graph = decided.graph
    sink = next(n for n in graph.sinks if n.name == _OUTPUT)
    node = graph.node(graph.inputs(sink.id)[0].source)
    if node.step is None or isinstance(node, g.AssignTimestampsNode):
        raise PipelineError(
            f"harness: '{node.name}' is no operator that runs in Python; give a window, a function or a rolling"
            " operation, or use run_pipeline"
        )
    for edge in graph.inputs(node.id):
        before = graph.node(edge.source)
        if isinstance(before, g.MapNode) and before.records is not None and hasattr(before.records.python, UNITED):
            before = graph.node(graph.inputs(before.id)[0].source)
        if not isinstance(before, g.AssignTimestampsNode):
            raise PipelineError(
                f"harness: '{before.name}' comes before '{node.name}', and a harness drives one operator; build it"
                " alone, or use run_pipeline for several"
            )
    return node
