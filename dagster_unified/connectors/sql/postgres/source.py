"""A source that reads a table or a query of PostgreSQL: in BATCH one snapshot, in STREAMING its new rows."""

from __future__ import annotations

import copy
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from datetime import datetime, timedelta, timezone
from math import floor
from typing import TYPE_CHECKING, Any, Literal, Self
from uuid import uuid4

import msgspec
import pyarrow as pa

from dagster_unified.connectors.protocol.bounds import in_any_zone, whole_numbers
from dagster_unified.connectors.protocol.frame import Malformed
from dagster_unified.connectors.protocol.positions import Offsets, Range, cuts
from dagster_unified.connectors.protocol.source import at_end_of_read
from dagster_unified.connectors.secrets import Value
from dagster_unified.connectors.sql.postgres.connection import (
    GivesConnection,
    PostgresConnection,
    TableName,
    errors_of,
    quoted,
)
from dagster_unified.connectors.sql.postgres.staging import lock_of
from dagster_unified.connectors.sql.postgres.types import AskedField, misfits
from dagster_unified.connectors.sql.table_source import ReadField, TableSource, converted, key_ranges
from dagster_unified.errors import PipelineError, SourceError, UnavailableError
from dagster_unified.graph.connectors import Boundedness, Place, TimeRange
from dagster_unified.operators.functions.type_variables import Out
from dagster_unified.operators.time import checked_span, to_millis
from dagster_unified.records import record_type
from dagster_unified.values import check_count

if TYPE_CHECKING:
    import psycopg
    from pyspark.sql import DataFrame, SparkSession

    from dagster_unified.connectors.protocol.positions import Position

_LINGER_SECONDS = 600.0
"""Seconds that an unread snapshot is kept: for a branch of a plan that starts late, or a task's next attempt."""

_LOOK_SECONDS = 5.0


class Snapshot(msgspec.Struct, frozen=True):
    """A snapshot, for workers."""

    name: str
    lock: int
    """The advisory lock that a reader holds."""


def export(connection: PostgresConnection, where: str) -> tuple[Snapshot, psycopg.Connection[tuple[Any, ...]]]:
    """Export a snapshot, kept by a thread while it is used; also returns the connection that keeps it."""
    client = connection.connect(where)
    with errors_of(connection, where):
        client.execute("SET idle_in_transaction_session_timeout = 0; SET TIME ZONE 'UTC'")
        client.commit()
        client.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        row = client.execute("SELECT pg_export_snapshot()").fetchone()
    assert row is not None
    return Snapshot(row[0], lock_of(uuid4().hex[:14])), client


def keep(snapshot: Snapshot, client: psycopg.Connection[tuple[Any, ...]]) -> None:
    """Keep the snapshot until it has been read, nobody has read it for a while, or this process ends."""
    ended = threading.Event()
    holder = threading.Thread(target=_hold, args=(snapshot, client, ended), name="postgres-snapshot", daemon=True)
    holder.start()

    def release() -> None:
        ended.set()
        holder.join(_LOOK_SECONDS)

    at_end_of_read(release)


def _hold(snapshot: Snapshot, client: psycopg.Connection[tuple[Any, ...]], ended: threading.Event) -> None:
    used = time.monotonic()
    statement = (
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1"
        " AND (classid::int8 << 32) | objid::int8 = %s"
    )
    with suppress(Exception):  # the connection is gone, and the snapshot with it: readers say so
        while time.monotonic() - used < _LINGER_SECONDS and not ended.wait(_LOOK_SECONDS):
            row = client.execute(statement, (snapshot.lock,)).fetchone()
            if row is not None and row[0]:
                used = time.monotonic()
    with suppress(Exception):
        client.close()


_PART = "rows"
"""The one part of a followed table."""

_FIRST = -(2**63)
"""The offset before all rows."""

_NOTHING, _ALL = {_PART: 0}, {_PART: 1}
"""The offsets of a table that is not followed, which is read at once."""

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)

_WHOLE = ("int2", "int4", "int8")
_QUERY = re.compile(r"\s*(SELECT|WITH|VALUES|TABLE)\s", re.IGNORECASE)
_PAGES = 128
"""Pages of a split at least: 1 MB."""

_ROWS = 50_000
"""About how many rows a split of a micro-batch has."""

_POLL_SECONDS = 0.02

_WRITERS = """
SELECT DISTINCT l.virtualtransaction FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
WHERE l.locktype = 'relation' AND l.mode = 'RowExclusiveLock' AND l.pid <> pg_backend_pid()
  AND c.relkind NOT IN ('i', 'I') AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
"""Transactions that write tables or have taken numbers of sequences; VACUUM locks indexes alike, and does neither."""


_LAST_NUMBER = "SELECT pg_sequence_last_value(pg_get_serial_sequence(%s, %s)::regclass)"
"""The last number of a column's own sequence; null where it has none, or may not be read."""

_LEAVES = """
SELECT n.nspname, c.relname, pg_relation_size(c.oid) / current_setting('block_size')::int8,
       c.relkind IN ('r', 'm') AND has_table_privilege(c.oid, 'SELECT') AND has_schema_privilege(n.oid, 'USAGE'),
       row_security_active(c.oid)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE (c.oid = %s AND c.relkind <> 'p')
   OR c.oid IN (SELECT relid FROM pg_partition_tree(%s) WHERE isleaf AND relid <> %s)
"""
"""Where the rows of a table are: the pages, whether they can be read there, and whether only some of their rows."""


class PostgresSplit(msgspec.Struct, frozen=True):
    """The work of one task: a statement, and the snapshot in which it runs."""

    statement: str
    place: str
    snapshot: Snapshot | None = None


class PostgresSource(TableSource[Out]):
    """Reads a table of PostgreSQL, or a query that begins with SELECT or WITH.

    In BATCH all tasks read one snapshot: a table in ranges of its pages, anything else in ranges of `split_by`, a
    column of whole numbers, or in one task. A partition's window of `partitioned_by(field)` is part of the statement
    that the server runs. The snapshot is kept open while the job reads, which holds up VACUUM for as long.

    In STREAMING it reads the table once, in one micro-batch and one snapshot. With `follow` it reads new rows as
    well, by a column that only grows, of whole numbers such as a serial, or of `timestamptz`, with an index. Rows
    that are changed or deleted are not seen. Transactions commit in another order than they take numbers, so a
    position waits for those that were running when it was read, at most `lag`; and a `timestamptz` is read once it
    is `lag` old, also by a run for a window that has just ended. What commits later than that is missed, so let
    `lag` be longer than the longest transaction that writes the table. Numbers that are taken ahead, by a sequence
    with a CACHE above 1 or by a program, come late at any lag. A sequence that was set back, as in a table that was
    made again, is an error. BATCH also reads by `follow`, if it is given, so that a stream goes on where it ended, and
    a `timestamptz` that is followed bounds it to a partition in time.

    A field is read from a column of its name. Nested fields and `dict`s are read from `json`, `jsonb`, arrays and
    composite types. With `bounded=False` the source does not end, and the pipeline runs in STREAMING. Raises
    `SourceError` where columns do not fit the record, before anything is read, and `UnavailableError` where the server
    is away.

    Examples:
        >>> class Order(NamedTuple):
        ...     id: int
        ...     shop: str
        >>> orders = PostgresSource("public.orders", Order, "postgresql://etl@db.example/shop", follow="id")
        >>> orders.describe()
        'table public.orders at postgresql://db.example:5432/shop, followed by id'
    """

    kind = "postgres"

    def __init__(
        self,
        table: str,
        record: type[Out] | Any,
        connection: PostgresConnection | GivesConnection | Value,
        *,
        name: str | None = None,
        follow: str | None = None,
        lag: timedelta = timedelta(seconds=10),
        split_by: str | None = None,
        parallelism: int = 8,
        bounded: bool = True,
        max_records_per_trigger: int | None = None,
        on_malformed: Literal["fail", "drop", "divert"] = "fail",
    ) -> None:
        self.query = table.strip().rstrip(";") if _QUERY.match(table) else None
        self.table = TableName.of(table) if self.query is None else None
        self.name = name or (self.table.table if self.table else "query")
        self.records = record_type(record, f"source '{self.name}'")
        self.connection = PostgresConnection.of(connection)
        self.resource_keys = self.connection.resource_keys
        self.follow, self.lag, self.split_by = follow, lag, split_by
        self.parallelism = parallelism
        self.boundedness = Boundedness.BOUNDED if bounded else Boundedness.UNBOUNDED
        self.max_records_per_trigger, self.on_malformed = max_records_per_trigger, on_malformed
        self._in_snapshot = False
        self._check()
        self.finds_times = self._is_time

    def _check(self) -> None:
        checked_span(f"source '{self.name}': lag", self.lag, 0)
        self._check_split_by()
        if self.follow is not None and self._check_field(self.follow) not in (pa.int64(), pa.timestamp("us", "UTC")):
            raise PipelineError(f"source '{self.name}': follow='{self.follow}' has to be an int or a datetime")
        if self.boundedness is Boundedness.UNBOUNDED and self.follow is None:
            raise PipelineError(
                f"source '{self.name}': STREAMING reads new rows by a column that only grows; name it with follow=..."
            )
        if self.max_records_per_trigger is not None:
            check_count(f"source '{self.name}': max_records_per_trigger", self.max_records_per_trigger)

    def places(self) -> Sequence[Place]:
        return () if self.table is None else [self.connection.place(self.table)]

    def connected(self, resources: Mapping[str, object]) -> Self:
        changed = copy.copy(self)
        changed.connection = self.connection.connected(resources)
        return changed

    def describe(self) -> str:
        what = f"table {self.table}" if self.table else "a query"
        followed = f", followed by {self.follow}" if self.follow else ""
        return f"{what} at {self.connection.describe()}{followed}{self.of_partition()}"

    @property
    def origin(self) -> str:
        what = str(self.table) if self.table else f"({self.query})"
        return f"{what} at {self.connection.describe()} by {self.follow}"

    def settings(self) -> str:
        return f"{super().settings()} {self.query} {self.follow} {self.split_by}"

    # Positions

    def newest(self) -> Offsets:
        """The end of the rows before which nobody can commit any more; waits for running transactions, at most `lag`.

        Rows that a snapshot does not see may come before its last row, if their transaction was running. All of these
        have ended when no transaction older than the snapshot's end is running any more. A transaction that has taken a
        number may have no id of its own yet; but it holds locks.
        """
        if self.follow is None:
            return _ALL
        column = quoted(self.follow)
        with closing(self._connect()) as client, self._errors():
            aged = ""
            if self._is_time:
                aged = f" WHERE {column} < clock_timestamp() - interval '{self.lag.total_seconds()} s'"
            row = client.execute(
                f"SELECT {self._as_offset(f'max({column})')}, pg_snapshot_xmax(pg_current_snapshot())::text"
                f" FROM {self._from}{aged}".encode()
            ).fetchone()
            assert row is not None
            # after the number was read: who has ended in between is seen by whoever reads up to there
            writers = [writer for (writer,) in client.execute(_WRITERS).fetchall()]
            deadline = time.monotonic() + self.lag.total_seconds()
            while time.monotonic() < deadline and not self._have_ended(client, row[1], writers):
                time.sleep(_POLL_SECONDS)
        return {_PART: _FIRST if row[0] is None else int(row[0]) + 1}

    def oldest(self) -> Offsets:
        """Before all rows: the lowest visible row may not be the lowest that is being written."""
        return _NOTHING if self.follow is None else {_PART: _FIRST}

    def at(self, moment: datetime) -> Offsets:
        return {_PART: floor(moment.replace(microsecond=0).timestamp()) * 1_000_000 + moment.microsecond}

    def batch_position(self, spark: SparkSession) -> Position:
        if self.follow is None and self.slice is None:
            raise self._positionless()
        return super().batch_position(spark)

    def limited(self, start: Offsets, end: Offsets) -> Offsets:
        """The offset after this many rows, and after all rows equal to the last of them."""
        most = self.max_records_per_trigger
        if most is None or self.follow is None:
            return end
        column = quoted(self.follow)
        with closing(self._connect()) as client, self._errors():
            row = client.execute(
                f"SELECT {self._as_offset(column)} FROM {self._from}"
                f" WHERE {self._between(start[_PART], end[_PART])} ORDER BY {column} OFFSET {most - 1} LIMIT 1".encode()
            ).fetchone()
        return end if row is None else {_PART: int(row[0]) + 1}

    def backlog(self, offset: str, latest: str) -> int | None:
        """Unknown: neither numbers nor microseconds tell how many rows lie between them."""
        return None

    def _batch_range(self) -> Range:
        window = self._window()
        if window is not None:
            self._await_window(window.end)
        return super()._batch_range()

    def _await_window(self, end: datetime) -> None:
        """Wait until a window that has just ended is `lag` old on the server's clock, which may be a little behind.

        A window far from its end is read as it is.
        """
        with closing(self._connect()) as client, self._errors():
            row = client.execute("SELECT clock_timestamp()").fetchone()
        assert row is not None
        rest = end + self.lag - row[0]
        if timedelta(0) < rest <= 2 * self.lag:
            time.sleep(rest.total_seconds())

    def _unlost(self, read: Offsets, end: Offsets) -> Offsets:
        """Rows may be deleted after they were read, so that the table ends earlier.

        Raises `SourceError` where the sequence of the followed column returns numbers again that were read.
        """
        for part, offset in read.items():
            if offset > end.get(part, offset):
                self._check_sequence(offset - 1)
        return {part: max(offset, read.get(part, offset)) for part, offset in end.items()}

    def _check_sequence(self, read: int) -> None:
        if self.table is None or self.follow is None or self._is_time:
            return
        with closing(self._connect()) as client, self._errors():
            row = client.execute(_LAST_NUMBER, (self.table.sql, self.follow)).fetchone()
        last_number = None if row is None else row[0]
        if last_number is not None and last_number < read:
            raise SourceError(
                f"{self._where}: {self._place} was read up to {self.follow} {read}, and its sequence has given numbers"
                f" up to {last_number} only: the table was made again, or the sequence was set back, and rows with"
                " lower numbers would never be read; start without state, or with another uid, to read it from its"
                " beginning"
            )

    @property
    def _is_time(self) -> bool:
        return self.follow is not None and self.records.schema.field(self.follow).type != pa.int64()

    def _as_offset(self, value: str) -> str:
        return f"(EXTRACT(EPOCH FROM {value}) * 1000000)::int8" if self._is_time else value

    def _between(self, start: int, end: int) -> str:
        """The condition that a row lies between two offsets."""
        assert self.follow is not None
        column = quoted(self.follow)
        after = "" if start == _FIRST else f"{column} >= {self._value(start)} AND "
        return f"{after}{column} < {self._value(end)}"

    def _value(self, offset: int) -> str:
        if not self._is_time:
            return str(offset)
        return "'-infinity'" if offset == _FIRST else _literal(_EPOCH + timedelta(microseconds=offset))

    def _have_ended(self, client: psycopg.Connection[tuple[Any, ...]], end: str, writers: list[str]) -> bool:
        row = client.execute(
            "SELECT pg_snapshot_xmin(pg_current_snapshot()) >= %s::xid8"
            " AND NOT EXISTS (SELECT FROM pg_locks WHERE virtualtransaction = ANY (%s))",
            (end, writers),
        ).fetchone()
        return row is not None and bool(row[0])

    # Partitions

    def _pushed(self, client: psycopg.Connection[tuple[Any, ...]], bases: dict[str, str]) -> list[str]:
        """Conditions that a partition's rows meet, or rows that do not say their partition; Spark filters exactly."""
        inside = {name: _within(quoted(name), bases[name], bounds, client) for name, bounds in self.covered().items()}
        return [f"({quoted(name)} IS NULL OR {condition})" for name, condition in inside.items() if condition]

    # Reading

    def read(self, spark: SparkSession) -> DataFrame:
        reading = copy.copy(self)
        reading._in_snapshot = True
        return super(PostgresSource, reading).read(spark)

    def splits(self, start: Offsets, end: Offsets) -> Sequence[PostgresSplit]:
        if self.follow is None and start == end:
            return []
        if self.follow is not None and not self._in_snapshot:
            return self._followed(start[_PART], end[_PART])
        conditions = [self._between(start[_PART], end[_PART])] if self.follow is not None else []
        snapshot, client = export(self.connection, self._where)
        try:
            with self._errors():
                bases = self._bases(client)
                conditions += self._pushed(client, bases)
                ranges = self._pages(client) if self.split_by is None else self._key_ranges(client)
        except BaseException:
            client.close()
            raise
        keep(snapshot, client)
        columns = self._columns(bases)
        return [
            PostgresSplit(_select(columns, relation, [*conditions, *range_conditions]), self._place, snapshot)
            for relation, range_conditions in ranges
        ]

    def read_split(self, split: PostgresSplit) -> Iterator[pa.RecordBatch | Malformed]:
        fields = ReadField.of(self.records)
        with closing(self.connection.connect_bulk(self._where)) as client, closing(client.cursor()) as cursor:
            with self._errors():
                if split.snapshot is not None:
                    self._enter(cursor, split.snapshot)
                cursor.execute("SET TIME ZONE 'UTC'")
                cursor.execute(split.statement)
                batches = iter(cursor.fetch_record_batch())
            while True:
                with self._errors():
                    batch = next(batches, None)
                if batch is None:
                    return
                columns = _plain(batch)
                refused = columns[-1] if len(columns) > len(fields) else None  # see `misfits`
                yield from converted(columns[: len(fields)], fields, split.place, refused)

    def read_here(
        self, most: int | None = None, having: tuple[str, str | None] | None = None
    ) -> Iterator[pa.RecordBatch | Malformed]:
        from psycopg import sql

        with closing(self._connect()) as client, self._errors():
            columns = self._columns(self._bases(client))
            conditions = []
            if having is not None:
                column, text = having
                condition = "IS NULL" if text is None else f"= {sql.Literal(text).as_string(client)}"
                conditions.append(f"{quoted(column)} {condition}")
        statement = _select(columns, self._from, conditions) + (f" LIMIT {most}" if most is not None else "")
        yield from self.read_split(PostgresSplit(statement, self._place))

    def _enter(self, cursor: Any, snapshot: Snapshot) -> None:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            cursor.execute(f"SET TRANSACTION SNAPSHOT '{snapshot.name}'")
        except Exception as error:
            if "snapshot" not in str(error):
                raise
            raise UnavailableError(
                f"{self._where}: the snapshot that the run reads is gone, since the server was restarted, or nobody"
                " read it for ten minutes; another attempt takes another one"
            ) from error
        cursor.execute(f"SELECT pg_try_advisory_lock_shared({snapshot.lock})")
        cursor.fetchall()

    def _followed(self, start: int, end: int) -> list[PostgresSplit]:
        """The splits of a micro-batch: its rows do not change any more, so each split can be read by itself."""
        assert self.follow is not None
        if end <= start:
            return []
        with closing(self._connect()) as client, self._errors():
            columns = self._columns(self._bases(client))
            column = self._as_offset(f"{{}}({quoted(self.follow)})")
            counting = (
                f"SELECT count(*), {column.format('min')}, {column.format('max')} FROM {self._from}"
                f" WHERE {self._between(start, end)}"
            )
            row = client.execute(counting.encode()).fetchone()
        if row is None or not row[0]:
            return []
        pieces = cuts(int(row[1]), int(row[2]) + 1, min(self.parallelism, -(-row[0] // _ROWS)))
        return [
            PostgresSplit(_select(columns, self._from, [self._between(low, high)]), self._place) for low, high in pieces
        ]

    def _pages(self, client: psycopg.Connection[tuple[Any, ...]]) -> list[tuple[str, list[str]]]:
        """Ranges of pages of a table and its partitions; one range for anything else.

        Anything else includes a table whose partitions do not read as through it: those of other servers, those that
        the user may not read directly, and those with other policies for rows.
        """
        row = (
            self.table
            and client.execute(
                "SELECT c.oid, c.relkind::text, c.relhassubclass, row_security_active(c.oid) FROM pg_class c"
                " WHERE c.oid = to_regclass(%s)",
                (self.table.sql,),
            ).fetchone()
        )
        if not row or row[1] not in ("r", "p", "m") or (row[1] == "r" and row[2]):
            return [(self._from, [])]
        leaves = client.execute(_LEAVES, (row[0], row[0], row[0])).fetchall()
        partitioned, policies = row[1] == "p", row[3]
        if not all(readable for *_, readable, _ in leaves) or (
            partitioned and (policies or any(has_policies for *_, has_policies in leaves))
        ):
            return [(self._from, [])]
        size = max(_PAGES, -(-sum(pages for _, _, pages, *_ in leaves) // self.parallelism))
        ranges = []
        for schema, name, pages, *_ in leaves:
            pieces = cuts(0, max(pages, 1), -(-pages // size))
            for low, high in pieces:
                page_conditions = [f"ctid >= '({low},0)'"] if low else []
                page_conditions += [f"ctid < '({high},0)'"] if high < pages else []
                ranges.append((f"ONLY {TableName(schema, name).sql}", page_conditions))
        return ranges

    def _key_ranges(self, client: psycopg.Connection[tuple[Any, ...]]) -> list[tuple[str, list[str]]]:
        assert self.split_by is not None
        column = quoted(self.split_by)
        row = client.execute(f"SELECT min({column}), max({column}) FROM {self._from}".encode()).fetchone()
        assert row is not None
        ranges = []
        for piece in key_ranges(row[0], row[1], self.parallelism):
            conditions = [f"{column} >= {piece.low}"] if piece.low is not None else []
            conditions += [f"{column} < {piece.high}"] if piece.high is not None else []
            conditions += [f"{column} IS NULL"] if piece.nulls else []
            ranges.append((self._from, conditions))
        return ranges

    def _bases(self, client: psycopg.Connection[tuple[Any, ...]]) -> dict[str, str]:
        """The catalog's names of the columns' types; raises `SourceError` where they do not fit the record."""
        described = client.execute(f"SELECT * FROM {self._from} LIMIT 0".encode()).description or []
        rows = client.execute(
            "SELECT t.oid, CASE WHEN b.typtype = 'e' THEN 'enum' WHEN b.typtype = 'c' THEN 'record'"
            " WHEN e.typtype = 'e' THEN '_enum' ELSE b.typname END,"
            " format_type(t.oid, NULL) FROM pg_type t"
            " JOIN pg_type b ON b.oid = CASE t.typtype WHEN 'd' THEN t.typbasetype ELSE t.oid END"
            " LEFT JOIN pg_type e ON e.oid = b.typelem AND b.typcategory = 'A'"
            " WHERE t.oid = ANY(%s)",
            ([column.type_code for column in described],),
        ).fetchall()
        types = {oid: (base, shown) for oid, base, shown in rows}
        columns = {column.name: types[column.type_code] for column in described}

        def unfit(field: pa.Field) -> tuple[str, str] | None:
            (base, shown), asked = columns[field.name], AskedField(field.name, field.type)
            return None if asked.reads(base) else (shown, asked.type)

        self._check_columns(columns, unfit)
        return {name: base for name, (base, _) in columns.items()}

    def _columns(self, bases: dict[str, str]) -> str:
        fields = AskedField.of(self.records)
        return ", ".join([*(field.expression(bases[field.name]) for field in fields), *misfits(fields, bases)])

    @property
    def _from(self) -> str:
        return self.table.sql if self.table else f"({self.query}\n) AS asked"  # it may end in a comment

    @property
    def _place(self) -> str:
        return f"table {self.table}" if self.table else "the query"

    def _errors(self) -> AbstractContextManager[None]:
        return errors_of(self.connection, self._where, SourceError)

    def _connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        """A connection whose time zone is UTC, in which a column without a zone is compared."""
        client = self.connection.connect(self._where, autocommit=True)
        try:
            with self._errors():
                client.execute("SET TIME ZONE 'UTC'")
        except BaseException:
            client.close()
            raise
        return client


def _select(columns: str, relation: str, conditions: Sequence[str]) -> str:
    return f"SELECT {columns} FROM {relation}" + (f" WHERE {' AND '.join(conditions)}" if conditions else "")


def _within(
    column: str, base: str, bounds: TimeRange | frozenset[str], client: psycopg.Connection[tuple[Any, ...]]
) -> str | None:
    """A condition for values within bounds; None where the server should not judge."""
    from psycopg import sql

    if isinstance(bounds, TimeRange):
        if base in _WHOLE:
            return f"({column} >= {to_millis(bounds.start)} AND {column} < {to_millis(bounds.end)})"
        if base not in ("timestamptz", "timestamp", "date"):
            return None
        range_ = in_any_zone(bounds)
        return f"({column} >= {_literal(range_.start)} AND {column} < {_literal(range_.end)})"
    if base in _WHOLE:
        keys = [str(number) for number in whole_numbers(bounds)]
    elif base in ("text", "varchar", "bpchar") and (
        client.info.parameter_status("server_encoding") == "UTF8" or all(key.isascii() for key in bounds)
    ):
        keys = [sql.Literal(key).as_string(client) for key in sorted(bounds) if "\0" not in key]
    else:
        return None
    return f"{column} IN ({', '.join(keys)})" if keys else "false"


def _literal(moment: datetime) -> str:
    return f"'{moment.astimezone(timezone.utc).isoformat()}'::timestamptz"


def _plain(batch: pa.RecordBatch) -> list[pa.Array]:
    """The columns without ADBC's extension types, whose values are as PostgreSQL writes them."""
    return [column.storage if isinstance(column, pa.ExtensionArray) else column for column in batch.columns]
