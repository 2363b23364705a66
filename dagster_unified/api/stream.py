"""`DataStream` and `KeyedStream`: the fluent API.

Each call adds a node to the pipeline's graph and returns the stream after it. Names follow PyFlink. Types are checked
here, while the graph is built: an operator's output type is its function's return annotation or `output_type=`; a
missing or contradictory one is an error that names the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, overload

import pyarrow as pa

from dagster_unified.api.base import (
    BaseStream,
    check_field,
    check_lookup_fields,
    check_lookup_keys,
    check_not_opened,
    check_parallelism,
    name_of,
    naming_of,
    plain_name,
    projection,
)
from dagster_unified.api.building import NOT_GIVEN, GraphBuilder, Upstream, itself, located, main_output, type_argument
from dagster_unified.api.connected import (
    BroadcastConnected,
    BroadcastStream,
    Connected,
    Fields,
    Intervals,
    PairedWindows,
    Pairs,
)
from dagster_unified.api.watermarks import WatermarkStrategy
from dagster_unified.api.windowed import Windows
from dagster_unified.connectors.foreach import PrintSink
from dagster_unified.errors import PipelineError, RecordTypeError, nearest
from dagster_unified.graph import nodes
from dagster_unified.graph.connectors import Boundedness, Sink, Source, check_is_one
from dagster_unified.graph.expressions import Column
from dagster_unified.graph.nodes import Chaining, ExchangeKind, Graph, Key, Naming, Node, Partitioning
from dagster_unified.operators.arrow_functions import OfBatches
from dagster_unified.operators.connected import CoFlatMap, CoMap, CoProcess
from dagster_unified.operators.functions.base import (
    AggregateFunction,
    FilterFunction,
    FlatMapFunction,
    KeyedBatchFunction,
    KeyedProcessFunction,
    KeySelector,
    MapFunction,
    OutputTag,
    Partitioner,
    ProcessFunction,
    ReduceFunction,
)
from dagster_unified.operators.functions.checkpoints import checkpointed
from dagster_unified.operators.functions.iterations import hears_of_epochs
from dagster_unified.operators.functions.two_streams import (
    BroadcastProcessFunction,
    CoFlatMapFunction,
    CoGroupFunction,
    CoMapFunction,
    CoProcessFunction,
    FlatJoinFunction,
    JoinFunction,
    KeyedBroadcastProcessFunction,
    KeyedCoProcessFunction,
    ProcessJoinFunction,
)
from dagster_unified.operators.functions.type_variables import OUT, A, B, K, R, T, W
from dagster_unified.operators.keyed import KEYED_FORMS, may_hold_state
from dagster_unified.operators.state.handles import MapStateDescriptor
from dagster_unified.operators.time import checked_span
from dagster_unified.operators.windows import (
    CountEvictor,
    CountTrigger,
    GlobalWindow,
    GlobalWindows,
    ProcessWindowFunction,
    PurgingTrigger,
    WindowAssigner,
    WindowFunction,
)
from dagster_unified.operators.windows.triggers import SlidingCountTrigger
from dagster_unified.records import RecordType, return_type

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from typing_extensions import TypeForm

    from dagster_unified.execution import CollectedRecords


@located
class DataStream(BaseStream[T]):
    """A stream of records of one type (Flink: *Operators*).

    Its methods say what an operator does in both modes. One that fails while the pipeline is built raises
    `PipelineError` or `RecordTypeError`, with the operator's name.
    """

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
        """Sets in how many subtasks the operator runs; by default `parallelism.default` decides.

        BATCH runs as many tasks. STREAMING has as many subtasks where a function can tell them apart: behind
        `partition_custom`, `broadcast` and `global_`, and with operator state. Other operators share the job's tasks.
        """
        check_parallelism(parallelism, self._where())
        return self._set(parallelism=parallelism)

    def in_python(self) -> Self:
        """Calls the operator's function for each record, also where its source says what it computes.

        The results are the same. `execution.lowering` is the same option for a whole pipeline.
        """
        return self._set(in_python=True)

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
        """Turns each record into one record. Both modes call the function once per record, with its neighbours.

        Examples:
            >>> collect(numbers.map(lambda n: n * 2, int))
            [2, 4, 6]
        """
        return self._apply(nodes.MapNode, function, "map", output_type, itself)

    def flat_map(
        self, function: Callable[[T], Iterable[R]] | FlatMapFunction[T, R], output_type: TypeForm[R] = NOT_GIVEN
    ) -> DataStream[R]:
        """Turns each record into any number of records.

        Both modes call the function once per record, and each result carries the record's event time.

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
        """Calls a function from Arrow batches to Arrow batches, for vectorised code.

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
        try:
            records = self._pipeline._record_type(output_type, name)
        except RecordTypeError as error:
            return self._untyped(name, function, error)
        return self._next(kind, name, naming=naming_of(function), records=records, function=function, **more)

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
                f"{self._where(name_of(function, 'process'))}: process needs a ProcessFunction; "
                "a KeyedProcessFunction needs a keyed stream, so call key_by before it"
            )
        return self._apply(nodes.ProcessNode, function, "process_element", output_type, main_output)

    # Columns, left to Catalyst

    @overload
    def select(self, *columns: str | Column, output_type: TypeForm[R]) -> DataStream[R]: ...
    @overload
    def select(self, *columns: str | Column) -> DataStream[Any]: ...
    def select(self, *columns: str | Column, output_type: Any = None) -> DataStream[Any]:
        """Projects to columns: SQL expressions as text, or `functions`. Both modes run it in Catalyst.

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
        plain = [plain_name(c) for c in columns]
        if any(name not in records.names for name in plain):
            computed = next(c for c, n in zip(columns, plain, strict=True) if n not in records.names)
            raise RecordTypeError(
                f"{self._where('select')}: output_type is needed, since the type of {computed!r} is known to Spark only"
            )
        projected = projection(records, [str(n) for n in plain])
        return self._next(nodes.SelectNode, "select", records=projected, columns=columns)

    def with_columns(
        self, columns: Mapping[str, str] | Mapping[str, Column] | Mapping[str, str | Column], output_type: TypeForm[R]
    ) -> DataStream[R]:
        """Adds or replaces columns, each a SQL expression as text or `functions`.

        `output_type` is the whole resulting record. Both modes run it in Catalyst.

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
        """Keeps the rows for which a SQL condition, or one of `functions`, holds.

        Both modes run it in Catalyst.

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
        check_lookup_keys(before, table, pairs, where)
        records = self._pipeline._record_type(output_type, name)
        check_lookup_fields(before, table, columns, records, how, where)
        return self._next(
            nodes.LookupNode,
            name,
            records=records,
            columns=(),
            source=table,
            on=tuple(pairs.items()),
            added=tuple(columns.items()),
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
            check_field(records, assigner, where)
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
        """Unites streams of one type. In both modes their records come in no particular order.

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
        """Spreads records evenly over the next operator's partitions, in both modes."""
        return self._exchange(ExchangeKind.REBALANCE)

    def rescale(self) -> DataStream[T]:
        """Spreads each partition's records over some of the next operator's partitions, in both modes.

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
        """Sends a record to partition `partitioner(key, number of partitions)`, in both modes.

        The next operator needs `set_parallelism`.

        Examples:
            >>> spread = sales.partition_custom(lambda shop, count: len(shop) % count, "shop")
            >>> len(collect(spread.map(lambda sale: sale.amount, int).set_parallelism(2)))
            3
        """
        check_not_opened(partitioner, self._where("partition_custom"))
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
        return ConnectedStreams(self, other, (None, other._key_selector))

    def join(self, other: DataStream[B]) -> JoinedStreams[T, B]:
        """Joins with another stream: pairs of one key and window.

        `where(key).equal_to(key).window(assigner).apply(function)`. In BATCH a window's pairs are made when its key is
        over, in STREAMING when it fires.

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

        In BATCH a window's groups are made when its key is over, in STREAMING when it fires.

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
        """Puts all elements into windows, whatever their key. Both modes run it on one partition.

        Examples:
            >>> hours = timed.window_all(TumblingEventTimeWindows.of(timedelta(hours=1)))
            >>> [sale.amount for sale in collect(hours.sum("amount"))]
            [7, 5]
        """
        return WindowedStream(self.key_by(_everything), assigner, alone=True)

    def count_window_all(self, size: int, slide: int | None = None) -> WindowedStream[int, T, GlobalWindow]:
        """Puts every `size` elements into a window, whatever their key. Both modes run it on one partition.

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
            check_is_one(sink, Sink, "sink")
        except PipelineError as error:
            raise PipelineError(f"{self._where('sink_to')}: {error}") from None
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
        self,
        options: Mapping[str, Any] | None = None,
        *,
        spark: SparkSession | None = None,
        master: str = "local[*]",
        resources: Mapping[str, object] | None = None,
    ) -> CollectedRecords[T]:
        """Runs the pipeline in this process, without Dagster, and returns this stream's records one by one.

        In BATCH they come when the job has ended, in STREAMING with each epoch, and for ever where the input is
        unbounded: use it in a with statement, whose end cancels the job, as the end of the program does. Everything
        else that the pipeline writes is written as well. Arguments as for `Pipeline.execute`; a STREAMING job begins
        anew each time unless `execution.checkpointing.dir` is given. PyFlink: `DataStream.execute_and_collect`.
        """
        from dagster_unified.execution import Environment, collect

        records = self._records("collected")

        def graph_with(sink: Sink[Any]) -> Graph:
            return self._pipeline.with_sink(self._upstream, sink, records).graph()

        return collect(graph_with, records, options, Environment(spark, master, resources=resources or {}))

    # Building the graph

    def _next(self, kind: type[Node], name: str, **attributes: Any) -> DataStream[Any]:
        return self._after(list(self._upstream), kind, name, **attributes)

    def _after(self, upstream: list[Upstream], kind: type[Node], name: str, **attributes: Any) -> DataStream[Any]:
        node = self._pipeline._add(kind, upstream, name, **attributes)
        return DataStream(self._pipeline, node.id)

    def _apply(
        self,
        kind: type[Node],
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
            return self._untyped(name, function, error)
        return self._function(kind, name, function, records=records, **attributes)

    def _untyped(self, name: str, function: Any, mistake: RecordTypeError) -> UntypedStream:
        """Return a stream without a usable output type; the mistake is raised when the graph is complete."""
        stream = self._next(nodes.MapNode, name, naming=naming_of(function), function=function, timestamped=True)
        self._pipeline._found_mistake(stream._upstream[0].node, mistake)
        return UntypedStream(self._pipeline, stream._last)

    def _function(self, kind: type[Node], name: str, function: Any, **attributes: Any) -> DataStream[Any]:
        form = KEYED_FORMS.get(kind.keyed_form) if checkpointed(function) is not None else None
        if form is not None and not isinstance(self, KeyedStream):
            attributes["function"] = form(function)
            return self._next(nodes.CheckpointedNode, name, key=Key(), naming=naming_of(function), **attributes)
        return self._next(kind, name, naming=naming_of(function), function=function, **attributes)

    def _exchange(self, kind: ExchangeKind, key: Key | None = None, partitioner: Any = None) -> DataStream[T]:
        return self._over(self._over_exchange(kind, key, partitioner))

    def _over(self, upstream: tuple[Upstream, ...]) -> DataStream[T]:
        return DataStream(self._pipeline, None, upstream)


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
        self._key_selector: Key = key

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
                f"not {name_of(function, 'function')}"
            )
        attributes = {"key": self._key_selector, "timestamped": True}
        return self._apply(nodes.KeyedProcessNode, function, "process_element", output_type, main_output, **attributes)

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
        return self._rolling(name, naming=naming_of(function), function=function)

    def interval_join(self, other: KeyedStream[K, B]) -> IntervalJoined[T, B]:
        """Joins each record with those of another keyed stream whose event times are in an interval around its own.

        Both modes pair the records of a key in the order of event time.

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
        """Puts every `size` elements of a key into a window, as they arrive.

        With `slide` another such window begins at every `slide` elements. Elements left over at the end of the input
        emit nothing. Which elements are together depends on their order, and so on the mode.

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
        update for each key that it has records of. Runs in Catalyst; as local-global aggregation
        (`state.native-aggregates`), which savepoints and keyed operators behind it need, in Arrow in Python workers,
        and an aggregate that cannot be merged is then an `UnsupportedError` that names it.

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

    def _builtin(self, kind: str, field: str | int) -> DataStream[T]:
        return self._rolling(kind, rolling=(kind, self._combined_field(kind, field)))

    def _rolling(self, name: str, **attributes: Any) -> DataStream[T]:
        return self._keyed(nodes.ReduceNode, name, records=self._records(name), **attributes)

    def _function(self, kind: type[Node], name: str, function: Any, **attributes: Any) -> DataStream[Any]:
        form = KEYED_FORMS.get(kind.keyed_form) if may_hold_state(function) else None
        if form is None:
            return super()._function(kind, name, function, **attributes)
        timers = {"timestamped": True} if kind is nodes.ProcessNode else {}
        return self._keyed(
            nodes.KeyedProcessNode, name, naming=naming_of(function), function=form(function), **attributes, **timers
        )

    def _keyed(self, kind: type[Node], name: str, **attributes: Any) -> DataStream[Any]:
        return self._next(kind, name, key=self._key_selector, **attributes)


# Windows


@located
class WindowedStream(Windows[T, W], Generic[K, T, W]):
    """A keyed stream whose elements are in windows (Flink: *Windows*).

    `reduce`, `aggregate`, `process` or `apply` makes it a stream again. A window that is reduced or aggregated holds
    one value; one that is processed holds its elements. In BATCH windows close at the end of their key, in STREAMING as
    the watermark, the clock or a trigger says.
    """

    def __init__(self, stream: KeyedStream[K, T], assigner: WindowAssigner[T, W], alone: bool = False) -> None:
        super().__init__(stream, assigner, alone)

    @overload
    def reduce(self, function: Callable[[T, T], T] | ReduceFunction[T]) -> DataStream[T]: ...
    @overload
    def reduce(
        self,
        function: Callable[[T, T], T] | ReduceFunction[T],
        window_function: ProcessWindowFunction[T, R, K, W] | WindowFunction[T, R, K, W],
        output_type: TypeForm[R] = NOT_GIVEN,
    ) -> DataStream[R]: ...
    def reduce(
        self,
        function: Callable[[T, T], T] | ReduceFunction[T],
        window_function: Any = None,
        output_type: Any = None,
    ) -> DataStream[Any]:
        """Reduces each window's elements with `function(a, b)`; `window_function` is then given the one result.

        Examples:
            >>> hours = timed.key_by("shop").window(SlidingEventTimeWindows.of(timedelta(hours=2), timedelta(hours=1)))
            >>> largest = hours.reduce(lambda a, b: a if a.amount >= b.amount else b)
            >>> sorted((sale.shop, sale.amount) for sale in collect(largest))
            [('north', 3), ('north', 5), ('north', 5), ('south', 4), ('south', 4)]
        """
        self._stream._check_function("reduce", getattr(function, "reduce", function))
        self._stream._check_combines("reduce")
        records = self._stream._records("reduce")
        return _after(self._stream, self._with(window_function, output_type, records, "reduce", reduce=function))

    @overload
    def aggregate(
        self,
        function: AggregateFunction[T, A, OUT],
        window_function: None = None,
        accumulator_type: TypeForm[A] = NOT_GIVEN,
        output_type: TypeForm[OUT] = NOT_GIVEN,
    ) -> DataStream[OUT]: ...
    @overload
    def aggregate(
        self,
        function: AggregateFunction[T, A, OUT],
        window_function: ProcessWindowFunction[OUT, R, K, W] | WindowFunction[OUT, R, K, W],
        accumulator_type: TypeForm[A] = NOT_GIVEN,
        output_type: TypeForm[R] = NOT_GIVEN,
    ) -> DataStream[R]: ...
    def aggregate(
        self,
        function: AggregateFunction[T, A, OUT],
        window_function: Any = None,
        accumulator_type: Any = None,
        output_type: Any = None,
    ) -> DataStream[Any]:
        """Aggregates each window's elements; `window_function` is then given the one result.

        `accumulator_type` is the accumulator's, as state keeps it, where `create_accumulator` is not annotated.

        Examples:
            >>> class Mean(AggregateFunction):
            ...     def create_accumulator(self) -> tuple[int, int]:
            ...         return 0, 0
            ...     def add(self, value: Sale, accumulator: tuple[int, int]) -> tuple[int, int]:
            ...         return accumulator[0] + value.amount, accumulator[1] + 1
            ...     def get_result(self, accumulator: tuple[int, int]) -> float:
            ...         return accumulator[0] / accumulator[1]
            ...     def merge(self, a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
            ...         return a[0] + b[0], a[1] + b[1]
            >>> collect(timed.window_all(TumblingEventTimeWindows.of(timedelta(hours=1))).aggregate(Mean()))
            [3.5, 5.0]
        """
        if not isinstance(function, AggregateFunction):
            raise PipelineError(f"{self._where('aggregate')}: expected an AggregateFunction, got {function!r}")
        accumulator = accumulator_type
        if accumulator is None:
            accumulator = return_type(function.create_accumulator) or type_argument(type(function), A)
        if accumulator in (None, Any):
            raise RecordTypeError(
                f"{self._where('aggregate')}: the accumulator's type is not known; "
                f"annotate {type(function).__name__}.create_accumulator, or give accumulator_type="
            )
        result = None
        if window_function is None:
            result = self._stream._output(type(function).__name__, function.get_result, output_type, itself)
        name = type(function).__name__
        node = self._with(window_function, output_type, result, name, aggregate=function, accumulator_type=accumulator)
        return _after(self._stream, node)

    def process(
        self, function: ProcessWindowFunction[T, R, K, W], output_type: TypeForm[R] = NOT_GIVEN
    ) -> DataStream[R]:
        """Runs a `ProcessWindowFunction` on each window's elements.

        In BATCH they come in event-time order, in STREAMING as they arrived.

        Examples:
            >>> class Count(ProcessWindowFunction):
            ...     def process(self, key: str, context, elements: list[Sale]) -> list[str]:
            ...         return [f"{key}: {len(elements)}"]
            >>> sessions = timed.key_by("shop").window(EventTimeSessionWindows.with_gap(timedelta(hours=2)))
            >>> sorted(collect(sessions.process(Count())))
            ['north: 2', 'south: 1']
        """
        if not isinstance(function, ProcessWindowFunction):
            raise PipelineError(
                f"{self._where('process')}: a window needs a ProcessWindowFunction, not {function!r}; "
                "use apply for a WindowFunction"
            )
        return _after(self._stream, self._with(function, output_type, None, "process"))

    def apply(self, function: WindowFunction[T, R, K, W], output_type: TypeForm[R] = NOT_GIVEN) -> DataStream[R]:
        """Runs a `WindowFunction`, which has an example, on each window's elements.

        In BATCH they come in event-time order, in STREAMING as they arrived.
        """
        if not isinstance(function, WindowFunction):
            raise PipelineError(
                f"{self._where('apply')}: expected a WindowFunction, got {function!r}; "
                "use process for a ProcessWindowFunction"
            )
        return _after(self._stream, self._with(function, output_type, None, "apply"))

    def sum(self, field: str | int = 0) -> DataStream[T]:
        """The sum of a field over each window; the other fields are the first element's."""
        return self._builtin("sum", field)

    def min(self, field: str | int = 0) -> DataStream[T]:
        """The smallest value of a field over each window; the other fields are the first element's."""
        return self._builtin("min", field)

    def max(self, field: str | int = 0) -> DataStream[T]:
        """The largest value of a field over each window; the other fields are the first element's."""
        return self._builtin("max", field)

    def min_by(self, field: str | int = 0) -> DataStream[T]:
        """Each window's element with the smallest value of a field."""
        return self._builtin("min_by", field)

    def max_by(self, field: str | int = 0) -> DataStream[T]:
        """Each window's element with the largest value of a field."""
        return self._builtin("max_by", field)

    def agg(self, *columns: str | Column, output_type: TypeForm[R]) -> DataStream[R]:
        """Column aggregates per key and window, such as `F.sum("delay").alias("delay")`.

        Runs in Catalyst: Spark's `window` and `session_window`. The result has the key's fields, the window's bounds
        where `output_type` has fields `window_start` and `window_end` (datetimes, or milliseconds), and the aggregates.
        In both modes each window gives one result: in BATCH when its key is over, in STREAMING once the watermark has
        passed its end; what comes later is dropped and counted. As local-global aggregation
        (`state.native-aggregates`), which savepoints and keyed operators behind it need, it runs in Arrow in Python
        workers instead of Catalyst.

        Examples:
            >>> class Hour(NamedTuple):
            ...     shop: str
            ...     window_start: datetime
            ...     total: int
            >>> hours = timed.key_by("shop").window(TumblingEventTimeWindows.of(timedelta(hours=1)))
            >>> found = collect(hours.agg(F.sum("amount").alias("total"), output_type=Hour))
            >>> sorted((hour.shop, hour.window_start.hour, hour.total) for hour in found)
            [('north', 9, 3), ('north', 10, 5), ('south', 9, 4)]
        """
        node = self._aggregates(columns, output_type)
        return _after(self._stream, node)

    def _builtin(self, kind: str, field: str | int) -> DataStream[T]:
        return _after(self._stream, self._rolling(kind, field))


# Two streams


@located
class ConnectedStreams(Connected[A, B]):
    """Two streams that an operator sees together, each under its own type.

    Where both are keyed, functions have state and timers of the key that both share: in BATCH one key's records of both
    come together, by event time. Where one is keyed, there is state for its records, and there are no timers: in BATCH
    the other stream's records come first, as they arrive, then the keyed ones, key by key. Without a key their order is
    not defined.
    """

    @overload
    def key_by(
        self,
        key1: Callable[[A], K] | KeySelector[A, K],
        key2: Callable[[B], K] | KeySelector[B, K],
        key_type: TypeForm[K] = NOT_GIVEN,
    ) -> KeyedConnectedStreams[K, A, B]: ...
    @overload
    def key_by(
        self,
        key1: Fields | Callable[[A], K] | KeySelector[A, K],
        key2: Fields | Callable[[B], K] | KeySelector[B, K],
        key_type: TypeForm[K],
    ) -> KeyedConnectedStreams[K, A, B]: ...
    @overload
    def key_by(
        self,
        key1: Fields | Callable[[A], object] | KeySelector[A, object],
        key2: Fields | Callable[[B], object] | KeySelector[B, object],
    ) -> KeyedConnectedStreams[Any, A, B]: ...
    def key_by(self, key1: Any, key2: Any, key_type: Any = None) -> KeyedConnectedStreams[Any, A, B]:
        """Partitions both by key: each a field, a tuple of fields, or a function of the record.

        The keys have to be of one type.
        """
        return KeyedConnectedStreams(self._first, self._second, (key1, key2), key_type)

    def map(self, function: CoMapFunction[A, B, R], output_type: TypeForm[R] = NOT_GIVEN) -> DataStream[R]:
        """One record out for each record of either stream; there is an example at `DataStream.connect`."""
        self._expect(function, (CoMapFunction,), "map")
        return _same(self._apply("map", CoMap(function), output_type, itself))

    def flat_map(self, function: CoFlatMapFunction[A, B, R], output_type: TypeForm[R] = NOT_GIVEN) -> DataStream[R]:
        """Any number of records out for each record of either stream.

        Examples:
            >>> class Both(CoFlatMapFunction):
            ...     def flat_map1(self, value: int) -> list[str]:
            ...         return ["number"] * value
            ...     def flat_map2(self, value: Sale) -> list[str]:
            ...         return [value.shop]
            >>> len(collect(numbers.connect(sales).flat_map(Both())))
            9
        """
        self._expect(function, (CoFlatMapFunction,), "flat_map")
        return _same(self._apply("flat_map", CoFlatMap(function), output_type, main_output))

    def process(self, function: CoProcessFunction[A, B, R], output_type: TypeForm[R] = NOT_GIVEN) -> DataStream[R]:
        """Runs a `CoProcessFunction`, which has an example."""
        self._expect(function, (CoProcessFunction,), "process")
        return _same(self._apply("process", CoProcess(function), output_type, main_output))

    def map_batches(
        self, function: Callable[[pa.RecordBatch, pa.Table], pa.RecordBatch], output_type: TypeForm[R]
    ) -> DataStream[R]:
        """A function of an Arrow batch of the first stream and all records of the second, which is a `broadcast()` one.

        In BATCH the second stream's records are all there before the first batch; they have to fit into memory. In
        STREAMING they are those that have come, and each key group holds a copy of them in its checkpoint; where a
        later record replaces an earlier one, `connect(other.broadcast(descriptor)).process(function)` keeps less. In
        the body of an iteration they are those of the same round.

        Examples:
            >>> import pyarrow.compute as pc
            >>> def above(sales, limits):
            ...     return sales.filter(pc.greater(sales["amount"], pc.max(limits["value"])))
            >>> limits = numbers.filter(lambda n: n == 3)
            >>> sorted(sale.amount for sale in collect(sales.connect(limits.broadcast()).map_batches(above, Sale)))
            [4, 5]
        """
        return _after(self._first, self._on_batches(function, output_type))


@located
class KeyedConnectedStreams(ConnectedStreams[A, B], Generic[K, A, B]):
    """Two streams that are keyed alike: functions have state and timers of the key that both share.

    In BATCH one key's records of both come together, by event time; in STREAMING they come as they arrive.
    """

    def process(
        self,
        function: KeyedCoProcessFunction[K, A, B, R] | CoProcessFunction[A, B, R],
        output_type: TypeForm[R] = NOT_GIVEN,
    ) -> DataStream[R]:
        """Runs a `KeyedCoProcessFunction` or a `CoProcessFunction`.

        Examples:
            >>> class Matched(KeyedCoProcessFunction):
            ...     def open(self, runtime_context):
            ...         self.seen = runtime_context.get_state(ValueStateDescriptor("seen", int))
            ...     def process_element1(self, value: Sale, ctx) -> list[str]:
            ...         self.seen.update((self.seen.value() or 0) + 1)
            ...         return []
            ...     def process_element2(self, value: str, ctx) -> list[str]:
            ...         ctx.timer_service().register_event_time_timer(0)
            ...         return []
            ...     def on_timer(self, timestamp, ctx) -> list[str]:
            ...         return [f"{ctx.get_current_key()}: {self.seen.value()} sales"]
            >>> shops = sales.map(lambda sale: sale.shop, str)
            >>> connected = sales.connect(shops).key_by("shop", lambda shop: shop, str)
            >>> sorted(collect(connected.process(Matched())))
            ['north: 2 sales', 'south: 1 sales']
        """
        self._expect(function, (KeyedCoProcessFunction, CoProcessFunction), "process")
        return _same(self._apply("process", CoProcess(function), output_type, main_output))


class JoinedStreams(Pairs[A, B]):
    """Two streams to be joined: `first.join(second)`; there is an example at `DataStream.join`.

    Go on with `where(key)`, `equal_to(key)`, `window(assigner)` and `apply(function)`.
    """

    kind = "join"

    def window(self, assigner: WindowAssigner[Any, Any]) -> JoinedWindows[A, B]:
        """Pairs are of one key and one window."""
        return JoinedWindows(self._windows(assigner), self.kind)


class CoGroupedStreams(Pairs[A, B]):
    """Two streams to be grouped together: `first.co_group(second)`; there is an example at `DataStream.co_group`.

    Go on with `where(key)`, `equal_to(key)`, `window(assigner)` and `apply(function)`.
    """

    kind = "co_group"

    def window(self, assigner: WindowAssigner[Any, Any]) -> CoGroupedWindows[A, B]:
        """Groups are of one key and one window."""
        return CoGroupedWindows(self._windows(assigner), self.kind)


@located
class JoinedWindows(PairedWindows[A, B]):
    """The windows of a join."""

    def apply(
        self,
        function: Callable[[A, B], R] | JoinFunction[A, B, R] | FlatJoinFunction[A, B, R],
        output_type: TypeForm[R] = NOT_GIVEN,
    ) -> DataStream[R]:
        """A `JoinFunction` (or a function of two records) or a `FlatJoinFunction` for each pair."""
        self._expect(function, (JoinFunction, FlatJoinFunction))
        flat = isinstance(function, FlatJoinFunction)
        kind, unwrap = ("flat_join", main_output) if flat else ("join", itself)
        return _after(self._windows._stream, self._apply(function, kind, output_type, unwrap))


@located
class CoGroupedWindows(PairedWindows[A, B]):
    """The windows of a co-group."""

    def apply(
        self,
        function: Callable[[list[A], list[B]], Iterable[R]] | CoGroupFunction[A, B, R],
        output_type: TypeForm[R] = NOT_GIVEN,
    ) -> DataStream[R]:
        """A `CoGroupFunction` (or a function of two lists) for each key and window."""
        self._expect(function, (CoGroupFunction,))
        return _after(self._windows._stream, self._apply(function, "co_group", output_type, main_output))


@located
class IntervalJoined(Intervals[A, B]):
    """`first.interval_join(second)` on keyed streams; go on with `between(lower, upper)` and `process(function)`."""

    def process(self, function: ProcessJoinFunction[A, B, R], output_type: TypeForm[R] = NOT_GIVEN) -> DataStream[R]:
        """Runs a `ProcessJoinFunction` on each pair. What it emits carries the later of the pair's event times."""
        return _same(self._pairs(function, output_type))


@located
class BroadcastConnectedStream(BroadcastConnected[A, B]):
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
        return _after(self._stream, self._process(self._stream, None, function, output_type))


@located
class KeyedBroadcastConnectedStream(BroadcastConnected[A, B], Generic[K, A, B]):
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
        return _after(self._stream, self._process(self._stream, self._stream._key_selector, function, output_type))


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
        """Sets how many partitions are written at once."""
        check_parallelism(parallelism, f"{self._pipeline.name}: sink '{self._pipeline._node(self._node).name}'")
        self._pipeline._change(self._node, parallelism=parallelism)
        return self


def _millis(what: str, length: timedelta | None) -> int | None:
    return None if length is None else checked_span(what, length, 0)


def _everything(record: Any) -> int:
    return 0


def _after(stream: BaseStream[Any], node: Node) -> DataStream[Any]:
    return DataStream(stream._pipeline, node.id)


def _same(stream: BaseStream[Any]) -> DataStream[Any]:
    """Return the stream itself, which was built as one of the classes of this file."""
    assert isinstance(stream, DataStream)
    return stream
