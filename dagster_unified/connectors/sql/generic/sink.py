"""A sink into a table of a database that SQLAlchemy reaches: workers stage rows, the driver loads them and commits."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from dagster_unified.connectors.protocol.commits import (
    Commit,
    CommitConflictError,
    Committer,
    CommitUncertainError,
    DeliveryGuarantee,
    StagedContent,
    StagingWriter,
    WriteAttempt,
    WriterTask,
    arrow_stream,
    remove_staging,
)
from dagster_unified.connectors.secrets import Value, check_is_no_url
from dagster_unified.connectors.sql.generic.connection import Database, dialect_of, exactly_once, is_locked
from dagster_unified.connectors.sql.generic.dialect import Dialect, compared_text, shortened, statement_columns
from dagster_unified.connectors.sql.generic.source import DatabaseSource
from dagster_unified.connectors.sql.mariadb import TABLE_OPTIONS
from dagster_unified.connectors.sql.table_sink import MarkedWrite, Mode, TableSink
from dagster_unified.errors import PipelineError, SinkError, UnavailableError, UnifiedError
from dagster_unified.graph.connectors import AssetName, Place
from dagster_unified.operators.functions.type_variables import In

if TYPE_CHECKING:
    import sqlalchemy as sa

_VALUES = 500
"""Values of one statement: databases have limits, from a thousand on."""

MARKS = "dagster_unified_commits"
"""The library's table, with the highest version of each writer."""


class StagedRows(StagedContent, frozen=True, kw_only=True):
    """Rows of one task as an Arrow stream, on their way to the driver."""

    def table(self) -> pa.Table:
        """The rows, in their order."""
        return pa.ipc.open_stream(self.read("staged rows")).read_all()


class RowsWriter(StagingWriter[pa.RecordBatch, StagedRows]):
    """Stages the rows of one task."""

    committable = StagedRows
    suffix = "arrows"
    chunk_bytes = 32 << 20

    def part(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, int]:
        return batch, batch.nbytes

    def encode(self, parts: Sequence[pa.RecordBatch]) -> tuple[bytes, int]:
        return arrow_stream(parts), sum(map(len, parts))


class DatabaseSink(TableSink[In, StagedRows]):
    """Writes to a table of DuckDB, SQLite or MariaDB, exactly-once, or of another database that SQLAlchemy knows.

    In BATCH each stage is one transaction, in STREAMING each epoch. The same transaction marks who wrote, in the table
    `dagster_unified_commits`, so that nothing is written twice; readers see all of a write or nothing of it. For other
    databases that is not promised: `append` and `overwrite` need `delivery_guarantee=AT_LEAST_ONCE` there. `mode` is

    - `append`: rows are added. A run of a partition replaces what an earlier run of it wrote, if `partition_column`
      names a column of text that the sink fills with the partition's key; without it, a second run is refused.
    - `upsert`: the last record of each `key` replaces the row with that key.
    - `overwrite`: in BATCH the rows of a run replace the whole table, or, with `partition_column`, those of its
      partition; in STREAMING the first epoch of a deployment replaces what was there, and later ones add.

    A deployment that goes back to a savepoint does not take back what it appended since; its upserts come again.

    `connection` is a URL of SQLAlchemy, or an `EnvVar` that has one. Workers stage rows as files, and the driver loads
    them, so only the driver needs the database. `table` is taken as it is written, in the schema `schema`. A missing
    table is made, with the key as its primary key. Raises `PipelineError` for a promise that is not known to hold;
    when it runs, `SinkError` where the records do not fit the table, before rows are written, and `UnavailableError`,
    which is tried again, where the database is locked or away.

    Examples:
        >>> sink = DatabaseSink("sales", "duckdb:////data/shop.duckdb", mode="upsert", key="id")
        >>> sink.describe()
        'table sales at duckdb:////data/shop.duckdb (upsert by id)'
        >>> at_least_once = DeliveryGuarantee.AT_LEAST_ONCE
        >>> DatabaseSink("sales", "oracle://db/shop", delivery_guarantee=at_least_once).guarantee.value
        'at-least-once'
    """

    kind = "database"
    committable = StagedRows

    def __init__(
        self,
        table: str,
        connection: Value,
        mode: Mode = "append",
        key: str | Sequence[str] = (),
        partition_column: str | None = None,
        name: str | None = None,
        schema: str | None = None,
        delivery_guarantee: DeliveryGuarantee = DeliveryGuarantee.EXACTLY_ONCE,
        asset: AssetName | None = None,
    ) -> None:
        check_is_no_url(table)
        super().__init__(name or table, mode, key, partition_column, asset)
        exactly_once = delivery_guarantee is DeliveryGuarantee.EXACTLY_ONCE
        self.capabilities = replace(self.capabilities, transactional=exactly_once)
        self.exactly_once = exactly_once and not self.upserts  # a repeated write of an upsert adds no rows
        self.table, self.schema = table, schema
        self.database = Database.of(connection, f"sink '{self.name}'")
        self.resource_keys = self.database.resource_keys
        if not table or table == MARKS or "\0" in table:
            raise PipelineError(f"sink '{self.name}': {table!r} cannot be the name of a table; choose another")
        dialect = self.database.dialect
        if self.exactly_once and dialect is not None and not dialect.exactly_once:
            raise PipelineError(not_exact(self.where, dialect))

    def connected(self, resources: Mapping[str, object]) -> Self:
        changed = copy.copy(self)
        changed.database = self.database.connected(resources)
        return changed

    def place(self) -> tuple[str, str]:
        table = self.table if self.schema is None else f"{self.schema}.{self.table}"
        return table, self.database.describe()

    def identity(self) -> Place:
        return self.database.place_of(self.table, self.schema)

    def committer(self, schema: pa.Schema) -> DatabaseCommitter:
        return DatabaseCommitter(self)

    def writer(self, task: WriterTask) -> RowsWriter:
        return RowsWriter(task.attempt)

    def exists(self) -> bool:
        if self.database.is_missing(self.where):
            return False
        with self.database.transaction(self.where, read_only=True) as connection:
            import sqlalchemy as sa

            return sa.inspect(connection).has_table(self.table, self.schema)

    def written(self) -> DatabaseSource[In]:
        return DatabaseSource(self.table, self.records, self.database.url, name=self.name, schema=self.schema)


def remove_keys(connection: sa.Connection, table: sa.Table, key: Sequence[str], rows: pa.Table, where: str) -> None:
    """Delete the rows with the keys of these rows; raises `SinkError` where a text only resembles a key."""
    import sqlalchemy as sa

    columns = [table.c[name] for name in key]
    texts = [place for place, name in enumerate(key) if pa.types.is_string(rows.schema.field(name).type)]
    step = max(_VALUES // len(key), 1)
    for start in range(0, len(rows), step):
        keys = [tuple(row.values()) for row in rows.select(list(key)).slice(start, step).to_pylist()]
        has_key: sa.ColumnElement[bool]
        if len(columns) == 1:
            has_key = columns[0].in_([value for (value,) in keys])
        else:
            has_key = sa.or_(*[sa.and_(*[c == v for c, v in zip(columns, values, strict=True)]) for values in keys])
        if texts:
            written = {tuple(values[place] for place in texts) for values in keys}
            stored_texts = connection.execute(sa.select(*[columns[place] for place in texts]).where(has_key).distinct())
            for stored in stored_texts:
                check_same(tuple(stored), written, table.name, where)
        connection.execute(sa.delete(table).where(has_key))


def check_same(stored: tuple[str, ...], written: set[tuple[str, ...]], table: str, where: str) -> None:
    """Raise `SinkError` where a database finds another text than the one asked for."""
    if stored not in written:
        raise SinkError(
            f"{where}: to the database the text {', '.join(map(repr, stored))}, which table {table} has, is the same as"
            " another one that is written, and their rows would replace each other; give the column a collation that"
            " compares texts as they are"
        )


class DatabaseWrite(MarkedWrite[StagedRows]):
    """The transaction of some commits, on a connection that has begun it.

    `scales` are the digits after the point of the table's decimal columns.
    """

    def __init__(
        self,
        sink: DatabaseSink[Any],
        dialect: Dialect,
        connection: sa.Connection,
        marks: sa.Table,
        table: sa.Table,
        scales: Mapping[str, int],
    ) -> None:
        super().__init__(sink.mode, sink.partition_column, sink.where)
        self._sink, self._dialect, self._connection = sink, dialect, connection
        self._marks, self._table, self._scales = marks, table, scales

    def version(self, name: str) -> int | None:
        """The version of a mark; None where there is none."""
        import sqlalchemy as sa

        query = sa.select(self._marks.c.writer, self._marks.c.version).where(self._marks.c.writer == name)
        mark = self._connection.execute(query).one_or_none()
        if mark is None:
            return None
        check_same((mark.writer,), {(name,)}, MARKS, self.where)
        return int(mark.version)

    def raise_mark(self, name: str, version: int, again: bool) -> bool | None:
        current = self._locked(name)
        if current is not None and (current > version or (current == version and not again)):
            return None
        self._remember(name, current, version)
        return current is None

    def count_run(self, name: str) -> bool:
        before = self._locked(name)
        self._remember(name, before, 0 if before is None else before + 1)
        return before is not None

    def _locked(self, name: str) -> int | None:
        """The version of a mark, which nobody else can change until this transaction ends."""
        import sqlalchemy as sa

        mine = self._marks.c.writer == name
        self._connection.execute(sa.update(self._marks).where(mine).values(version=self._marks.c.version))
        return self.version(name)

    def _remember(self, name: str, current: int | None, version: int) -> None:
        import sqlalchemy as sa

        if current is None:
            self._connection.execute(sa.insert(self._marks).values(writer=name, version=version))
        else:
            mine = self._marks.c.writer == name
            self._connection.execute(sa.update(self._marks).where(mine).values(version=version))

    def delete_all(self) -> None:
        import sqlalchemy as sa

        self._connection.execute(sa.delete(self._table))

    def delete_partition(self, column: str, key: str) -> None:
        import sqlalchemy as sa

        if self._dialect.exactly_once:
            self._connection.execute(sa.delete(self._table).where(self._table.c[column] == key))
        else:
            remove_keys(self._connection, self._table, (column,), pa.table({column: [key]}), self.where)

    def load(self, number: int, committables: Sequence[StagedRows], partition: str | None) -> None:
        for staged in committables:
            self._load(staged.table(), partition)

    def _load(self, rows: pa.Table, partition: str | None) -> None:
        sink, dialect = self._sink, self._dialect
        if sink.key:
            rows = _last_of_each_key(rows, sink.key)
        rows = shortened(dialect.stored(rows, self.where), self._scales, self.where)
        if partition is not None and self.partition_column is not None:
            rows = rows.append_column(self.partition_column, pa.array([partition] * len(rows), pa.string()))
        dialect.check_rows(self._connection, sink.table, sink.schema, rows, self.where)
        statement = self._table.insert()
        if sink.key and dialect.exactly_once:
            further = [name for name in sink.records.schema.names if name not in sink.key]
            statement = dialect.upsert(self._table, sink.key, further)
        elif sink.key:
            remove_keys(self._connection, self._table, sink.key, rows, self.where)
        dialect.insert(self._connection, statement, rows)


def _last_of_each_key(rows: pa.Table, key: tuple[str, ...]) -> pa.Table:
    numbered = rows.select(list(key)).append_column("__row", pa.array(range(len(rows)), pa.int64()))
    import pyarrow.compute as pc

    for place, name in enumerate(key):
        if pa.types.is_floating(numbered.column(name).type):  # to a database -0.0 is the key 0.0
            numbered = numbered.set_column(place, name, pc.add(numbered.column(name), 0.0))
    return rows.take(numbered.group_by(list(key)).aggregate([("__row", "max")]).column("__row_max"))


class DatabaseCommitter(Committer[StagedRows]):
    """The committer of one sink."""

    def __init__(self, sink: DatabaseSink[Any]) -> None:
        import sqlalchemy as sa
        from sqlalchemy.sql.elements import quoted_name

        self._sink = sink
        self._dialect = dialect_of(sink.database.engine(sink.where).dialect.name)
        if sink.exactly_once and not self._dialect.exactly_once:
            raise SinkError(not_exact(sink.where, self._dialect))
        metadata = sa.MetaData()
        self._marks = sa.Table(
            MARKS,
            metadata,
            sa.Column("writer", compared_text(512), primary_key=True),
            sa.Column("version", sa.BigInteger, nullable=False),
            **TABLE_OPTIONS,
        )
        columns = statement_columns(sink.records.schema, sink.key)
        if sink.partition_column is not None:
            columns.append(sa.Column(quoted_name(sink.partition_column, True), compared_text(255), index=True))
        schema = None if sink.schema is None else quoted_name(sink.schema, True)
        self._table = sa.Table(quoted_name(sink.table, True), metadata, *columns, schema=schema, **TABLE_OPTIONS)
        self._scales: dict[str, int] = {}
        try:
            self._prepare(metadata)
        except UnifiedError as error:
            if "already exists" not in str(error):
                raise
            self._prepare(metadata)  # two who began at once, and the other has made the tables

    def _prepare(self, metadata: sa.MetaData) -> None:
        """Create missing tables, and check those that are there."""
        import sqlalchemy as sa

        sink = self._sink
        with sink.database.transaction(sink.where) as connection:
            metadata.create_all(connection)
            self._check(sa.inspect(connection))
            self._dialect.check_table(connection, sink.table, sink.schema, sink.key, sink.partition_column, sink.where)

    def last_version(self, name: str) -> int | None:
        with self._sink.database.transaction(self._sink.where) as connection:
            return self._transaction(connection).version(name)

    def commit(self, commits: Sequence[Commit[StagedRows]]) -> None:
        import sqlalchemy as sa

        sink, ending = self._sink, False
        try:
            with sink.database.transaction(sink.where) as connection:
                try:
                    self._transaction(connection).write(commits)
                except sa.exc.DBAPIError as error:
                    if is_locked(error) or _is_mark(error):
                        raise CommitConflictError(f"{sink.where}: another write was first ({error.orig})") from None
                    raise
                ending = True
        except UnavailableError as error:
            if ending:
                raise CommitUncertainError(f"{error}; nobody can tell whether it was committed") from None
            raise

    def clean_up(self, attempts: Sequence[WriteAttempt], committed: bool) -> None:
        remove_staging(attempts, committed)

    def _transaction(self, connection: sa.Connection) -> DatabaseWrite:
        return DatabaseWrite(self._sink, self._dialect, connection, self._marks, self._table, self._scales)

    # What is there

    def _check(self, inspector: Any) -> None:
        """Raise `SinkError` where the records do not fit the table."""
        sink = self._sink
        existing = {column["name"]: column for column in inspector.get_columns(sink.table, sink.schema)}
        wanted = {field.name: field.type for field in sink.records.schema}
        if sink.partition_column is not None:
            wanted[sink.partition_column] = pa.string()
        for name, kind in wanted.items():
            if name not in existing:
                raise SinkError(
                    f"{sink.where}: table {sink.table} has no column '{name}'; add it, or write to another table"
                )
            column_type = existing[name]["type"]
            scale = getattr(column_type, "scale", None)
            if pa.types.is_decimal(kind) and scale is not None:
                self._scales[name] = scale
            if not self._dialect.holds(kind, column_type):
                raise SinkError(
                    f"{sink.where}: column '{name}' of {sink.table} is {column_type}, which does not hold the"
                    f" field's {kind}; write to another table, or change the column"
                )
        for name, column in existing.items():
            if name not in wanted and not column["nullable"] and column.get("default") is None:
                raise SinkError(
                    f"{sink.where}: column '{name}' of {sink.table} may not be null and has no default, and the records"
                    " have no such field; add the field, or give the column a default"
                )
        if sink.key and self._dialect.exactly_once:
            keys = [inspector.get_pk_constraint(sink.table, sink.schema)["constrained_columns"]]
            keys += [index["column_names"] for index in inspector.get_unique_constraints(sink.table, sink.schema)]
            keys += [
                index["column_names"] for index in inspector.get_indexes(sink.table, sink.schema) if index["unique"]
            ]
            if set(sink.key) not in map(set, keys):
                raise SinkError(
                    f"{sink.where}: table {sink.table} has no primary key or unique index of ({', '.join(sink.key)}),"
                    " which upserts need; create one"
                )


def not_exact(where: str, dialect: Dialect) -> str:
    """The message that nobody knows whether writes to a database happen exactly once."""
    return (
        f"{where}: DatabaseSink writes exactly once to {', '.join(exactly_once())} (mariadb+pymysql://…); for"
        f" {dialect.name} that is not known: give delivery_guarantee=DeliveryGuarantee.AT_LEAST_ONCE, or mode='upsert'"
        " with a key; for PostgreSQL there is PostgresSink"
    )


def _is_mark(error: Any) -> bool:
    """Whether a row of the marks was there before: two writers that begin at once find that."""
    import sqlalchemy as sa

    return isinstance(error, sa.exc.IntegrityError) and MARKS in f"{error.orig} {error.statement}"
