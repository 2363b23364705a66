"""`DataStream` and `KeyedStream`: the fluent API.

Each call adds a node to the pipeline's graph and returns the stream after it. Names follow PyFlink. Types are checked
here, while the graph is built: an operator's output type is its function's return annotation or `output_type=`; a
missing or contradictory one is an error that names the operator.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, overload

import pyarrow as pa
from msgspec import inspect as mi

from dagster_unified.api.broadcast import BroadcastConnectedStream, BroadcastStream, KeyedBroadcastConnectedStream
from dagster_unified.api.building import GraphBuilder, Upstream
from dagster_unified.api.connected import (
    CoGroupedStreams,
    ConnectedStreams,
    IntervalJoined,
    JoinedStreams,
    KeyedConnectedStreams,
)
from dagster_unified.api.located import located
from dagster_unified.api.record_types import NOT_GIVEN, itself, main_output, stated_output, type_argument
from dagster_unified.api.watermarks import WatermarkStrategy
from dagster_unified.api.windows import WindowedStream
from dagster_unified.arrow_types import has, is_number
from dagster_unified.connectors.printing import PrintSink
from dagster_unified.errors import PipelineError, RecordTypeError, nearest
from dagster_unified.graph import nodes
from dagster_unified.graph.code import field_of
from dagster_unified.graph.connectors import Boundedness, Sink, Source
from dagster_unified.graph.expressions import Column, alias_of, columns_read, is_column, makes_column
from dagster_unified.graph.nodes import Chaining, ExchangeKind, Graph, Key, Naming, Node, Partitioning
from dagster_unified.operators.checkpointed_batches import OfBatches
from dagster_unified.operators.functions.base import (
    FilterFunction,
    FlatMapFunction,
    Function,
    KeyedProcessFunction,
    KeySelector,
    MapFunction,
    OutputTag,
    Partitioner,
    ProcessFunction,
    ReduceFunction,
)
from dagster_unified.operators.functions.batches import KeyedBatchFunction
from dagster_unified.operators.functions.checkpoints import checkpointed
from dagster_unified.operators.functions.iterations import hears_of_epochs
from dagster_unified.operators.functions.keyed import KEYED_FORMS, may_hold_state
from dagster_unified.operators.functions.type_variables import B, K, KeyOut, R, T, W
from dagster_unified.operators.layout import TIMESTAMP, ComputedKey
from dagster_unified.operators.state.map import MapStateDescriptor
from dagster_unified.operators.time import checked_span
from dagster_unified.operators.windows import (
    CountEvictor,
    CountTrigger,
    GlobalWindow,
    GlobalWindows,
    PurgingTrigger,
    WindowAssigner,
)
from dagster_unified.operators.windows.triggers import SlidingCountTrigger
from dagster_unified.records import (
    RecordType,
    arrow_type,
    equal_by_more,
    inspected,
    not_in_a_key,
    return_type,
    type_name,
)
from dagster_unified.values import check_count

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from typing_extensions import TypeForm

    from dagster_unified.execution.collecting import CollectedRecords


@located
class DataStream(Generic[T]):
    """A stream of records of one type (Flink: *Operators*).

    Its methods say what an operator does in both modes. One that fails while the pipeline is built raises
    `PipelineError` or `RecordTypeError`, with the operator's name.
    """

    def __init__(self, pipeline: GraphBuilder, node: int | None, upstream: tuple[Upstream, ...] = ()) -> None:
        self._pipeline = pipeline
        self._last = node
        self._upstream = upstream or (Upstream(node),)  # type: ignore[arg-type]

    # The operator itself

    def name(self, name: str) -> Self:
        """Names the operator, in plans, stages and errors."""
        return self._called(name, Naming.AUTHOR)

    def uid(self, uid: str) -> Self:
        """Sets the id under which the operator's state is kept; unique in the pipeline.

        A STREAMING job, a savepoint and a partition with carried state find an operator's state by it.
        """
        return self._set(uid=uid, given_uid=True)

    def set_parallelism(self, parallelism: int) -> Self:
        """In how many subtasks the operator runs. Unset, `parallelism.default` decides.

        BATCH runs as many tasks. STREAMING has as many subtasks where a function can tell them apart: behind
        `partition_custom`, `broadcast` and `global_`, and with operator state. All else there shares the tasks of the
        job.
        """
        _check_parallelism(parallelism, self._where())
        return self._set(parallelism=parallelism)

    def start_new_chain(self) -> Self:
        """Begins a new task at this operator (Flink: *Task Chaining*)."""
        return self._set(chaining=Chaining.HEAD)

    def disable_chaining(self) -> Self:
        """Keeps this operator in a task of its own (Flink: *Task Chaining*)."""
        return self._set(chaining=Chaining.NEVER)

    # Functions on records

    def map(
        self, function: Callable[[T], R] | MapFunction[T, R], output_type: TypeForm[R] = NOT_GIVEN
    ) -> DataStream[R]:
        """One record in, one record out. In both modes a call per record, in one pass with its neighbours.

        Examples:
            >>> collect(numbers.map(lambda n: n * 2, int))
            [2, 4, 6]
        """
        return self._apply(nodes.MapNode, function, "map", output_type, itself)

    def flat_map(
        self, function: Callable[[T], Iterable[R]] | FlatMapFunction[T, R], output_type: TypeForm[R] = NOT_GIVEN
    ) -> DataStream[R]:
        """One record in, any number out.

        In both modes a call per record; each result carries the record's event time.

        Examples:
            >>> collect(numbers.flat_map(lambda n: [n] * n, int))
            [1, 2, 2, 3, 3, 3]
        """
        return self._apply(nodes.FlatMapNode, function, "flat_map", output_type, main_output)

    def filter(self, function: Callable[[T], bool] | FilterFunction[T]) -> DataStream[T]:
        """Keeps the records for which the function is true, in both modes.

        Examples:
            >>> collect(numbers.filter(lambda n: n % 2 == 1))
            [1, 3]
        """
        name = self._name_of(function, "filter")
        self._check_function(name, getattr(function, "filter", function))
        return self._function(nodes.FilterNode, name, function, records=self._records(name))

    def map_batches(
        self, function: Callable[[pa.RecordBatch], pa.RecordBatch], output_type: TypeForm[R]
    ) -> DataStream[R]:
        """A function from Arrow batches to Arrow batches, for vectorised code.

        How records are cut into batches is not defined, in either mode. A stream with event times has them in the
        column `__ts`; keep it where the number of rows changes.

        Examples:
            >>> import pyarrow.compute as pc
            >>> def with_tax(batch):
            ...     return batch.set_column(1, "amount", pc.multiply(batch["amount"], 2))
            >>> [sale.amount for sale in collect(sales.map_batches(with_tax, Sale))]
            [6, 8, 10]
        """
        name = self._name_of(function, "map_batches")
        if isinstance(function, KeyedBatchFunction):
            raise PipelineError(
                f"{self._where(name)}: a KeyedBatchFunction needs a keyed stream, so call key_by before it"
            )
        self._check_function(name, function)
        if checkpointed(function) is not None and not isinstance(self, KeyedStream):
            return self._on_batches(nodes.CheckpointedBatchesNode, name, OfBatches(function), output_type, key=Key())
        return self._on_batches(nodes.MapBatchesNode, name, function, output_type)

    def _on_batches(self, kind: type[Node], name: str, function: Any, output_type: Any, **more: Any) -> DataStream[Any]:
        """An operator that runs a function on Arrow batches."""
        try:
            records = self._pipeline._record_type(output_type, name)
        except RecordTypeError as error:
            return self._untyped(nodes.MapBatchesNode, name, function, error)
        return self._next(kind, name, naming=_naming(function), records=records, function=function, **more)

    def process(self, function: ProcessFunction[T, R], output_type: TypeForm[R] = NOT_GIVEN) -> DataStream[R]:
        """Runs a `ProcessFunction`: a record in, any number out, with timestamps and side outputs.

        Examples:
            >>> odd = OutputTag("odd", int)
            >>> class Split(ProcessFunction):
            ...     def process_element(self, value: int, ctx) -> list[int]:
            ...         if value % 2 == 0:
            ...             return [value]
            ...         ctx.output(odd, value)
            ...         return []
            >>> even = numbers.process(Split())
            >>> collect(even), collect(even.get_side_output(odd))
            ([2], [1, 3])
        """
        if not isinstance(function, ProcessFunction):
            raise PipelineError(
                f"{self._where(_name_of(function, 'process'))}: process needs a ProcessFunction; "
                "a KeyedProcessFunction needs a keyed stream, so call key_by before it"
            )
        return self._apply(nodes.ProcessNode, function, "process_element", output_type, main_output)

    # Columns, left to Catalyst

    @overload
    def select(self, *columns: str | Column, output_type: TypeForm[R]) -> DataStream[R]: ...
    @overload
    def select(self, *columns: str | Column) -> DataStream[Any]: ...
    def select(self, *columns: str | Column, output_type: Any = None) -> DataStream[Any]:
        """Projects to columns: SQL expressions as text, or `functions`. Runs in Catalyst, with no Python worker.

        `output_type` names the resulting record; it may be left out where the columns are plain names.

        Examples:
            >>> class Amount(NamedTuple):
            ...     shop: str
            ...     cents: int
            >>> collect(sales.select("shop", "amount * 100", output_type=Amount))[0]
            Amount(shop='north', cents=300)
        """
        if not columns:
            raise PipelineError(f"{self._where('select')}: select needs at least one column")
        records = self._records("select")
        self._check_columns(columns, "select")
        if output_type is not None:
            named = self._pipeline._record_type(output_type, "select")
            if len(named.names) != len(columns):
                raise RecordTypeError(
                    f"{self._where('select')}: {len(columns)} columns are selected, "
                    f"and {named.describe()} has {len(named.names)} fields; each field names a column, in order"
                )
            return self._next(nodes.SelectNode, "select", records=named, columns=columns)
        plain = [_plain_name(c) for c in columns]
        if any(name not in records.names for name in plain):
            computed = next(c for c, n in zip(columns, plain, strict=True) if n not in records.names)
            raise RecordTypeError(
                f"{self._where('select')}: output_type is needed, since the type of {computed!r} is known to Spark only"
            )
        projected = _projected(records, [str(n) for n in plain])
        return self._next(nodes.SelectNode, "select", records=projected, columns=columns)

    def with_columns(
        self, columns: Mapping[str, str] | Mapping[str, Column] | Mapping[str, str | Column], output_type: TypeForm[R]
    ) -> DataStream[R]:
        """Adds or replaces columns, each a SQL expression as text or `functions`.

        `output_type` is the whole resulting record.

        Examples:
            >>> class Taxed(NamedTuple):
            ...     shop: str
            ...     amount: int
            ...     tax: int
            >>> collect(sales.with_columns({"tax": "amount * 2"}, Taxed))[0]
            Taxed(shop='north', amount=3, tax=6)
        """
        before = self._records("with_columns")
        self._check_columns(columns.values(), "with_columns", tuple(columns))
        records = self._pipeline._record_type(output_type, "with_columns")
        available = [*before.names, *(name for name in columns if name not in before.names)]
        lost = [name for name in columns if name not in records.names]
        if lost:
            raise RecordTypeError(
                f"{self._where('with_columns')}: column '{lost[0]}' is not in output_type, {records.describe()}; "
                "add it there, or do not compute it"
            )
        odd = [name for name in records.names if name not in available]
        if odd:
            raise RecordTypeError(
                f"{self._where('with_columns')}: no column '{odd[0]}' for {records.describe()}; "
                f"there are {', '.join(available)}{nearest(odd[0], available)}"
            )
        return self._next(
            nodes.WithColumnsNode,
            "with_columns",
            records=records,
            columns=tuple(columns.values()),
            names=tuple(columns),
        )

    def where(self, condition: str | Column) -> DataStream[T]:
        """Keeps the rows for which a SQL condition, or one of `functions`, holds. Runs in Catalyst.

        Examples:
            >>> collect(sales.where("amount > 4"))[0].amount
            5
        """
        self._check_columns((condition,), "where")
        return self._next(nodes.WhereNode, "where", records=self._records("where"), columns=(condition,))

    def lookup_join(
        self,
        table: Source[Any],
        on: str | Mapping[str, str],
        columns: Mapping[str, str],
        output_type: TypeForm[R],
        how: Literal["left", "inner"] = "left",
    ) -> DataStream[R]:
        """Joins each record with the rows of a small bounded table that have its key.

        Runs as Spark's broadcast join, with no Python worker. `on` is a field that both have, or fields and the table's
        columns; `columns` are new fields, and the table's columns that they are from. A record with no row is kept with
        None ("left") or dropped ("inner"); one with several gives several; None finds nothing. In BATCH the table is as
        it is when the stage runs, in STREAMING as it is, or was a second before, at each micro-batch.

        Examples:
            >>> class Shop(NamedTuple):
            ...     name: str
            ...     city: str
            >>> class Located(NamedTuple):
            ...     shop: str
            ...     city: str | None
            >>> shops = CsvSource("shops.csv", Shop, name="shops")
            >>> found = sales.lookup_join(shops, {"shop": "name"}, {"city": "city"}, Located)
            >>> collect(found, inputs={"shops": [Shop("north", "Oslo")]})[:2]
            [Located(shop='north', city='Oslo'), Located(shop='south', city=None)]
        """
        name = "lookup_join"
        before, where = self._records(name), self._where(name)
        if not isinstance(table, Source) or table.boundedness is not Boundedness.BOUNDED:
            raise PipelineError(
                f"{where}: expected a bounded source such as CsvSource(path, Airport), "
                f"got {table.describe() if isinstance(table, Source) else repr(table)}"
            )
        if getattr(table, "on_malformed", "fail") != "fail":
            raise PipelineError(
                f"{where}: '{table.name}' drops or diverts malformed rows, which a lookup does not; "
                "use on_malformed='fail'"
            )
        if how not in ("left", "inner"):
            raise PipelineError(f"{where}: how is 'left' or 'inner', not {how!r}")
        pairs = {on: on} if isinstance(on, str) else on
        if not isinstance(pairs, Mapping) or not pairs:
            raise PipelineError(
                f"{where}: on is a field that both have, or fields and the table's columns, "
                f"such as {{'origin': 'faa'}}, not {on!r}"
            )
        _check_lookup_keys(before, table, pairs, where)
        records = self._pipeline._record_type(output_type, name)
        _check_lookup_fields(before, table, columns, records, how, where)
        return self._next(
            nodes.LookupNode,
            name,
            records=records,
            columns=(),
            source=table,
            on=tuple(pairs.items()),
            found=tuple(columns.items()),
            inner=how == "inner",
        )

    # Time

    def assign_timestamps_and_watermarks(self, strategy: WatermarkStrategy[T]) -> DataStream[T]:
        """Assigns event times to records.

        In STREAMING it also emits watermarks; in BATCH those are not needed (FLIP-134).

        Examples:
            >>> strategy = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(minutes=1))
            >>> timed = sales.assign_timestamps_and_watermarks(strategy.with_timestamp_assigner("at"))
            >>> windows = timed.key_by("shop").window(TumblingEventTimeWindows.of(timedelta(hours=1)))
            >>> sorted(sale.amount for sale in collect(windows.sum("amount")))
            [3, 4, 5]
        """
        records, where = self._records("timestamps"), self._where("timestamps")
        assigner = strategy.assigner
        if assigner is None:
            raise PipelineError(
                f"{where}: the strategy has no timestamp assigner; add with_timestamp_assigner('field') or a function"
            )
        if isinstance(assigner, str):
            _check_field(records, assigner, where)
            kind = records.schema.field(assigner).type
            if not (pa.types.is_timestamp(kind) or pa.types.is_integer(kind)):
                raise PipelineError(
                    f"{where}: field '{assigner}' is a {kind}; a timestamp is a datetime, or an int in milliseconds"
                )
        return self._next(
            nodes.AssignTimestampsNode,
            "timestamps",
            records=records,
            timestamped=True,
            assigner=assigner,
            max_out_of_orderness_ms=_millis(f"{where}: the out-of-orderness bound", strategy.max_out_of_orderness),
            idleness_ms=_millis(f"{where}: the idle timeout", strategy.idleness),
            generator=strategy.generator,
            watermark_group=strategy.watermark_group,
            max_drift_ms=_millis(f"{where}: the drift", strategy.max_drift) or 0,
        )

    # Exchanges

    @overload
    def key_by(
        self, key: Callable[[T], K] | KeySelector[T, K], /, *, key_type: TypeForm[K] = NOT_GIVEN
    ) -> KeyedStream[K, T]: ...
    @overload
    def key_by(self, *key: str | int, key_type: TypeForm[K]) -> KeyedStream[K, T]: ...
    @overload
    def key_by(self, *key: str | int) -> KeyedStream[Any, T]: ...
    def key_by(self, *key: Any, key_type: Any = None) -> KeyedStream[Any, T]:
        """Partitions by key: one or more field names, or a function of the record.

        The annotation of the function, or `key_type`, gives the key's type. A None key is an error. In BATCH the
        exchange is a barrier and a key's records come together, sorted by event time.

        Examples:
            >>> totals = sales.key_by("shop").sum("amount")
            >>> sorted((sale.shop, sale.amount) for sale in collect(totals))
            [('north', 8), ('south', 4)]
            >>> [sale.amount for sale in collect(totals, "STREAMING")]
            [3, 4, 8]
        """
        if not key:
            raise PipelineError(f"{self._where('key_by')}: give a field's name or a function")
        return KeyedStream(self._pipeline, self._upstream, self._key(key, key_type))

    def union(self, *streams: DataStream[T]) -> DataStream[T]:
        """Records of several streams of one type, in no particular order.

        Examples:
            >>> sorted(collect(numbers.union(numbers.map(lambda n: -n, int))))
            [-3, -2, -1, 1, 2, 3]
        """
        untyped = next((s for s in streams if isinstance(s, UntypedStream)), None)
        if untyped is not None:
            return untyped
        mine = self._records("union")
        upstream = list(self._upstream)
        for other in streams:
            self._pipeline.check_same(other._pipeline, self._where("union"))
            theirs = other._records("union")
            if theirs.schema != mine.schema or theirs.shape != mine.shape:
                raise RecordTypeError(
                    f"{self._where('union')}: streams of different types cannot be united: {mine.describe()} and "
                    f"{theirs.describe()}; map one to the other's type"
                )
            upstream += other._upstream
        return DataStream(self._pipeline, None, tuple(upstream))

    def rebalance(self) -> DataStream[T]:
        """Spreads records evenly over the next operator's partitions (Flink: *Physical Partitioning*)."""
        return self._exchange(ExchangeKind.REBALANCE)

    def rescale(self) -> DataStream[T]:
        """Spreads each partition's records over some of the next operator's partitions.

        Spark does it without an all-to-all exchange where it can.
        """
        return self._exchange(ExchangeKind.RESCALE)

    def shuffle(self) -> DataStream[T]:
        """Spreads records at random over the next operator's partitions, in both modes."""
        return self._exchange(ExchangeKind.SHUFFLE)

    @overload
    def broadcast(self) -> DataStream[T]: ...
    @overload
    def broadcast(self, *descriptors: MapStateDescriptor[Any, Any]) -> BroadcastStream[T]: ...
    def broadcast(self, *descriptors: MapStateDescriptor[Any, Any]) -> DataStream[T] | BroadcastStream[T]:
        """Sends every record to every partition of the next operator, in both modes.

        With descriptors, it fills broadcast state: connect another stream to it. There is an example at
        `BroadcastConnectedStream.process`.
        """
        return BroadcastStream(self, descriptors) if descriptors else self._exchange(ExchangeKind.BROADCAST)

    def global_(self) -> DataStream[T]:
        """Sends all records to one partition of the next operator, in both modes."""
        return self._exchange(ExchangeKind.GLOBAL)

    def forward(self) -> DataStream[T]:
        """Keeps records in their partition; an error where the parallelism changes."""
        return self._exchange(ExchangeKind.FORWARD)

    @overload
    def partition_custom(
        self,
        partitioner: Callable[[K, int], int] | Partitioner[K],
        key_selector: Callable[[T], K] | KeySelector[T, K],
        key_type: TypeForm[K] = NOT_GIVEN,
    ) -> DataStream[T]: ...
    @overload
    def partition_custom(
        self,
        partitioner: Callable[[Any, int], int] | Partitioner[Any],
        key_selector: str | int,
        key_type: TypeForm[Any] = NOT_GIVEN,
    ) -> DataStream[T]: ...
    def partition_custom(self, partitioner: Any, key_selector: Any, key_type: Any = None) -> DataStream[T]:
        """Sends a record to partition `partitioner(key, number of partitions)`.

        The next operator needs `set_parallelism`.

        Examples:
            >>> spread = sales.partition_custom(lambda shop, count: len(shop) % count, "shop")
            >>> len(collect(spread.map(lambda sale: sale.amount, int).set_parallelism(2)))
            3
        """
        _check_not_opened(partitioner, self._where("partition_custom"))
        key = self._key((key_selector,), key_type)
        return self._exchange(ExchangeKind.CUSTOM, key, getattr(partitioner, "partition", partitioner))

    # Two streams

    @overload
    def connect(self, other: DataStream[B]) -> ConnectedStreams[T, B]: ...
    @overload
    def connect(self, other: BroadcastStream[B]) -> BroadcastConnectedStream[T, B]: ...
    def connect(
        self, other: DataStream[B] | BroadcastStream[B]
    ) -> ConnectedStreams[T, B] | BroadcastConnectedStream[T, B]:
        """Connects two streams of different types for one operator, with keyed state where they are keyed.

        The other one may be broadcast with state.

        Examples:
            >>> class Either(CoMapFunction):
            ...     def map1(self, value: int) -> str:
            ...         return f"number {value}"
            ...     def map2(self, value: Sale) -> str:
            ...         return f"sale in {value.shop}"
            >>> sorted(collect(numbers.connect(sales).map(Either())))[:4]
            ['number 1', 'number 2', 'number 3', 'sale in north']
        """
        if isinstance(other, UntypedStream):
            return other  # type: ignore[return-value]
        if isinstance(other, BroadcastStream):
            return BroadcastConnectedStream(self, other)
        return ConnectedStreams(self, other, (None, _key_of(other)))

    def join(self, other: DataStream[B]) -> JoinedStreams[T, B]:
        """Joins with another stream: pairs of one key and window.

        `where(key).equal_to(key).window(assigner).apply(function)`.

        Examples:
            >>> hours = TumblingEventTimeWindows.of(timedelta(hours=1))
            >>> pairs = timed.join(timed).where("shop").equal_to("shop").window(hours)
            >>> sorted(collect(pairs.apply(lambda a, b: a.amount * b.amount, int)))
            [9, 16, 25]
        """
        if isinstance(other, UntypedStream):
            return other  # type: ignore[return-value]
        return JoinedStreams(self, other)

    def co_group(self, other: DataStream[B]) -> CoGroupedStreams[T, B]:
        """Groups with another stream: all records of one key and window of both, also where one of them has none.

        Examples:
            >>> hours = TumblingEventTimeWindows.of(timedelta(hours=1))
            >>> groups = timed.co_group(timed.where("amount > 3")).where("shop").equal_to("shop").window(hours)
            >>> sorted(collect(groups.apply(lambda all, large: [(len(all), len(large))], tuple[int, int])))
            [(1, 0), (1, 1), (1, 1)]
        """
        if isinstance(other, UntypedStream):
            return other  # type: ignore[return-value]
        return CoGroupedStreams(self, other)

    # Windows over everything

    def window_all(self, assigner: WindowAssigner[T, W]) -> WindowedStream[int, T, W]:
        """Puts all elements into windows, whatever their key; runs on one partition.

        Examples:
            >>> hours = timed.window_all(TumblingEventTimeWindows.of(timedelta(hours=1)))
            >>> [sale.amount for sale in collect(hours.sum("amount"))]
            [7, 5]
        """
        return WindowedStream(self.key_by(_everything), assigner, alone=True)

    def count_window_all(self, size: int, slide: int | None = None) -> WindowedStream[int, T, GlobalWindow]:
        """Windows of `size` elements, whatever their key; runs on one partition.

        Examples:
            >>> collect(numbers.count_window_all(3).sum())
            [6]
        """
        windows = self.key_by(_everything).count_window(size, slide)
        windows._alone = True
        return windows

    # Outputs

    def get_side_output(self, tag: OutputTag[R]) -> DataStream[R]:
        """The records that the operator emitted to a side output.

        In BATCH the stage materializes once and both streams read it.

        Examples:
            >>> late = OutputTag("late", Sale)
            >>> hours = timed.key_by("shop").window(TumblingEventTimeWindows.of(timedelta(hours=1)))
            >>> collect(hours.side_output_late_data(late).sum("amount").get_side_output(late), "STREAMING")
            []
        """
        if not isinstance(tag, OutputTag):
            raise PipelineError(
                f"{self._where('get_side_output')}: expected an OutputTag such as OutputTag('late', Flight), "
                f"got {tag!r}"
            )
        node = self._operator("get_side_output")
        if not node.has_side_outputs and not hears_of_epochs(node.user_function):
            raise PipelineError(
                f"{self._where('get_side_output')}: '{node.name}' is a {type(node).__name__.removesuffix('Node')} and "
                "has no side outputs; use process(...)"
            )
        records: Any = self._pipeline._record_type(tag.output_type, f"{node.name}, side output {tag.name}")
        typed = OutputTag(tag.name, records)
        self._pipeline._declare_tag(node, typed)
        return DataStream(self._pipeline, None, (Upstream(node.id, typed),))

    def sink_to(self, sink: Sink[T]) -> DataStreamSink:
        """Writes the stream to a sink; what it guarantees is the sink's to say.

        BATCH commits at the end of the stage, STREAMING after each epoch.

        Examples:
            >>> sink = sales.sink_to(FileSink("tables/sales")).name("sales table")
            >>> [sale.amount for sale in run_pipeline(pipeline, "BATCH").sinks["sales table"]]
            [3, 4, 5]
        """
        try:
            bound = sink.bound_to(self._records(sink.name))
        except PipelineError as error:
            raise type(error)(f"{self._where(sink.name)}: {error}") from error
        naming = Naming.AUTHOR if sink.named else Naming.LIBRARY
        node = self._pipeline._add(nodes.SinkNode, list(self._upstream), sink.name, naming=naming, sink=bound)
        return DataStreamSink(self._pipeline, node.id)

    def print(self, sink_identifier: str | None = None) -> DataStreamSink:
        """Writes every record as a line of text to standard output: for trying things out."""
        return self.sink_to(PrintSink(sink_identifier))

    # Running it

    def execute_and_collect(
        self, options: Mapping[str, Any] | None = None, *, spark: SparkSession | None = None, master: str = "local[*]"
    ) -> CollectedRecords[T]:
        """Runs the pipeline in this process, without Dagster, and returns this stream's records one by one.

        In BATCH they come when the job has ended, in STREAMING with each epoch, and for ever where the input is
        unbounded: use it in a with statement, whose end cancels the job, as the end of the program does. Everything
        else that the pipeline writes is written as well. Arguments as for `Pipeline.execute`; a STREAMING job begins
        anew each time unless `execution.checkpointing.dir` is given. PyFlink: `DataStream.execute_and_collect`.
        """
        from dagster_unified.execution.collecting import collect

        records = self._records("collected")

        def graph_with(sink: Sink[Any]) -> Graph:
            return self._pipeline.with_sink(self._upstream, sink, records).graph()

        return collect(graph_with, records, options, spark, master)

    # Building the graph

    def _by_exchange(self, kinds: Sequence[ExchangeKind]) -> list[tuple[DataStream[T], Partitioning | None]]:
        """What the stream unites, without the exchanges that were asked for, beside the exchange of one of `kinds`."""
        parts: list[tuple[list[Upstream], Partitioning | None]] = []
        for upstream in self._upstream:
            asked = upstream.partitioning
            exchange = asked if asked is not None and asked.kind in kinds else None
            plain = replace(upstream, partitioning=None)
            if parts and parts[-1][1] == exchange:
                parts[-1][0].append(plain)
            else:
                parts.append(([plain], exchange))
        return [(DataStream(self._pipeline, None, tuple(part)), exchange) for part, exchange in parts]

    def _called(self, name: str, naming: Naming) -> Self:
        return self._set(name=name, naming=naming)

    def _set(self, **attributes: Any) -> Self:
        first = next(iter(attributes))
        self._pipeline._change(self._operator("chaining" if first == "chaining" else f"a {first}").id, **attributes)
        return self

    def _operator(self, what: str) -> Node:
        if self._last is None:
            first = self._upstream[0]
            before = f"'{self._pipeline._node(first.node).name}'"
            if first.tag is not None:
                raise PipelineError(
                    f"{self._pipeline.name}: {what} belongs to an operator or a sink, "
                    f"and this stream is the side output '{first.tag.name}' of {before}; "
                    "give it to what reads the side output: .sink_to(sink).name(...), .print().name(...), "
                    "or the next operator"
                )
            if len(self._upstream) > 1:
                kind = "a union"
            else:
                kind = f"{'keyed,' if isinstance(self, KeyedStream) else 'an exchange'} behind {before}"
            raise PipelineError(
                f"{self._pipeline.name}: {what} belongs to an operator or a sink, and this stream is {kind}; "
                "call it on the operator before, or the one after"
            )
        return self._pipeline._node(self._last)

    def _where(self, operator: str | None = None) -> str:
        name = operator or (self._pipeline._node(self._last).name if self._last is not None else "stream")
        return f"{self._pipeline.name}: operator '{name}'"

    def _records(self, operator: str) -> RecordType:
        first = self._upstream[0]
        records = first.tag.output_type if first.tag is not None else self._pipeline._node(first.node).records
        if records is None:
            raise RecordTypeError(f"{self._where(operator)}: the stream before it has no record type")
        found: RecordType = records
        return found

    def _next(self, kind: type[Node], name: str, **attributes: Any) -> DataStream[Any]:
        return self._after(list(self._upstream), kind, name, **attributes)

    def _after(self, upstream: list[Upstream], kind: type[Node], name: str, **attributes: Any) -> DataStream[Any]:
        node = self._pipeline._add(kind, upstream, name, **attributes)
        return DataStream(self._pipeline, node.id)

    def _apply(
        self,
        kind: type[nodes.FunctionNode],
        function: Any,
        method: str,
        output_type: Any,
        unwrap: Callable[[Any], Any],
        **attributes: Any,
    ) -> DataStream[Any]:
        self._records(method)
        name = self._name_of(function, method.removesuffix("_element"))
        self._check_function(name, function if isinstance(function, type) else getattr(function, method, function))
        try:
            records = self._output(name, getattr(function, method, function), output_type, unwrap)
        except RecordTypeError as error:
            return self._untyped(kind, name, function, error)
        return self._function(kind, name, function, records=records, **attributes)

    def _untyped(
        self, kind: type[nodes.FunctionNode], name: str, function: Any, mistake: RecordTypeError
    ) -> UntypedStream:
        """The stream of an operator whose output type is a mistake, which is raised when the graph is complete."""
        made = self._next(kind, name, naming=_naming(function), function=function, timestamped=True)
        self._pipeline._found_mistake(made._upstream[0].node, mistake)
        return UntypedStream(self._pipeline, made._last)

    def _function(self, kind: type[nodes.FunctionNode], name: str, function: Any, **attributes: Any) -> DataStream[Any]:
        """An operator that runs a function on records."""
        form = KEYED_FORMS.get(kind.keyed_form) if checkpointed(function) is not None else None
        if form is not None and not isinstance(self, KeyedStream):
            attributes["function"] = form(function)
            return self._next(nodes.CheckpointedNode, name, key=Key(), naming=_naming(function), **attributes)
        return self._next(kind, name, naming=_naming(function), function=function, **attributes)

    def _check_late_tag(self, tag: OutputTag[Any], where: str) -> None:
        """Raises where late records do not fit a side output; else the first one would tell, after weeks perhaps."""
        if not isinstance(tag, OutputTag):
            raise PipelineError(f"{where}: expected an OutputTag for late data, got {tag!r}")
        given = self._pipeline._record_type(tag.output_type, f"{where}, side output {tag.name}")
        wanted = self._records(where)
        if given.python != wanted.python:
            raise RecordTypeError(
                f"{where}: late records are of {wanted.describe()}, and side output '{tag.name}' is declared"
                f" {given.describe()}; declare it with the stream's type"
            )

    def _output(self, name: str, function: Any, output_type: Any, unwrap: Callable[[Any], Any]) -> RecordType:
        """The record type that a function gives: `output_type`, its class and its annotation have to agree."""
        self._check_function(name, function)
        annotation = return_type(function)
        annotated = None if annotation is None else unwrap(annotation)
        if annotation is type(None) and annotated is None:
            annotation = None  # it emits to side outputs only, or in another method
        stated = stated_output(function)
        if output_type is None and annotation is not None and annotated is None:
            given = type_name(annotation)
            raise RecordTypeError(
                f"{self._where(name)} is annotated to give {given}, and has to give an iterable of records, "
                f"such as Iterable[{given}]"
            )
        if output_type is None and stated is None and annotated is None:
            raise RecordTypeError(
                f"{self._where(name)} has no output type; annotate what the function returns, or give output_type="
            )
        if output_type is not None:
            records = self._pipeline._record_type(output_type, name)
            self._check_same(
                name, records, stated, f"output_type is {type_name(output_type)}, but the function's class"
            )
            says = f"output_type is {type_name(output_type)}, but the function"
        elif stated is not None:
            records = self._pipeline._record_type(stated, name)
            says = f"the function's class says that it gives {type_name(stated)}, but its method"
        else:
            return self._pipeline._record_type(annotated, name)
        self._check_same(name, records, annotated, says)
        return records

    def _check_same(self, name: str, records: RecordType, also: Any, says: str) -> None:
        """Raises where what else is said of an output type is another one; what is no record type says nothing."""
        if also is None or also is Any:
            return
        try:
            other = self._pipeline._record_type(also, name)
        except RecordTypeError:
            return
        if other.schema != records.schema:
            raise RecordTypeError(
                f"{self._where(name)}: {says} is annotated to give {type_name(also)}; make them the same"
            )

    def _name_of(self, function: Any, kind: str) -> str:
        """What an author called a function of records; raises for an expression on columns."""
        if makes_column(function):
            raise PipelineError(f"{self._where(kind)}: {_on_columns(function)}")
        return _name_of(function, kind)

    def _check_function(self, name: str, function: Any) -> None:
        if isinstance(function, type) and issubclass(function, Function):
            raise PipelineError(
                f"{self._where(name)}: {function.__name__} is a class; give an instance of it, {function.__name__}()"
            )
        if not callable(function):
            raise PipelineError(f"{self._where(name)}: expected a function or a function object, got {function!r}")

    def _check_combines(self, name: str) -> None:
        records = self._records(name)
        if records.shape == "value" and records.schema.field(0).nullable:
            raise PipelineError(
                f"{self._where(name)}: a record may be None ({type_name(records.python)}), which stands for no record"
                " where records are combined; filter such records out, or map them to a value"
            )

    def _key(self, key: tuple[Any, ...], key_type: Any) -> Key:
        records = self._records("key_by")
        fields = [k for k in key if isinstance(k, (str, int))]
        if len(key) == 1 and not fields and records.shape != "value":
            read = field_of(key[0])
            if read is not None and all(
                f in records.names or (isinstance(f, int) and 0 <= f < len(records.names)) for f in read
            ):
                fields, key = list(read), read
        if len(fields) == len(key):
            names = [records.names[f] if isinstance(f, int) and 0 <= f < len(records.names) else str(f) for f in fields]
            for name in names:
                self._check_key_field(records, name)
            if key_type is not None:
                self._check_key_type(
                    key_type, [records.schema.field(name).type for name in names], f"the key is {', '.join(names)}"
                )
            return Key(fields=tuple(names))
        if len(key) != 1:
            raise PipelineError(f"{self._where('key_by')}: give either field names or one function, not both")
        return self._computed_key(key[0], key_type, records)

    def _check_key_field(self, records: RecordType, name: str) -> None:
        _check_field(records, name, self._where("key_by"))
        kind = records.schema.field(name).type
        if pa.types.is_nested(kind):
            info = mi.type_info(records.type_of(name))
            _check_can_be_key(info, f"{self._where('key_by')}: field '{name}' is a {kind}, which cannot be a key")

    def _check_key_type(self, key_type: Any, given: list[pa.DataType], what: str) -> None:
        where = self._where("key_by")
        declared = arrow_type(inspected(key_type, where, "a key"), where)
        parts = [f.type for f in declared] if len(given) > 1 and pa.types.is_struct(declared) else [declared]
        if parts != given:
            raise RecordTypeError(
                f"{self._where('key_by')}: key_type is {type_name(key_type)}, "
                f"but {what} ({', '.join(map(str, given))}); make them the same, or leave key_type out"
            )

    def _computed_key(self, function: Any, key_type: Any, records: RecordType) -> Key:
        if makes_column(function):
            raise PipelineError(f"{self._where('key_by')}: {_on_columns(function)}; or give the names of fields")
        _check_not_opened(function, self._where("key_by"))
        annotated = return_type(getattr(function, "get_key", function)) or type_argument(type(function), KeyOut)
        python = key_type if key_type is not None else annotated
        if key_type is not None and annotated not in (None, Any):
            self._check_key_type(
                key_type,
                [arrow_type(mi.type_info(annotated), self._where("key_by"))],
                f"the function is annotated to give {type_name(annotated)}",
            )
        if python is None:
            raise RecordTypeError(
                f"{self._where('key_by')}: the key's type is not known; annotate the key function, or give key_type="
            )
        where = f"{self._pipeline.name}: key_by({_name_of(function, 'function')})"
        info = inspected(python, where, "a key")
        if isinstance(info, (mi.UnionType, mi.NoneType)):
            raise RecordTypeError(
                f"{where}: a key of type {type_name(python)} may be None, and a None key is an error; "
                "give such records a key, or filter them out"
            )
        arrow = arrow_type(info, where)
        _check_can_be_key(info, f"{where}: a {type_name(python)} cannot be a key")
        return Key(computed=ComputedKey(function, python, arrow, where))

    def _exchange(self, kind: ExchangeKind, key: Key | None = None, partitioner: Any = None) -> DataStream[T]:
        partitioning = Partitioning(kind, key, partitioner, explicit=True)
        return DataStream(self._pipeline, None, tuple(replace(u, partitioning=partitioning) for u in self._upstream))

    def _check_columns(self, columns: Iterable[str | Column], operator: str, given: Sequence[str] = ()) -> None:
        """Raises where an expression reads a column that is not there.

        It may read what one before it gives: its alias, or of `given`.
        """
        records = self._records(operator)
        known = {name.lower() for name in (*records.names, TIMESTAMP)}
        for place, column in enumerate(columns):
            if not isinstance(column, str) and not is_column(column):
                raise PipelineError(
                    f"{self._where(operator)}: it takes SQL text and expressions of dagster_unified.api.functions, and"
                    f" was given {column!r}; a Python function goes into filter, map or reduce"
                )
            for name in sorted(columns_read(column)):
                if name.lower() not in known:
                    shown = f" of {column!r}" if isinstance(column, str) and column != name else ""
                    raise PipelineError(
                        f"{self._where(operator)}: no column '{name}'{shown} in "
                        f"{records.describe()}{nearest(name, records.names)}"
                    )
            known.add((given[place] if given else alias_of(column) or "").lower())


@located
class KeyedStream(DataStream[T], Generic[K, T]):
    """A stream partitioned by key: what state, timers and rolling operations need.

    Operators of a plain stream may follow as well; they then run partitioned by key. A function object that overrides
    `open`, in which it may ask for state of the key, runs as `process` does: in BATCH a key's records come to it
    together, in event-time order. Any other function stays in one pass with its neighbours.
    """

    def __init__(self, pipeline: GraphBuilder, upstream: tuple[Upstream, ...], key: Key) -> None:
        partitioning = Partitioning(ExchangeKind.HASH, key)
        super().__init__(pipeline, None, tuple(replace(u, partitioning=partitioning) for u in upstream))
        self._key_selector = key

    def process(
        self, function: KeyedProcessFunction[K, T, R] | ProcessFunction[T, R], output_type: TypeForm[R] = NOT_GIVEN
    ) -> DataStream[R]:
        """Runs a `KeyedProcessFunction`, with state and timers of the record's key.

        In BATCH a key's records come in event-time order with the watermark at `MIN`, then its timers fire. In
        STREAMING records come as they arrive, and timers fire as the watermark passes them. A `ProcessFunction` with
        `open` or `on_timer` has state and timers as well.

        Examples:
            >>> class Count(KeyedProcessFunction):
            ...     def open(self, runtime_context):
            ...         self.count = runtime_context.get_state(ValueStateDescriptor("count", int))
            ...     def process_element(self, value: Sale, ctx) -> list[str]:
            ...         self.count.update((self.count.value() or 0) + 1)
            ...         return [f"{ctx.get_current_key()}: {self.count.value()}"]
            >>> sorted(collect(sales.key_by("shop").process(Count())))
            ['north: 1', 'north: 2', 'south: 1']
        """
        if isinstance(function, ProcessFunction):
            return super().process(function, output_type)
        if not isinstance(function, KeyedProcessFunction):
            raise PipelineError(
                f"{self._where('process')}: a keyed stream needs a KeyedProcessFunction, "
                f"not {_name_of(function, 'function')}"
            )
        name = self._name_of(function, "process")
        try:
            records = self._output(name, function.process_element, output_type, main_output)
        except RecordTypeError as error:
            return self._untyped(nodes.ProcessNode, name, function, error)
        naming = _naming(function)
        return self._keyed(
            nodes.KeyedProcessNode, name, naming=naming, records=records, function=function, timestamped=True
        )

    def map_batches(
        self, function: KeyedBatchFunction[K] | Callable[[pa.RecordBatch], pa.RecordBatch], output_type: TypeForm[R]
    ) -> DataStream[R]:
        """Runs a `KeyedBatchFunction`: a function of Arrow batches of one key's rows, with state and timers of the key.

        `KeyedBatchFunction` has an example. With some twenty rows of a key at a time or more it costs less than a
        function of single records; with fewer, more. Any other function gets batches of many keys, as on a stream that
        is not keyed, and has no state.
        """
        if not isinstance(function, KeyedBatchFunction):
            return super().map_batches(function, output_type)
        name, key = self._name_of(function, "map_batches"), self._key_selector
        return self._on_batches(nodes.KeyedBatchesNode, name, function, output_type, key=key, timestamped=True)

    @overload  # type: ignore[override]  # a keyed stream needs a function with the key at hand
    def connect(self, other: KeyedStream[K, B]) -> KeyedConnectedStreams[K, T, B]: ...
    @overload
    def connect(self, other: DataStream[B]) -> ConnectedStreams[T, B]: ...
    @overload
    def connect(self, other: BroadcastStream[B]) -> KeyedBroadcastConnectedStream[K, T, B]: ...
    def connect(
        self, other: DataStream[B] | BroadcastStream[B]
    ) -> ConnectedStreams[T, B] | KeyedBroadcastConnectedStream[K, T, B]:
        if isinstance(other, UntypedStream):
            return other  # type: ignore[return-value]
        if isinstance(other, BroadcastStream):
            return KeyedBroadcastConnectedStream(self, other)
        if isinstance(other, KeyedStream):
            return KeyedConnectedStreams(self, other, (self._key_selector, other._key_selector))
        return ConnectedStreams(self, other, (self._key_selector, None))

    def reduce(self, function: Callable[[T, T], T] | ReduceFunction[T]) -> DataStream[T]:
        """Combines a key's records with `function(a, b)`, where `a` came first.

        In STREAMING emits the combination so far with every record; in BATCH one final record per key
        (`execution.incremental-updates`).

        Examples:
            >>> def add(a: Sale, b: Sale) -> Sale:
            ...     return b._replace(amount=a.amount + b.amount)
            >>> sorted(sale.amount for sale in collect(sales.key_by("shop").reduce(add)))
            [4, 8]
            >>> [sale.amount for sale in collect(sales.key_by("shop").reduce(add), "STREAMING")]
            [3, 4, 8]
        """
        name = self._name_of(function, "reduce")
        self._check_function(name, getattr(function, "reduce", function))
        self._check_combines(name)
        return self._rolling(name, naming=_naming(function), function=function)

    def interval_join(self, other: KeyedStream[K, B]) -> IntervalJoined[T, B]:
        """Joins each record with those of another keyed stream whose event times are in an interval around its own.

        Examples:
            >>> class Pair(ProcessJoinFunction):
            ...     def process_element(self, left: Sale, right: Sale, ctx) -> list[tuple[int, int]]:
            ...         return [(left.amount, right.amount)]
            >>> joined = timed.key_by("shop").interval_join(timed.key_by("shop"))
            >>> near = joined.between(timedelta(0), timedelta(hours=2))
            >>> sorted(collect(near.process(Pair())))
            [(3, 3), (3, 5), (4, 4), (5, 5)]
        """
        if isinstance(other, UntypedStream):
            return other  # type: ignore[return-value]
        if not isinstance(other, KeyedStream):
            raise PipelineError(
                f"{self._where('interval_join')}: both streams have to be keyed; call key_by on the other"
            )
        return IntervalJoined(self, other)

    def window(self, assigner: WindowAssigner[T, W]) -> WindowedStream[K, T, W]:
        """Puts a key's elements into windows.

        Go on with a trigger, an evictor, allowed lateness, and at last a function.

        Examples:
            >>> hours = timed.key_by("shop").window(TumblingEventTimeWindows.of(timedelta(hours=1)))
            >>> sorted((sale.shop, sale.amount) for sale in collect(hours.max_by("amount")))
            [('north', 3), ('north', 5), ('south', 4)]
        """
        return WindowedStream(self, assigner)

    def count_window(self, size: int, slide: int | None = None) -> WindowedStream[K, T, GlobalWindow]:
        """Windows of `size` elements of a key, as they arrive.

        With `slide` another such window begins at every `slide` elements. What is left at the end of the input gives
        nothing. Which elements are together depends on their order, and so on the mode.

        Examples:
            >>> [sale.amount for sale in collect(timed.key_by("shop").count_window(2).sum("amount"))]
            [8]
        """
        windows = WindowedStream(self, GlobalWindows.create())
        if slide is None:
            return windows.trigger(PurgingTrigger.of(CountTrigger.of(size)))
        return windows.trigger(SlidingCountTrigger(size, slide)).evictor(CountEvictor.of(size))

    def sum(self, field: str | int = 0) -> DataStream[T]:
        """The sum of a field; the other fields are the first record's. Emits as `reduce` does.

        Examples:
            >>> sorted(sale.amount for sale in collect(sales.key_by("shop").sum("amount")))
            [4, 8]
        """
        return self._builtin("sum", field)

    def min(self, field: str | int = 0) -> DataStream[T]:
        """The smallest value of a field; the other fields are the first record's. Emits as `reduce` does."""
        return self._builtin("min", field)

    def max(self, field: str | int = 0) -> DataStream[T]:
        """The largest value of a field; the other fields are the first record's. Emits as `reduce` does."""
        return self._builtin("max", field)

    def min_by(self, field: str | int = 0) -> DataStream[T]:
        """The record with the smallest value of a field, the first of equal ones. Emits as `reduce` does."""
        return self._builtin("min_by", field)

    def max_by(self, field: str | int = 0) -> DataStream[T]:
        """The record with the largest value of a field, the first of equal ones. Emits as `reduce` does.

        Examples:
            >>> sorted(sale.amount for sale in collect(sales.key_by("shop").max_by("amount")))
            [4, 5]
        """
        return self._builtin("max_by", field)

    def agg(self, *columns: str | Column, output_type: TypeForm[R]) -> DataStream[R]:
        """Column aggregates per key, such as `F.sum("delay").alias("delay")`.

        The result has the key's fields first. In BATCH it is one row per key; in STREAMING each micro-batch gives an
        update for each key that it has records of. Runs in Catalyst; with portable state (`state.native-aggregates`),
        which savepoints and keyed operators behind it need, Arrow aggregates in Python workers, and an aggregate that
        such a state cannot keep is an `UnsupportedError` that names it.

        Examples:
            >>> class Total(NamedTuple):
            ...     shop: str
            ...     total: int
            >>> totals = sales.key_by("shop").agg(F.sum("amount").alias("total"), output_type=Total)
            >>> sorted(collect(totals))
            [Total(shop='north', total=8), Total(shop='south', total=4)]
        """
        records = self._aggregated(columns, output_type)
        return self._keyed(nodes.AggregateNode, "agg", records=records, columns=columns, timestamped=False)

    def _aggregated(
        self, columns: tuple[str | Column, ...], output_type: Any, bounds: tuple[str, ...] = ()
    ) -> RecordType:
        """The record of column aggregates, with the bounds of a window where it names them.

        Raises where it does not fit.
        """
        if not self._key_selector.fields:
            raise PipelineError(f"{self._where('agg')}: agg needs a stream keyed by fields; use key_by('field')")
        self._check_columns(columns, "agg")
        records, keys = self._pipeline._record_type(output_type, "agg"), self._key_selector.fields
        missing = [k for k in keys if k not in records.names]
        named = [b for b in bounds if b in records.names]
        if missing or len(records.names) != len(keys) + len(named) + len(columns):
            also = f" {', '.join(bounds)} where it names them," if bounds else ""
            raise RecordTypeError(
                f"{self._where('agg')}: the result has the key's fields ({', '.join(keys)}),{also} and {len(columns)} "
                f"aggregates, and output_type is {records.describe()}"
                + (f", which has no field '{missing[0]}'" if missing else "")
            )
        return records

    def _builtin(self, kind: str, field: str | int) -> DataStream[T]:
        return self._rolling(kind, rolling=(kind, self._combined_field(kind, field)))

    def _combined_field(self, kind: str, field: str | int) -> str | int | None:
        """The field that `sum` and its like combine, as operators read it; None where the record is the value."""
        records = self._records(kind)
        if records.shape == "value":
            self._check_combines(kind)
            return None
        if is_column(field):
            raise PipelineError(
                f"{self._where(kind)}: it takes the name of a field, and was given {field!r}; agg takes expressions on"
                f" columns, such as F.{kind}('{records.names[0]}')"
            )
        name = records.names[field] if isinstance(field, int) and 0 <= field < len(records.names) else field
        if name not in records.names:
            raise PipelineError(
                f"{self._where(kind)}: no field '{field}' in {records.describe()}{nearest(str(field), records.names)}"
            )
        kind_of = records.schema.field(name).type
        enum = records.members().get(name)
        if enum is not None and (kind == "sum" or not issubclass(enum, (str, int))):
            raise PipelineError(
                f"{self._where(kind)}: field '{name}' is a {enum.__name__}, an enum, which has no {kind}; "
                "map it to a number, or use reduce"
            )
        if kind == "sum" and not (is_number(kind_of) or pa.types.is_duration(kind_of)):
            raise PipelineError(f"{self._where(kind)}: field '{name}' is a {kind_of}, which has no sum")
        if records.schema.field(name).nullable:
            raise PipelineError(
                f"{self._where(kind)}: field '{name}' may be None, which {kind} cannot combine; map it to a value, "
                "or use reduce"
            )
        return records.names.index(name) if records.shape == "tuple" else name

    def _rolling(self, name: str, **attributes: Any) -> DataStream[T]:
        return self._keyed(nodes.ReduceNode, name, records=self._records(name), **attributes)

    def _function(self, kind: type[nodes.FunctionNode], name: str, function: Any, **attributes: Any) -> DataStream[Any]:
        form = KEYED_FORMS.get(kind.keyed_form) if may_hold_state(function) else None
        if form is None:
            return super()._function(kind, name, function, **attributes)
        timers = {"timestamped": True} if kind is nodes.ProcessNode else {}
        return self._keyed(
            nodes.KeyedProcessNode, name, naming=_naming(function), function=form(function), **attributes, **timers
        )

    def _keyed(self, kind: type[Node], name: str, **attributes: Any) -> DataStream[Any]:
        return self._next(kind, name, key=self._key_selector, **attributes)


@located
class UntypedStream(DataStream[Any]):
    """The stream of an operator whose output type is a mistake, so that other mistakes are found as well.

    An operator that says its own output type is checked, and what follows it is a stream like any other. Anything else
    that is asked of this stream says nothing, since its records are not known. The graph of the pipeline is never
    complete.
    """

    def _records(self, operator: str) -> RecordType:
        return None  # type: ignore[return-value]  # no function that is not replaced below reads it

    def process(self, function: Any, output_type: Any = None) -> DataStream[Any]:
        return self._apply(nodes.ProcessNode, function, "process_element", output_type, main_output)

    def map_batches(self, function: Any, output_type: Any) -> DataStream[Any]:
        return self._on_batches(nodes.MapBatchesNode, self._name_of(function, "map_batches"), function, output_type)

    def _check_late_tag(self, tag: OutputTag[Any], where: str) -> None:
        pass

    def _passed_on(self, *_: Any, **__: Any) -> Self:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._passed_on


_TYPED_BY_THEMSELVES = ("map", "flat_map", "map_batches", "process")
for _name in [n for n in vars(DataStream) if not n.startswith("_") and n not in _TYPED_BY_THEMSELVES]:
    setattr(UntypedStream, _name, UntypedStream._passed_on)


@located
class DataStreamSink:
    """The end of a stream; there is an example at `DataStream.sink_to`."""

    def __init__(self, pipeline: GraphBuilder, node: int) -> None:
        self._pipeline, self._node = pipeline, node

    def name(self, name: str) -> Self:
        """Names the sink, in plans, stages and errors."""
        self._pipeline._change(self._node, name=name, naming=Naming.AUTHOR)
        return self

    def uid(self, uid: str) -> Self:
        """Sets the id under which the sink's commits are known; unique in the pipeline."""
        self._pipeline._change(self._node, uid=uid, given_uid=True)
        return self

    def set_parallelism(self, parallelism: int) -> Self:
        """How many partitions are written at once."""
        _check_parallelism(parallelism, f"{self._pipeline.name}: sink '{self._pipeline._node(self._node).name}'")
        self._pipeline._change(self._node, parallelism=parallelism)
        return self


def _check_parallelism(parallelism: int, where: str) -> None:
    check_count(f"{where}: parallelism", parallelism)


def _millis(what: str, length: timedelta | None) -> int | None:
    return None if length is None else checked_span(what, length, 0)


def _plain_name(column: str | Column) -> str | None:
    """The name of a column that is one of the record's, as text or as `col(name)`; None for an expression."""
    if isinstance(column, str):
        return column
    return column.arguments[0] if column.target is None and column.name == "col" else None


def _everything(record: Any) -> int:
    return 0


def _key_of(stream: DataStream[Any]) -> Key | None:
    return stream._key_selector if isinstance(stream, KeyedStream) else None


def _name_of(function: Any, default: str) -> str:
    """What an author called a function; `default` for a lambda."""
    if isinstance(function, functools.partial):
        return _name_of(function.func, default)
    name: str = getattr(function, "__name__", None) or type(function).__name__
    return default if name == "<lambda>" else name


def _on_columns(expression: Any) -> str:
    """Why an expression on columns, or a function that makes one, is no function of records, and where it goes."""
    is_one = is_column(expression)
    what = f"{expression!r} is an expression" if is_one else f"'{expression.__name__}' makes an expression"
    return (
        f"{what} on columns, and no function of a record; a condition goes into where, values into select,"
        " with_columns or agg"
    )


def _naming(function: Any) -> Naming:
    return Naming.FUNCTION if _name_of(function, "") else Naming.LIBRARY


def _check_not_opened(function: Any, where: str) -> None:
    """Raises where a key selector or a partitioner counts on `open` or `close`: it is called in many places."""
    overridden = (name for name in ("open", "close") if getattr(type(function), name, None) != getattr(Function, name))
    name = next(overridden, None) if isinstance(function, Function) else None
    if name is not None:
        raise PipelineError(
            f"{where}: {type(function).__name__} overrides {name}(), which is not called of a key selector or a"
            " partitioner; make what it needs in __init__, or when it is first called"
        )


def _check_can_be_key(info: mi.Type, what: str) -> None:
    part = not_in_a_key(info)
    if part is not None:
        raise RecordTypeError(
            f"{what}, since {part} can change or has no fixed length; use a scalar, a tuple, or a NamedTuple or frozen"
            " class of these"
        )
    own = equal_by_more(info)
    if own is not None:
        raise RecordTypeError(
            f"{what}, since {own} is not equal by all its fields, and records are brought together by these; leave"
            " __eq__, eq=False and compare=False out, or give a function that makes the key"
        )


def _check_field(records: RecordType, name: str, where: str) -> None:
    if name not in records.names:
        raise PipelineError(f"{where}: no field '{name}' in {records.describe()}{nearest(name, records.names)}")


def _check_lookup_keys(before: RecordType, table: Source[Any], pairs: Mapping[str, str], where: str) -> None:
    """Raises where a field and the table's column that it is looked up by are not there, or are of two types."""
    for field, column in pairs.items():
        _check_field(before, field, where)
        _check_field(table.records, column, f"{where}: table '{table.name}'")
        kinds = before.schema.field(field).type, table.records.schema.field(column).type
        if kinds[0] != kinds[1]:
            raise RecordTypeError(
                f"{where}: field '{field}' is a {kinds[0]} and the table's '{column}' a {kinds[1]}; "
                "a lookup compares values of one type"
            )
        if has(kinds[0], pa.types.is_map):
            raise PipelineError(
                f"{where}: field '{field}' has a dict, which Spark does not compare; look up another field"
            )


def _check_lookup_fields(
    before: RecordType,
    table: Source[Any],
    columns: Mapping[str, str],
    records: RecordType,
    how: str,
    where: str,
) -> None:
    """Raises where the fields of a lookup's result are not those of the stream and the table."""
    if not isinstance(columns, Mapping):
        raise PipelineError(
            f"{where}: columns= says which of the table's columns a new field is, such as {{'city': 'name'}}, and is"
            f" {columns!r}"
        )
    for field, column in columns.items():
        _check_field(table.records, column, f"{where}: table '{table.name}'")
        if field in before.names:
            raise PipelineError(
                f"{where}: the stream has a field '{field}' already; give the table's column '{column}' another name"
            )
        if field not in records.names:
            raise RecordTypeError(
                f"{where}: field '{field}' is not in output_type, {records.describe()}; add it there, "
                "or leave it out of columns"
            )
    for field in records.names:
        if field not in columns:
            _check_field(before, field, where)
        given = table.records.schema.field(columns[field]) if field in columns else before.schema.field(field)
        declared = records.schema.field(field)
        if declared.type != given.type:
            raise RecordTypeError(
                f"{where}: field '{field}' is a {given.type}, and output_type says {declared.type}; make them the same"
            )
        if given.nullable and not declared.nullable:
            raise RecordTypeError(
                f"{where}: field '{field}' may be None {'in the table' if field in columns else 'before'}, "
                "and output_type does not allow that; annotate it as '| None'"
            )
        if field in columns and how == "left" and not declared.nullable:
            raise RecordTypeError(
                f"{where}: field '{field}' is None where nothing is found, and output_type does not allow None; "
                "annotate it as '| None', or use how='inner'"
            )


def _projected(records: RecordType, names: list[str]) -> RecordType:
    """A record type of some columns of another, under the same annotations."""
    if records.shape != "class":
        raise RecordTypeError("a projection of tuples or plain values needs output_type=")
    hints = typing.get_type_hints(records.python, include_extras=True)
    python = typing.NamedTuple(records.python.__name__, [(n, hints[n]) for n in names])  # type: ignore[misc]
    return RecordType(python, "class", pa.schema([records.schema.field(n) for n in names]))
