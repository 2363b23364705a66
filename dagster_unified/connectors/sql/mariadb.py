"""MariaDB and MySQL: strict sessions, and checks of what they would do with rows that a sink does not promise."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dagster_unified.connectors.sql.generic.dialect import EXACT, LOCK_SECONDS, Dialect
from dagster_unified.errors import SinkError

if TYPE_CHECKING:
    import sqlalchemy as sa

_ESCAPED = "[\\x00\\n\\r\\x1a\"'\\\\]"
"""Characters that the client writes as two bytes."""

_BESIDE = 1 << 16
"""Bytes of a statement for its beginning, the other columns and the quotes."""

_STATEMENT = 1 << 21
"""Bytes of a statement of many rows, at most: the client ends it soon after a million."""

_OF_TABLE = "table_schema = COALESCE(:schema, DATABASE()) AND table_name = :table"


_PASSING = {1021, 1026, 1030, 1040, 1053, 1114, 1152, *range(1158, 1162), 1203, 1226, 1290, 1836, 1927, 4031}
"""Numbers of what another attempt may not meet: no room, no connection free, a server that ends or only reads. Those
from 2000 to 2999 are of a client that does not reach it."""

_FLOAT = 4
"""The number of FLOAT in the protocol of MySQL."""

TABLE_OPTIONS: dict[str, Any] = {
    f"{dialect}_{name}": value
    for dialect in ("mariadb", "mysql")
    for name, value in (("engine", "InnoDB"), ("charset", "utf8mb4"))
}
"""Options of a new table."""


class MySql(Dialect):
    """MySQL. It ignores blanks at the end when it compares texts, so that nothing is promised of keys."""

    title = "MySQL"
    # it cuts off what is too long for a column unless it is strict
    session = (
        "SET time_zone = '+00:00', sql_mode = CONCAT(@@sql_mode, ',STRICT_ALL_TABLES'),"
        f" innodb_lock_wait_timeout = {LOCK_SECONDS:.0f}"
    )
    isolation = "READ COMMITTED"
    has_nan = False
    has_infinity = False
    has_zones = False

    def is_lasting(self, error: BaseException | None, said: str) -> bool:
        number = _error_number(error)  # PyMySQL calls everything operational that it does not know
        if number is None:
            return super().is_lasting(error, said)
        return not 2000 <= number < 3000 and number not in _PASSING

    def said(self, error: BaseException | None) -> object:
        return error if error is None or _error_number(error) is None else error.args[1]

    def is_coarse(self, stored_type: Any) -> bool:
        return getattr(stored_type, "fsp", None) != 6

    def check_rows(self, connection: sa.Connection, table: str, schema: str | None, rows: pa.Table, where: str) -> None:
        """Refuse blanks that a column would cut off, and rows longer than the server takes.

        The latter would end the connection, as if the server were away.
        """
        long = [column for column in rows.columns if pa.types.is_string(column.type) or pa.types.is_binary(column.type)]
        if long and rows.num_rows:
            _check_blanks(connection, table, schema, rows, where)
            _check_sizes(connection, long, where)

    def exact(self, connection: sa.Connection, statement: sa.Select[Any], schema: pa.Schema) -> sa.Select[Any]:
        """Make numbers of single precision double: only six digits of them are sent."""
        import sqlalchemy as sa

        floats = [field.name for field in schema if field.type == pa.float64()]
        described = connection.execute(statement.limit(0)).cursor.description if floats else ()
        single = {name for name, code, *_ in described if code == _FLOAT}
        if not single:
            return statement
        columns: list[Any] = list(statement.selected_columns)
        exact = [column * sa.literal_column("1e0") if column.name in single else column for column in columns]
        return statement.with_only_columns(
            *[expression.label(c.name) for expression, c in zip(exact, columns, strict=True)]
        )


class MariaDb(MySql):
    """MariaDB."""

    title = "MariaDB"
    exactly_once = True

    def check_table(
        self,
        connection: sa.Connection,
        table: str,
        schema: str | None,
        key: Sequence[str],
        partition_column: str | None,
        where: str,
    ) -> None:
        """Refuse a table without transactions, or with keys that are compared in another way than a sink does."""
        import sqlalchemy as sa

        parameters = {"schema": schema, "table": table}
        statement = sa.text(f"SELECT engine FROM information_schema.tables WHERE {_OF_TABLE}")
        engine = connection.execute(statement, parameters).scalar()
        if engine != "InnoDB":
            raise SinkError(
                f"{where}: table {table} is in the engine {engine}, which has no transactions; change it by"
                " ALTER TABLE … ENGINE = InnoDB"
            )
        statement = sa.text(f"SELECT column_name, collation_name FROM information_schema.columns WHERE {_OF_TABLE}")
        for name, collation in connection.execute(statement, parameters):
            if (name in key or name == partition_column) and collation is not None and not collation.endswith(EXACT):
                raise SinkError(
                    f"{where}: column '{name}' of {table} has the collation {collation}, by which texts that differ are"
                    f" one key ('A' and 'a', or 'a' and 'a '); give it utf8mb4{EXACT}"
                )
        if key:
            _check_unique(sa.inspect(connection), table, schema, key, where)

    def upsert(self, table: sa.Table, key: Sequence[str], further: Sequence[str]) -> Any:
        from sqlalchemy.dialects import mysql

        inserting = mysql.insert(table)
        replaced = further or key  # a key that is there stays what it is
        return inserting.on_duplicate_key_update({name: inserting.inserted[name] for name in replaced})


def _error_number(error: BaseException | None) -> int | None:
    return error.args[0] if error is not None and len(error.args) == 2 and isinstance(error.args[0], int) else None


def _check_unique(inspector: sa.Inspector, table: str, schema: str | None, key: Sequence[str], where: str) -> None:
    """Refuse other unique indexes: an upsert replaces the row that any of them finds."""
    unique = {
        str(index["name"]): index["column_names"] for index in inspector.get_indexes(table, schema) if index["unique"]
    }
    unique["the primary key"] = list(inspector.get_pk_constraint(table, schema)["constrained_columns"])
    others = [name for name, columns in unique.items() if columns and set(columns) != set(key)]
    if others:
        raise SinkError(
            f"{where}: table {table} has unique columns beside the key ({', '.join(others)}): MariaDB would replace a"
            " row of another key that has the same there; upsert by these, or drop them"
        )


def _check_blanks(connection: sa.Connection, table: str, schema: str | None, rows: pa.Table, where: str) -> None:
    """Refuse texts with surplus blanks at their end: strict sessions refuse other texts that are too long."""
    import pyarrow.compute as pc
    import sqlalchemy as sa

    texts = [name for name in rows.column_names if pa.types.is_string(rows.schema.field(name).type)]
    suspects = [name for name in texts if pc.any(pc.ends_with(rows[name], " ")).as_py()]
    if not suspects:  # else each commit would ask
        return
    statement = sa.text(
        "SELECT column_name, column_type, character_maximum_length FROM information_schema.columns"
        f" WHERE {_OF_TABLE} AND data_type = 'varchar'"
    )
    for name, kind, most in connection.execute(statement, {"schema": schema, "table": table}):
        if name in suspects:
            long = rows[name].filter(pc.greater(pc.utf8_length(rows[name]), most))
            if pc.any(pc.less_equal(pc.utf8_length(pc.ascii_rtrim(long, " ")), most)).as_py():
                raise SinkError(
                    f"{where}: field '{name}' has longer texts than its column holds, which is {kind}, if only by"
                    " blanks at their end; cut them, or change the column"
                )


def _check_sizes(connection: sa.Connection, long: Sequence[pa.ChunkedArray], where: str) -> None:
    import pyarrow.compute as pc
    import sqlalchemy as sa

    most = connection.execute(sa.text("SELECT @@max_allowed_packet")).scalar_one()
    if most < _STATEMENT:
        raise SinkError(
            f"{where}: the server's max_allowed_packet is {most} bytes, and statements of many rows need {_STATEMENT};"
            " raise it"
        )
    sizes = [pc.fill_null(pc.binary_length(column), 0).cast(pa.int64()) for column in long]
    plain = reduce(pc.add, sizes)
    suspects = pc.greater(plain, (most - _BESIDE) // 2)  # the others fit, whatever has to be escaped in them
    if not pc.any(suspects).as_py():
        return
    escaped = [
        pc.fill_null(pc.count_substring_regex(column.filter(suspects), _ESCAPED), 0).cast(pa.int64()) for column in long
    ]
    longest = pc.max(reduce(pc.add, escaped, plain.filter(suspects))).as_py()
    if longest > most - _BESIDE:
        raise SinkError(
            f"{where}: a row of {longest} bytes, as it is sent, is more than the server's max_allowed_packet of {most}"
            " has room for; raise that, or write shorter values"
        )
