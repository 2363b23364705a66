"""A source that reads a table or a query of a database, in ranges of a column."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime, timezone
from typing import TYPE_CHECKING, Any, Literal, Self

import pyarrow as pa

from dagster_unified.connectors.protocol.bounds import in_any_zone, whole_numbers
from dagster_unified.connectors.protocol.frame import Malformed
from dagster_unified.connectors.protocol.positions import Offsets
from dagster_unified.connectors.secrets import Value, check_is_no_url
from dagster_unified.connectors.sql.generic.connection import Database, dialect_of, driver_errors
from dagster_unified.connectors.sql.generic.dialect import Dialect, spelled
from dagster_unified.connectors.sql.table_source import KeyRange, ReadField, TableSource, converted, key_ranges
from dagster_unified.errors import PipelineError, SourceError
from dagster_unified.graph.connectors import Boundedness, Place, TimeRange
from dagster_unified.operators.functions.type_variables import Out
from dagster_unified.operators.time import to_millis
from dagster_unified.records import record_type

if TYPE_CHECKING:
    import sqlalchemy as sa
    from pyspark.sql import SparkSession

    from dagster_unified.connectors.protocol.positions import Position

_PART = "rows"
"""The one part of a table; its offset is 0 before and 1 after it was read."""


class DatabaseSource(TableSource[Out]):
    """Reads a table of DuckDB, SQLite, MariaDB, MySQL or another database of SQLAlchemy's, or a query.

    In BATCH one task reads it, or with `split_by`, a column of whole numbers, up to `parallelism` tasks read ranges of
    it. Each task reads by itself, so together they are not one snapshot: what others commit meanwhile may be seen by
    some. Of a table, a partition's window or key of `partitioned_by(field)` is part of the statement, if the column
    holds times, whole numbers or texts. In STREAMING it is read once, in one micro-batch, and ends; new rows are not
    followed, for which there are `PostgresSource` and `KafkaSource`.

    Give a table, in the schema `schema`, or a statement as `query`. `connection` is a URL of SQLAlchemy, or an `EnvVar`
    that has one; it is looked up on the driver and in the workers, which all have to reach the database. Raises
    `SourceError` where columns do not fit the record, before anything is read: their names, and of a table the types.

    Examples:
        >>> class Order(NamedTuple):
        ...     id: int
        ...     shop: str
        >>> orders = DatabaseSource("orders", Order, "sqlite:////data/shop.db", split_by="id")
        >>> orders.describe()
        'table orders at sqlite:////data/shop.db'
    """

    kind = "database"
    boundedness = Boundedness.BOUNDED

    def __init__(
        self,
        table: str | None,
        record: type[Out] | Any,
        connection: Value,
        *,
        query: str | None = None,
        name: str | None = None,
        schema: str | None = None,
        split_by: str | None = None,
        parallelism: int = 8,
        on_malformed: Literal["fail", "drop", "divert"] = "fail",
    ) -> None:
        check_is_no_url(table)
        self.table, self.schema = table, schema
        self.query = None if query is None else query.strip().rstrip(";")
        self.name = name or table or "query"
        self.records = record_type(record, f"source '{self.name}'")
        self.database = Database.of(connection, f"source '{self.name}'")
        self.resource_keys = self.database.resource_keys
        self.split_by, self.parallelism, self.on_malformed = split_by, parallelism, on_malformed
        if bool(table) == bool(self.query):
            raise PipelineError(f"source '{self.name}': give either a table or query=...")
        self._check_split_by()

    def connected(self, resources: Mapping[str, object]) -> Self:
        changed = copy.copy(self)
        changed.database = self.database.connected(resources)
        return changed

    def describe(self) -> str:
        return f"{self._place} at {self.database.describe()}{self.of_partition()}"

    @property
    def origin(self) -> str:
        what = self._place if self.query is None else f"({self.query})"
        return f"{what} at {self.database.describe()}"

    def places(self) -> Sequence[Place]:
        return [self.database.place_of(self.table, self.schema)] if self.table else ()

    def settings(self) -> str:
        return f"{super().settings()} {self.query} {self.split_by}"

    def oldest(self) -> Offsets:
        return {_PART: 0}

    def newest(self) -> Offsets:
        return {_PART: 1}

    def last(self) -> Offsets:
        return {_PART: 1}

    def batch_position(self, spark: SparkSession) -> Position:
        if self.slice is None:
            raise self._positionless()  # rows may come and go at any place
        return super().batch_position(spark)

    def splits(self, start: Offsets, end: Offsets) -> Sequence[KeyRange]:
        if start[_PART] == end[_PART]:
            return []
        with self.database.transaction(self._where, SourceError, read_only=True) as connection:
            import sqlalchemy as sa

            self._check(connection)
            if self.split_by is None:
                return [KeyRange()]
            column = self._column(self.split_by)
            result = connection.execute(sa.select(sa.func.min(column), sa.func.max(column)).select_from(self._from()))
            low, high = result.one()
        return key_ranges(low, high, self.parallelism)

    def read_split(self, split: KeyRange) -> Iterator[pa.RecordBatch | Malformed]:
        return self._read(split)

    def read_here(
        self, most: int | None = None, having: tuple[str, str | None] | None = None
    ) -> Iterator[pa.RecordBatch | Malformed]:
        return self._read(KeyRange(), most, having)

    def _read(
        self, split: KeyRange, most: int | None = None, having: tuple[str, str | None] | None = None
    ) -> Iterator[pa.RecordBatch | Malformed]:
        fields = ReadField.of(self.records)
        with self.database.transaction(self._where, SourceError, read_only=True) as connection:
            dialect = dialect_of(connection.dialect.name)
            statement = self._statement(split, self._column_types(connection), dialect)
            if having is not None:
                statement = statement.where(self._column(having[0]) == having[1])
            statement = dialect.exact(connection, statement, self.records.schema).limit(most)
            with driver_errors(connection):
                for columns in dialect.fetched(connection, statement):
                    yield from converted(columns, fields, self._place)

    # The statement

    def _statement(self, split: KeyRange, types: dict[str, Any], dialect: Dialect) -> sa.Select[Any]:
        import sqlalchemy as sa

        statement = sa.select(*[self._column(name) for name in self.records.names]).select_from(self._from())
        pushed = self._pushed(types, dialect)
        if self.split_by is not None:
            column = self._column(self.split_by)
            if split.nulls:
                return statement.where(column.is_(None), *pushed)
            if split.low is not None:
                statement = statement.where(column >= split.low)
            if split.high is not None:
                statement = statement.where(column < split.high)
        return statement.where(*pushed)

    def _pushed(self, types: dict[str, Any], dialect: Dialect) -> list[Any]:
        """Conditions that a partition's rows meet, or rows that do not say their partition; Spark filters exactly."""
        import sqlalchemy as sa

        conditions = []
        for name, bounds in self.covered().items():
            column = sa.column(self._column(name).name, types.get(name))
            inside = _within(column, bounds)
            if inside is not None:
                odd = dialect.is_odd(self._column(name), types[name])  # for the reader to refuse
                conditions.append(sa.or_(column.is_(None), inside, *(() if odd is None else (odd,))))
        return conditions

    def _column_types(self, connection: sa.Connection) -> dict[str, Any]:
        """The types of a table's columns, where conditions need them."""
        import sqlalchemy as sa

        if self.table is None or not self.partition_columns:
            return {}
        return {
            column["name"]: column["type"] for column in sa.inspect(connection).get_columns(self.table, self.schema)
        }

    def _from(self) -> Any:
        import sqlalchemy as sa
        from sqlalchemy.sql.elements import quoted_name

        if self.query is not None:
            plain = self.query.replace(":", "\\:")  # a colon is no parameter
            return sa.text(f"{plain}\n").columns().subquery("asked")  # it may end in a comment
        assert self.table is not None
        schema = None if self.schema is None else quoted_name(self.schema, True)
        return sa.table(quoted_name(self.table, True), schema=schema)

    def _column(self, name: str) -> sa.ColumnClause[Any]:
        import sqlalchemy as sa
        from sqlalchemy.sql.elements import quoted_name

        return sa.column(quoted_name(name, True))

    # What is there

    def _check(self, connection: sa.Connection) -> None:
        """Raise `SourceError` where columns do not fit the record."""
        import sqlalchemy as sa

        if self.table is None:
            result = connection.execute(sa.select(sa.text("*")).select_from(self._from()).limit(0))
            columns: dict[str, Any] = dict.fromkeys(result.keys(), sa.types.NullType())
        else:
            inspector = sa.inspect(connection)
            if not (inspector.has_table(self.table, self.schema)):
                raise SourceError(
                    f"{self._where}: {self.database.describe()} has no {self._place}; check the name, or create it"
                )
            columns = {column["name"]: column["type"] for column in inspector.get_columns(self.table, self.schema)}
        dialect = dialect_of(connection.dialect.name)

        def unfit(field: pa.Field) -> tuple[str, str] | None:
            column_type = columns[field.name]
            return None if dialect.reads(field.type, column_type) else (spelled(column_type), str(field.type))

        self._check_columns(columns, unfit)

    @property
    def _place(self) -> str:
        if self.table is None:
            return "the query"
        return f"table {self.table}" if self.schema is None else f"table {self.schema}.{self.table}"


def _within(column: sa.ColumnClause[Any], bounds: TimeRange | frozenset[str]) -> Any:
    """A condition for values within bounds; None where the database should not judge."""
    import sqlalchemy as sa

    kind = column.type
    if not isinstance(bounds, TimeRange):
        if isinstance(kind, sa.Integer):
            return column.in_(whole_numbers(bounds))
        return column.in_(sorted(bounds)) if isinstance(kind, sa.String) and not isinstance(kind, sa.Enum) else None
    if isinstance(kind, sa.Integer):
        return sa.and_(column >= to_millis(bounds.start), column < to_millis(bounds.end))
    if not isinstance(kind, (sa.DateTime, sa.Date)):
        return None

    def bound(moment: datetime) -> date:
        moment = moment.astimezone(timezone.utc)
        if isinstance(kind, sa.Date):
            return moment.date()
        return moment if getattr(kind, "timezone", False) else moment.replace(tzinfo=None)

    range_ = in_any_zone(bounds)
    return column.between(bound(range_.start), bound(range_.end))
