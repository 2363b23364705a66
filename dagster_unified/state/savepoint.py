"""`Savepoint`: reads, changes and writes the state that runs hand to each other. Needs no Spark and no JVM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Protocol, get_args, overload

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from dagster_unified.connectors.protocol.positions import Position, Unread
from dagster_unified.errors import StateError, nearest
from dagster_unified.graph.nodes import Graph
from dagster_unified.graph.nodes import Node as GraphNode
from dagster_unified.graph.options import option
from dagster_unified.operators.drivers.key_groups import ControlEvent
from dagster_unified.operators.state.columns import TypedColumn
from dagster_unified.operators.state.table import ENCODED, EVENT_TIMERS, HELD, PROCESSING_TIMERS, ROLE, SUBTASK_KEY
from dagster_unified.operators.time import wall_clock
from dagster_unified.state import manifest as manifests
from dagster_unified.state.manifest import (
    SUBTASK_ROLES,
    Column,
    IterationState,
    Manifest,
    OperatorState,
    columns_of,
    from_spark,
    table_schema,
    to_spark,
)
from dagster_unified.state.state_table import (
    arrow_table,
    check_windows,
    is_frame,
    millis,
    plain_rows,
    state_schema,
    to_state_frame,
    to_state_table,
)
from dagster_unified.state.tables import CODEC, copy_files, files_in, read_batches, read_frame, write_batches
from dagster_unified.storage.paths import for_spark, storage_path
from dagster_unified.version import library_version

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from upath import UPath


class PipelineGraph(Protocol):
    """A pipeline: anything that has a graph."""

    @property
    def name(self) -> str: ...
    def graph(self) -> Graph: ...


@dataclass(frozen=True)
class Operator:
    """The state of one operator in a savepoint. `rows` and `bytes` are None where it has not been written yet."""

    uid: str
    name: str
    columns: tuple[Column, ...]
    rows: int | None = None
    bytes: int | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """The columns of the key."""
        return tuple(column.name for column in self.columns if column.role == "key")

    @property
    def states(self) -> tuple[Column, ...]:
        """The columns of its states, keyed ones first."""
        return tuple(column for column in self.columns if column.role in ("state", "broadcast", *SUBTASK_ROLES))


@dataclass(frozen=True)
class _StateLocation:
    """Where an operator's state is: in a savepoint's folder, or in a table that is still to be written."""

    state: OperatorState
    folder: UPath | None = None
    table: Any = None

    def describe(self) -> Operator:
        state, stored = self.state, self.folder is not None
        known = stored or isinstance(self.table, pa.Table)
        return Operator(
            state.uid,
            state.name,
            tuple(state.columns),
            state.rows if known else None,
            state.bytes if stored else None,
        )


@dataclass(frozen=True)
class Savepoint:
    """The state of a pipeline's operators, and what was read of its sources (Flink: *State Processor API*).

    `Savepoint.read(path)` reads one that a run has left; `Savepoint.new(pipeline)` begins an empty one. `with_state`,
    `without`, `renamed`, `with_position` and `with_watermark` each return another savepoint, which is written by
    `write`; none of them changes what has been written. A run of either mode starts from a savepoint with
    `execution.state-recovery.path`.

    Examples:
        >>> import pyarrow as pa
        >>> from dagster_unified.state import Savepoint
        >>> totals = pa.table({"shop": ["north", "south"], "amount": [7, 2]})
        >>> savepoint = Savepoint.new("shops").with_state("totals", totals, key="shop")
        >>> savepoint.keyed_state("totals").to_pylist()
        [{'shop': 'north', 'amount': 7}, {'shop': 'south', 'amount': 2}]
    """

    manifest: Manifest = field(repr=False)
    path: str = ""
    """Where it was read; empty for one that has not been written."""

    _locations: Mapping[str, _StateLocation] = field(default_factory=dict, repr=False)
    _graph: Graph | None = field(default=None, repr=False)

    @classmethod
    def read(cls, path: str) -> Savepoint:
        """Read the savepoint in a folder, on any path that `universal_pathlib` knows.

        Reads the manifest and checks that the files are there; raises `StateError` where one is missing.
        """
        folder, manifest = manifests.read(path)
        locations = {state.uid: _StateLocation(state, folder) for state in manifest.operators}
        return cls(manifest, str(folder), locations)

    @classmethod
    def new(cls, pipeline: PipelineGraph | str) -> Savepoint:
        """Return an empty savepoint for a pipeline, with nothing read of its sources.

        With the pipeline and not only its name, uids and keys are checked against it; the start of a job checks
        whatever else the operators declare.
        """
        graph = None if isinstance(pipeline, str) else pipeline.graph()
        parallelism = option("pipeline.max-parallelism").default
        manifest = Manifest(
            library=library_version(),
            pipeline=pipeline if isinstance(pipeline, str) else pipeline.name,
            mode="",
            taken=wall_clock(),
            reason="written by a program",
            max_parallelism=int(parallelism),
            event=ControlEvent(),
            operators=[],
            positions={node.uid: Unread() for node in (graph.sources if graph is not None else ())},
        )
        return cls(manifest, _graph=graph)

    # What it holds

    @property
    def pipeline(self) -> str:
        """The pipeline whose state it is."""
        return self.manifest.pipeline

    @property
    def mode(self) -> str:
        """The mode that wrote it, `BATCH` or `STREAMING`; empty where no run did."""
        return self.manifest.mode

    @property
    def taken(self) -> datetime:
        """When it was written."""
        return datetime.fromtimestamp(self.manifest.taken / 1000, timezone.utc)

    @property
    def operators(self) -> tuple[Operator, ...]:
        """The operators that have state."""
        return tuple(location.describe() for location in self._locations.values())

    @property
    def positions(self) -> Mapping[str, Position]:
        """The position of each source, by its uid; its `describe()` says it in words."""
        return self.manifest.positions

    @property
    def epochs(self) -> Mapping[str, int]:
        """The last epoch that each query of a STREAMING job had committed."""
        return self.manifest.epochs

    @property
    def watermarks(self) -> Mapping[str, int]:
        """The watermark that each operator has reached, by its uid, in milliseconds since the epoch."""
        return self.manifest.event.watermarks

    def operator(self, uid: str) -> Operator:
        """Describe the state of one operator; raises `StateError` where there is none."""
        return self._location(uid).describe()

    @overload
    def keyed_state(self, uid: str) -> pa.Table: ...
    @overload
    def keyed_state(self, uid: str, *, spark: SparkSession) -> DataFrame: ...
    def keyed_state(self, uid: str, *, spark: SparkSession | None = None) -> pa.Table | DataFrame:
        """The table of an operator: a row for each key, or of operator state for each subtask; or a DataFrame.

        What Arrow has no type for is msgpack in the column `__encoded`; `rows` decodes it. The checksums of Parquet's
        pages are verified; raises `StateError` naming a file that is missing or damaged.
        """
        location = self._location(uid)
        if spark is not None:
            if location.folder is not None:
                return read_frame(spark, location.folder, location.state)
            return location.table if is_frame(location.table) else spark.createDataFrame(location.table)
        if location.folder is not None:
            return pa.Table.from_batches(read_batches(location.folder, location.state), table_schema(location.state))
        return location.table.toArrow() if is_frame(location.table) else location.table

    def rows(self, uid: str) -> Iterator[dict[str, Any]]:
        """The rows of an operator as plain Python values, decoded where they are msgpack, as the file is read.

        A state without a value is not in its row. Decoded values are as msgpack has them: an enum's member is its
        value, a Decimal is a text, a set and a tuple are lists.
        """
        for batch in self._batches(uid):
            yield from plain_rows(batch)

    def timers(self, uid: str) -> pa.Table:
        """The pending timers of an operator, a row for each.

        The columns are those of the key, the domain (`event` or `processing`), the timestamp in milliseconds since the
        epoch, and the generation: how many timers, each registered by the one before, led to it.
        """
        return self._exploded(uid, _timers_of)

    def held_back(self, uid: str) -> pa.Table:
        """The elements that an operator holds back until the watermark reaches them, a row for each.

        The columns are those of the key, the timestamp in milliseconds since the epoch, and the record; or, where Arrow
        has no type for the record, `encoded`: the record as msgpack.
        """
        return self._exploded(uid, _held_back_of)

    @property
    def iterations(self) -> tuple[IterationState, ...]:
        """The iterations of a STREAMING job, and the records that wait in each for its next epoch.

        In an unbounded iteration they were fed back in its last epoch; the state of its operators has the uid
        `iteration uid.operator uid`. In a bounded one all records that came in wait until its input ends.
        """
        return tuple(self.manifest.iterations)

    def feedback(self, uid: str, *, broadcast: bool = False, replayed: bool = False) -> pa.Table:
        """The records that wait in an iteration for one of its operators.

        `broadcast` asks for those that the operator gets by broadcast, `replayed` for those that it gets in every
        epoch. Raises `StateError` where none wait for it.
        """
        waiting = [records for loop in self.iterations for records in loop.feedback]
        wanted = uid, broadcast, replayed
        table = next(
            (
                records.table
                for records in waiting
                if (records.table.uid, records.broadcast, records.replayed) == wanted
            ),
            None,
        )
        if table is None:
            known = sorted({records.table.uid for records in waiting})
            raise StateError(
                f"{self.pipeline}: the savepoint in {self.path} has no {'replayed ' * replayed}records that wait for"
                f" '{uid}'{' as broadcast' * broadcast}: there are some for {', '.join(known) or 'none'}"
                f"{nearest(uid, known)}"
            )
        return pa.Table.from_batches(read_batches(self.path, table), table_schema(table))

    # What may be changed

    def with_state(
        self,
        uid: str,
        table: object,
        key: str | Sequence[str] | None = None,
        *,
        timers: object = None,
        name: str | None = None,
    ) -> Savepoint:
        """Return the savepoint with a table as the state of an operator, instead of the state that it has.

        `table` is a table of Arrow, of another library that hands out Arrow's columns (pandas, Polars, DuckDB), or a
        Spark DataFrame. It has a row for each key: the columns of `key`, by default the pipeline's, and a column for
        each state, with its name. You can pass what `keyed_state` returns.

        `timers` is a table of the same kind: the columns of the key, `timestamp` (a time, or milliseconds since the
        epoch), and `domain` where it is not event time.

        Raises `StateError` where the table is no state, or not the state of the pipeline's operator.
        """
        where = f"{self.pipeline}: operator '{uid}'"
        if is_frame(table):
            columns = self._key_of(uid, key, ())
            if timers is not None and not is_frame(timers):
                raise StateError(
                    f"{where}: its state is a DataFrame of Spark's, and its timers are not; give one as well"
                )
            frame = to_state_frame(where, table, columns, timers)
            rows, count = frame, 0
            schema = state_schema(where, from_spark(frame.schema.json()), columns)
        else:
            arrow = arrow_table(where, table)
            columns = self._key_of(uid, key, _with_key_role(arrow.schema))
            times = None if timers is None else arrow_table(where, timers)
            rows = to_state_table(where, arrow, columns, times)
            schema, count = rows.schema, rows.num_rows
        self._check_key(where, uid, schema, columns)
        check_windows(where, rows, schema, columns)
        state = OperatorState(uid, name or self._name_of(uid), "", columns_of(schema), to_spark(schema), count, 0, [])
        return replace(self, _locations={**self._locations, uid: _StateLocation(state, None, rows)})

    def without(self, uid: str) -> Savepoint:
        """Return the savepoint without an operator's state."""
        self._location(uid)
        return replace(
            self, _locations={known: location for known, location in self._locations.items() if known != uid}
        )

    def renamed(self, uid: str, new_uid: str) -> Savepoint:
        """Return the savepoint with the state of an operator under another uid."""
        self._location(uid)
        if new_uid in self._locations:
            raise StateError(f"{self.pipeline}: there is state of '{new_uid}' already; drop it with without(...)")
        locations = {}
        for known, location in self._locations.items():
            if known == uid:
                known, location = new_uid, replace(location, state=msgspec.structs.replace(location.state, uid=new_uid))
            locations[known] = location
        watermarks = {new_uid if known == uid else known: time for known, time in self.watermarks.items()}
        event = msgspec.structs.replace(self.manifest.event, watermarks=watermarks)
        return replace(self, manifest=msgspec.structs.replace(self.manifest, event=event), _locations=locations)

    def with_position(self, source_uid: str, position: Position) -> Savepoint:
        """Return the savepoint with another position of a source: a run that starts from it reads what comes after.

        Raises `StateError` where the pipeline has no such source, and where `position` is no position.
        """
        if not isinstance(position, get_args(Position)):
            kinds = ", ".join(kind.__name__ for kind in get_args(Position))
            raise StateError(
                f"{self.pipeline}: the position of source '{source_uid}' is one of {kinds} (dagster_unified.state), and"
                f" not {position!r}"
            )
        if self._graph is not None:
            known = [node.uid for node in self._graph.sources]
            if source_uid not in known:
                raise StateError(
                    f"{self.pipeline}: no source has the uid '{source_uid}': there are"
                    f" {', '.join(known)}{nearest(source_uid, known)}"
                )
        positions = {**self.positions, source_uid: position}
        return replace(self, manifest=msgspec.structs.replace(self.manifest, positions=positions))

    def with_watermark(self, uid: str, watermark: datetime | int) -> Savepoint:
        """Return the savepoint with the watermark that an operator has reached; an int is milliseconds since the epoch.

        The operator treats older records as late. An operator without a watermark has seen no time.
        """
        watermarks = {**self.watermarks, uid: millis(watermark)}
        event = msgspec.structs.replace(self.manifest.event, watermarks=watermarks)
        return replace(self, manifest=msgspec.structs.replace(self.manifest, event=event))

    def write(self, path: str) -> Savepoint:
        """Write the savepoint into a folder, and return it as it was written.

        Files of operators that were not changed are copied. The manifest is written last. Raises `StateError` where
        there is a savepoint already.
        """
        folder, attempt = manifests.check_free(path, "savepoint"), manifests.new_attempt()
        operators = [self._write(location, folder, attempt) for location in self._locations.values()]
        iterations = []
        for loop in self.iterations:
            waiting = [
                msgspec.structs.replace(records, table=self._copied(records.table, folder, attempt))
                for records in loop.feedback
            ]
            iterations.append(msgspec.structs.replace(loop, feedback=waiting))
        handed_on = [self._copied(table, folder, attempt) for table in self.manifest.handed_on]
        changed = {"operators": operators, "iterations": iterations, "handed_on": handed_on}
        manifests.commit(folder, msgspec.structs.replace(self.manifest, **changed))
        return Savepoint.read(path)

    # How

    def _location(self, uid: str) -> _StateLocation:
        if uid not in self._locations:
            there = ", ".join(self._locations) or "none"
            place = f" in {self.path}" if self.path else ""
            raise StateError(
                f"{self.pipeline}: the savepoint{place} has no state of '{uid}': there is state of"
                f" {there}{nearest(uid, self._locations)}"
            )
        return self._locations[uid]

    def _batches(self, uid: str) -> Iterator[pa.RecordBatch]:
        location = self._location(uid)
        if location.folder is not None:
            return read_batches(location.folder, location.state)
        return iter(self.keyed_state(uid).to_batches())

    def _exploded(self, uid: str, explode: Callable[[pa.RecordBatch, Sequence[str]], pa.Table]) -> pa.Table:
        location = self._location(uid)
        key, empty = location.describe().key, _no_rows(table_schema(location.state))
        tables = [explode(batch, key) for batch in (empty, *self._batches(uid))]
        return pa.concat_tables(tables, promote_options="default")

    def _node(self, uid: str) -> GraphNode | None:
        if self._graph is None:
            return None
        known = {node.uid: node for node in self._graph.nodes if node.runs_by_key}
        if uid not in known:
            there = ", ".join(known) or "none with state"
            raise StateError(
                f"{self.pipeline}: no operator with state has the uid '{uid}': there are {there}{nearest(uid, known)}"
            )
        return known[uid]

    def _name_of(self, uid: str) -> str:
        if uid in self._locations:
            return self._locations[uid].state.name
        node = self._node(uid)
        return uid if node is None else node.name

    def _key_of(self, uid: str, key: str | Sequence[str] | None, table_key: tuple[str, ...]) -> tuple[str, ...]:
        """The columns of an operator's key: `key` where it is given, else the pipeline's, else the table's own."""
        node = self._node(uid)
        declared = None if node is None else _declared_key(node)
        if key is not None:
            named = (key,) if isinstance(key, str) else tuple(key)
            if declared is not None and named != declared:
                raise StateError(
                    f"{self.pipeline}: operator '{uid}' is keyed by {', '.join(declared)}, and the table by"
                    f" {', '.join(named)}; name the columns as the operator does"
                )
            return named
        stored = self._locations[uid].describe().key if uid in self._locations else ()
        known = declared or table_key or stored
        if not known:
            raise StateError(
                f"{self.pipeline}: operator '{uid}': say which columns are its key, with key=, or give Savepoint.new"
                " the pipeline and not only its name"
            )
        return known

    def _check_key(self, where: str, uid: str, schema: pa.Schema, key: Sequence[str]) -> None:
        node = self._node(uid)
        if node is None or self._graph is None:
            return
        for name, python in zip(key, _key_types(self._graph, node), strict=True):
            column = TypedColumn(f"{where}: key '{name}'", python)
            if schema.field(name).type != column.arrow:
                column.migration(schema.field(name).type)

    def _copied(self, table: OperatorState, folder: UPath, attempt: str) -> OperatorState:
        """Copy a table of records on their way into another savepoint."""
        name = f"{attempt}/{table.folder.partition('/')[2]}"
        files = copy_files(table, storage_path(self.path, "savepoint"), name, folder)
        return msgspec.structs.replace(table, folder=name, files=files)

    def _write(self, location: _StateLocation, folder: UPath, attempt: str) -> OperatorState:
        name, state = f"{attempt}/{manifests.folder_of(location.state.uid)}", location.state
        if location.folder is not None:
            files = copy_files(state, location.folder, name, folder)
        elif is_frame(location.table):
            writer = location.table.write.mode("overwrite").option("compression", CODEC)
            writer.parquet(for_spark(folder / name))
            files = files_in(folder / name, folder)
            rows = 0
            for file in files:
                with (folder / file.path).open("rb") as opened:
                    rows += pq.ParquetFile(opened).metadata.num_rows
            state = msgspec.structs.replace(state, rows=rows, schema=location.table.schema.json())
        else:
            files = write_batches(location.table, folder / name, folder)
        size = sum(file.bytes for file in files)
        return msgspec.structs.replace(state, folder=name, files=files, bytes=size)


def _no_rows(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.nulls(0, f.type) for f in schema], schema=schema)


def _with_key_role(schema: pa.Schema) -> tuple[str, ...]:
    return tuple(field.name for field in schema if (field.metadata or {}).get(ROLE) == b"key")


def _declared_key(node: GraphNode) -> tuple[str, ...]:
    assert node.key is not None
    return (SUBTASK_KEY,) if node.holds_subtask_state else node.key.fields or ("key",)


def _key_types(graph: Graph, node: GraphNode) -> list[Any]:
    assert node.key is not None
    if node.key.computed is not None:
        return [node.key.computed.python]
    if not node.key.fields:
        return [int]
    edge = graph.main_inputs(node.id)[0]
    records = graph.records_of(edge)
    assert records is not None
    return [records.type_of(name) for name in node.key.fields]


def _timers_of(batch: pa.RecordBatch, key: Sequence[str]) -> pa.Table:
    tables = []
    for domain, column in (("event", EVENT_TIMERS), ("processing", PROCESSING_TIMERS)):
        if column in batch.schema.names:
            owners, timers = _keyed_elements(batch, column, key)
            domains = pa.array([domain] * len(timers), pa.string())
            columns = {**owners, "domain": domains}
            tables.append(pa.table(columns | {n: timers.field(n) for n in ("timestamp", "generation")}))
    if tables:
        return pa.concat_tables(tables)
    owners = {name: batch.column(name).slice(0, 0) for name in key}
    numbers = pa.array([], pa.int64())
    return pa.table({**owners, "domain": pa.array([], pa.string()), "timestamp": numbers, "generation": numbers})


def _held_back_of(batch: pa.RecordBatch, key: Sequence[str]) -> pa.Table:
    encoded = _encoded_elements(batch, key)
    if HELD not in batch.schema.names:
        return encoded
    owners, elements = _keyed_elements(batch, HELD, key)
    typed = pa.table({**owners, "timestamp": elements.field("timestamp"), "record": elements.field("record")})
    return pa.concat_tables([typed, encoded], promote_options="default") if encoded.num_rows else typed


def _encoded_elements(batch: pa.RecordBatch, key: Sequence[str]) -> pa.Table:
    """The elements that Arrow has no type for."""
    places: list[int] = []
    times: list[int] = []
    records: list[bytes] = []
    entries = batch.column(ENCODED).to_pylist() if ENCODED in batch.schema.names else []
    decoder = msgspec.msgpack.Decoder(list[tuple[int, msgspec.Raw]])
    for place, values in enumerate(entries):
        for name, data in values or ():
            if name == HELD:
                elements = decoder.decode(data)
                places += [place] * len(elements)
                times += [time for time, _ in elements]
                records += [bytes(record) for _, record in elements]
    owners = {name: batch.column(name).take(pa.array(places, pa.int64())) for name in key}
    return pa.table({**owners, "timestamp": pa.array(times, pa.int64()), "encoded": pa.array(records, pa.binary())})


def _keyed_elements(
    batch: pa.RecordBatch, column: str, key: Sequence[str]
) -> tuple[dict[str, pa.Array], pa.StructArray]:
    """The elements of a column of lists, and the key of each."""
    import pyarrow.compute as pc  # slow to load

    lists = batch.column(column)
    parents = pc.list_parent_indices(lists)
    return {name: batch.column(name).take(parents) for name in key}, lists.flatten()
