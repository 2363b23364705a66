"""Streams of two types in one operator: `connect`, broadcast state, window joins, co-groups and interval joins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, Self, get_args, get_origin, get_type_hints

from dagster_unified.api.base import BaseStream
from dagster_unified.api.building import NOT_GIVEN, agreed_output, located, main_output
from dagster_unified.api.windowed import Windows
from dagster_unified.errors import PipelineError, RecordTypeError
from dagster_unified.graph import nodes
from dagster_unified.graph.nodes import ExchangeKind, Key, Naming, Node, Partitioning
from dagster_unified.graph.operator_state import CHOOSING
from dagster_unified.operators.arrow_functions import TABLE
from dagster_unified.operators.broadcast import Broadcasting, checked
from dagster_unified.operators.connected import (
    CoFlatMap,
    CoMap,
    CoProcess,
    EitherKey,
    IntervalJoin,
    OneSidesKey,
    SideKey,
    Tag,
    WindowedPairs,
    either_type,
)
from dagster_unified.operators.functions.base import KeySelector, OutputTag
from dagster_unified.operators.functions.two_streams import (
    BroadcastProcessFunction,
    KeyedBroadcastProcessFunction,
    KeyedCoProcessFunction,
    ProcessJoinFunction,
)
from dagster_unified.operators.functions.type_variables import A, B, T
from dagster_unified.operators.keyed import KEYED_FORMS, PartlyKeyed
from dagster_unified.operators.state.handles import MapStateDescriptor
from dagster_unified.operators.time import checked_span
from dagster_unified.operators.windows import Evictor, Trigger, WindowAssigner
from dagster_unified.records import type_name

if TYPE_CHECKING:
    from typing_extensions import TypeForm

Fields = str | int | Sequence[str | int]
"""A key that fields make: the name or the index of one, or several."""


@located
class Connected(Generic[A, B]):
    """Two streams that an operator sees together: what `ConnectedStreams` builds operators with."""

    def __init__(
        self,
        first: BaseStream[A],
        second: BaseStream[B],
        keys: tuple[Any, Any] = (None, None),
        key_type: Any = None,
    ) -> None:
        first._pipeline.check_same(second._pipeline, first._where("connect"))
        self._first, self._second, self._keys, self._key_type = first, second, keys, key_type

    def _on_batches(self, function: Any, output_type: Any) -> Node:
        name = getattr(function, "__name__", None) or type(function).__name__
        kinds = {u.partitioning.kind if u.partitioning else None for u in self._second._upstream}
        if kinds != {ExchangeKind.BROADCAST}:
            raise PipelineError(
                f"{self._where(name)}: map_batches needs the second stream in every subtask; connect(other.broadcast())"
            )
        self._first._check_function(name, function)
        pipeline, upstream = self._first._pipeline, [*self._first._upstream, *self._second._upstream]
        attributes = {"naming": Naming.FUNCTION, "records": pipeline._record_type(output_type, name)}
        if pipeline.is_body:
            return pipeline._add(nodes.BroadcastBatchesNode, upstream, name, function=function, **attributes)
        if self._keys[0] is not None:
            raise PipelineError(
                f"{self._where(name)}: map_batches with a broadcast stream has no state of a key, and the first stream"
                " is keyed; leave key_by out, or use connect(rules.broadcast(descriptor)).process(function)"
            )
        return pipeline._add(
            nodes.BroadcastTableNode,
            upstream,
            name,
            function=Broadcasting(function, (TABLE,)),
            key=Key(),
            **attributes,
        )

    def _keyed(self) -> BaseStream[Any]:
        """Return both streams as one of `Either`, keyed."""
        first = _getter(self._first, self._keys[0], self._key_type)
        second = _getter(self._second, self._keys[1], self._key_type)
        if first is not None and second is not None:
            if first[1] != second[1]:
                raise RecordTypeError(
                    f"{self._where('key_by')}: the first stream's key is a {type_name(first[1])} and the second's a "
                    f"{type_name(second[1])}; give both the same, or map one of them"
                )
            return self._stream().key_by(EitherKey(first[0], second[0]), key_type=first[1])
        keyed = first if first is not None else second
        assert keyed is not None
        get, kind = keyed
        parts = _parts(kind)
        key_type: Any = tuple.__class_getitem__((int, *(part | None for part in parts)))
        return self._stream().key_by(OneSidesKey(self._keyed_side, get, len(parts)), key_type=key_type)

    @property
    def _keyed_side(self) -> int:
        """The side that is keyed; 0 where both are, or neither is."""
        return 0 if (self._keys[0] is None) == (self._keys[1] is None) else 1 if self._keys[1] is None else 2

    def _apply(
        self,
        kind: str,
        both: CoMap | CoFlatMap | CoProcess,
        output_type: Any,
        unwrap: Callable[[Any], Any],
    ) -> BaseStream[Any]:
        name = type(both.function).__name__
        output = output_type
        if output is None:
            output = agreed_output(both.function, (both.first, both.second), unwrap, self._where(name))
        if self._keys == (None, None):
            stream: BaseStream[Any] = getattr(self._stream(), kind)(both, output)
            return stream._called(name, Naming.FUNCTION)
        function = KEYED_FORMS[kind](both)
        return (
            self._keyed()
            .process(PartlyKeyed(function, self._keyed_side) if self._keyed_side else function, output)
            ._called(name, Naming.FUNCTION)
        )

    def _stream(self) -> BaseStream[Any]:
        first, second = (s._records("connect") for s in (self._first, self._second))
        either = either_type(first.python, second.python)
        sides = [*_tagged(self._first, 1, either), *_tagged(self._second, 2, either)]
        return sides[0].union(*sides[1:])

    def _expect(self, function: Any, kinds: tuple[type, ...], method: str) -> None:
        if not isinstance(function, kinds):
            hint = ""
            if isinstance(function, KeyedCoProcessFunction):
                hint = (
                    "; call key_by on the connected streams first"
                    if not self._keyed_side
                    else "; it needs both streams keyed, so call key_by on the other one too"
                )
            raise PipelineError(f"{self._where(method)}: expected a {kinds[0].__name__}, got {function!r}{hint}")

    def _where(self, what: str) -> str:
        return self._first._where(what)


@located
class Pairs(Generic[A, B]):
    """Two streams whose records of one key and window come together."""

    kind: str

    def __init__(self, first: BaseStream[A], second: BaseStream[B]) -> None:
        self._first, self._second = first, second
        self._keys: list[Any] = []
        self._key_type: Any = None

    def where(
        self,
        key: Fields | Callable[[A], object] | KeySelector[A, object],
        key_type: TypeForm[Any] = NOT_GIVEN,
    ) -> Self:
        """Sets the first stream's key."""
        self._keys, self._key_type = [key], key_type
        return self

    def equal_to(self, key: Fields | Callable[[B], object] | KeySelector[B, object]) -> Self:
        """Sets the second stream's key."""
        self._keys = [*self._keys[:1], key]
        return self

    def _windows(self, assigner: WindowAssigner[Any, Any]) -> Windows[Any, Any]:
        if len(self._keys) != 2:
            where = self._first._where(self.kind)
            raise PipelineError(f"{where}: give the keys first, with where(key) and equal_to(key)")
        first, second = self._keys
        keyed = Connected(self._first, self._second, (first, second), self._key_type)._keyed()
        return Windows(keyed, assigner)


@located
class PairedWindows(Generic[A, B]):
    """Windows that hold the records of both streams."""

    def __init__(self, windows: Windows[Any, Any], kind: str) -> None:
        self._windows, self._kind = windows, kind

    def trigger(self, trigger: Trigger[Any, Any]) -> Self:
        """As `WindowedStream.trigger`."""
        self._windows.trigger(trigger)
        return self

    def evictor(self, evictor: Evictor[Any, Any]) -> Self:
        """As `WindowedStream.evictor`; it sees records of both streams."""
        self._windows.evictor(evictor)
        return self

    def allowed_lateness(self, lateness: timedelta) -> Self:
        """As `WindowedStream.allowed_lateness`."""
        self._windows.allowed_lateness(lateness)
        return self

    def _apply(self, function: Any, kind: str, output_type: Any, unwrap: Callable[[Any], Any]) -> Node:
        """Call a function, or its method `kind`, for a window's pairs or groups."""
        method = getattr(function, self._kind, function)
        records = self._windows._stream._output(self._kind, method, output_type, unwrap)
        return self._windows._with(WindowedPairs(function, kind), records, None, "apply", called=self._kind)

    def _expect(self, function: Any, kinds: tuple[type, ...]) -> None:
        if not isinstance(function, kinds) and (not callable(function) or isinstance(function, type)):
            raise PipelineError(f"{self._windows._where(self._kind)}: expected a {kinds[0].__name__}, got {function!r}")


@located
class Intervals(Generic[A, B]):
    """Two keyed streams and the interval in which their records make pairs."""

    def __init__(self, left: BaseStream[A], right: BaseStream[B]) -> None:
        self._left, self._right = left, right
        self._bounds: tuple[int, int] | None = None
        self._exclusive = [0, 0]
        self._late: list[OutputTag[Any] | None] = [None, None]

    def between(self, lower: timedelta, upper: timedelta) -> Self:
        """Pairs a left record with the right ones from `lower` to `upper` after it, both included.

        Negative is before.

        Examples:
            >>> class Later(ProcessJoinFunction):
            ...     def process_element(self, left: Sale, right: Sale, ctx) -> list[int]:
            ...         return [right.amount - left.amount]
            >>> joined = timed.key_by("shop").interval_join(timed.key_by("shop"))
            >>> collect(joined.between(timedelta(minutes=1), timedelta(hours=2)).process(Later()))
            [2]
        """
        low = checked_span(f"{self._where()}: the lower bound", lower)
        high = checked_span(f"{self._where()}: the upper bound", upper)
        if low > high:
            raise PipelineError(f"{self._where()}: the lower bound, {lower}, is above the upper, {upper}")
        self._bounds = (low, high)
        return self

    def lower_bound_exclusive(self) -> Self:
        """Leaves out what is exactly at the lower bound."""
        self._exclusive[0] = 1
        return self

    def upper_bound_exclusive(self) -> Self:
        """Leaves out what is exactly at the upper bound."""
        self._exclusive[1] = 1
        return self

    def side_output_left_late_data(self, tag: OutputTag[A]) -> Self:
        """Sends left records that come after the watermark to a side output.

        Without it they are dropped and counted. None comes in BATCH.
        """
        self._left._check_late_tag(tag, self._where())
        self._late[0] = tag
        return self

    def side_output_right_late_data(self, tag: OutputTag[B]) -> Self:
        """Sends right records that come after the watermark to a side output; else they are dropped and counted."""
        self._right._check_late_tag(tag, self._where())
        self._late[1] = tag
        return self

    def _pairs(self, function: Any, output_type: Any) -> BaseStream[Any]:
        if not isinstance(function, ProcessJoinFunction):
            raise PipelineError(f"{self._where()}: expected a ProcessJoinFunction, got {function!r}")
        if self._bounds is None:
            raise PipelineError(f"{self._where()}: give the interval first, with between(lower, upper)")
        streams = (self._left, self._right)
        if not all(s._pipeline._node(u.node).timestamped for s in streams for u in s._upstream):
            raise PipelineError(
                f"{self._where()}: an interval join goes by event time; "
                "call assign_timestamps_and_watermarks on both streams before key_by"
            )
        lower, upper = self._bounds[0] + self._exclusive[0], self._bounds[1] - self._exclusive[1]
        types = (self._left._records("interval_join").python, self._right._records("interval_join").python)
        name = type(function).__name__
        records = self._left._output(name, function.process_element, output_type, main_output)
        join = IntervalJoin(function, lower, upper, types, (self._late[0], self._late[1]))
        keys = (self._left._key_selector, self._right._key_selector)
        connected = Connected(self._left, self._right, keys)
        return connected._apply("process", CoProcess(join), records, main_output)._called(name, Naming.FUNCTION)

    def _where(self) -> str:
        return self._left._where("interval_join")


def _tagged(stream: BaseStream[Any], number: int, either: Any) -> list[BaseStream[Any]]:
    """Return a stream's records as those of `Either`.

    An exchange that chooses the subtask of its records chooses one of the operator that sees both streams.
    """
    streams = []
    for part, exchange in stream._by_exchange(CHOOSING):
        tagged: BaseStream[Any] = part.map(Tag(either, number), either)._called(
            f"{_name(part)} as {number}", Naming.LIBRARY
        )
        if exchange is not None:
            key = None if exchange.key is None else _key_of_side(part, exchange.key, tagged)
            tagged = tagged._over(tagged._over_exchange(exchange.kind, key, exchange.partitioner))
        streams.append(tagged)
    return streams


def _key_of_side(stream: BaseStream[Any], key: nodes.Key, tagged: BaseStream[Any]) -> nodes.Key:
    getter = _getter(stream, key, None)
    assert getter is not None
    get, kind = getter
    return tagged._key((EitherKey(get, get),), kind)


def _name(stream: BaseStream[Any]) -> str:
    return stream._pipeline._node(stream._upstream[0].node).name


def _getter(stream: BaseStream[Any], key: Any, key_type: Any) -> tuple[SideKey, Any] | None:
    """Return the function that reads a record's key, and the key's type; None where there is no key."""
    if key is None:
        return None
    records = stream._records("connect")
    selected = (
        key
        if isinstance(key, nodes.Key)
        else stream._key(tuple(key) if isinstance(key, (tuple, list)) else (key,), key_type)
    )
    if selected.computed is not None:
        function = selected.computed.function
        get, computed = getattr(function, "get_key", function), selected.computed
        return SideKey(get, computed.where, selected.describe()), computed.python
    getters = [records.getter(name) for name in selected.fields]
    kinds = [records.type_of(name) for name in selected.fields]
    read = getters[0] if len(getters) == 1 else _Fields(tuple(getters))
    kind = kinds[0] if len(kinds) == 1 else tuple.__class_getitem__(tuple(kinds))
    fields = selected.describe()
    return SideKey(read, f"{stream._pipeline.name}: key_by({fields})", fields), kind


def _parts(kind: Any) -> tuple[Any, ...]:
    if get_origin(kind) is tuple:
        return get_args(kind)
    return tuple(get_type_hints(kind).values()) if isinstance(kind, type) and issubclass(kind, tuple) else (kind,)


class _Fields:
    """Reads several fields of a record, as a tuple."""

    def __init__(self, getters: tuple[Callable[[Any], Any], ...]) -> None:
        self.getters = getters

    def __call__(self, record: Any) -> tuple[Any, ...]:
        return tuple(get(record) for get in self.getters)


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
        """Return the operator's stream, keyed by `key` if there is one."""
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
