"""The table that a sink writes to: its columns, whether a stream fits it, and its creation where it is missing.

Everything here runs on the driver, before rows are staged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from dagster_unified.connectors.sql.postgres.connection import TableName, check_rights, quoted
from dagster_unified.connectors.sql.postgres.types import StagedColumn, TableColumn
from dagster_unified.errors import SinkError

if TYPE_CHECKING:
    import psycopg

    Client: TypeAlias = psycopg.Connection[tuple[Any, ...]]

DDL_LOCK = 0x6461677374657200
"""An advisory lock for creating tables and schemas, since IF NOT EXISTS alone is no lock."""

_TABLE = """
SELECT c.oid, n.nspname, c.relname, c.relkind
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = to_regclass(%s)
"""

_COLUMNS = """
SELECT a.attname, format_type(a.atttypid, a.atttypmod),
       CASE 'e' WHEN b.typtype THEN 'enum' WHEN e.typtype THEN '_enum' ELSE b.typname END,
       a.attnotnull AND NOT a.atthasdef AND a.attidentity = '', a.attgenerated <> '' OR a.attidentity = 'a',
       (SELECT quote_ident(s.nspname) || '.' || quote_ident(o.collname) FROM pg_collation o
        JOIN pg_namespace s ON s.oid = o.collnamespace WHERE o.oid = a.attcollation AND NOT o.collisdeterministic)
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
JOIN pg_type b ON b.oid = CASE t.typtype WHEN 'd' THEN t.typbasetype ELSE t.oid END
LEFT JOIN pg_type e ON e.oid = b.typelem AND b.typcategory = 'A'
WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""

_KEYS = """
SELECT array_agg(a.attname::text) FROM pg_index i
JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey[0:i.indnkeyatts - 1])
WHERE i.indrelid = %s AND i.indisunique AND i.indisvalid AND i.indimmediate AND i.indpred IS NULL
  AND i.indexprs IS NULL GROUP BY i.indexrelid
"""


@dataclass(frozen=True)
class Target:
    """An existing table that fits."""

    name: TableName
    columns: tuple[TableColumn, ...]
    """The table's columns for the columns of the stream, in the stream's order."""


@dataclass(frozen=True)
class Wanted:
    """A sink's requirements of its table."""

    sink: str
    name: TableName
    columns: Sequence[StagedColumn]
    key: tuple[str, ...]
    tag: str | None
    """A column of text that the sink fills itself, with the partition of each row."""

    privileges: tuple[str, ...]

    def ensure(self, client: Client) -> Target:
        """Return the table, and create it if it is missing; raises where the stream does not fit, or may not write."""
        where = f"sink '{self.sink}'"
        if self.name.schema is not None:
            self._check_schema(client, where, "USAGE")
        row = client.execute(_TABLE, (self.name.sql,)).fetchone()
        if row is None:
            self._check_schema(client, where, "CREATE")
            with client.transaction():
                client.execute("SELECT pg_advisory_xact_lock(%s)", (DDL_LOCK,))
                self._create(client)
            row = client.execute(_TABLE, (self.name.sql,)).fetchone()
            if row is None:
                raise SinkError(f"sink '{self.sink}': {self.name} was dropped while the job began; start it again")
        oid, schema, table, kind = row
        name = TableName(schema, table)
        if kind not in ("r", "p", b"r", b"p"):
            raise SinkError(f"sink '{self.sink}': {name} is no table; write to the table itself")
        check_rights(client, where, "table", oid, name.sql, self.privileges)
        columns = self._checked(client, oid, name)
        if self.key:
            self._check_key(client, oid, name)
        return Target(name, columns)

    def _create(self, client: Client) -> None:
        columns = [
            f"{quoted(column.name)} {column.declared}{'' if column.nullable else ' NOT NULL'}"
            for column in self.columns
        ]
        if self.tag is not None:
            columns.append(f"{quoted(self.tag)} text")
        if self.key:
            columns.append(f"PRIMARY KEY ({', '.join(map(quoted, self.key))})")
        client.execute(f"CREATE TABLE IF NOT EXISTS {self.name.sql} ({', '.join(columns)})".encode())
        if self.tag is not None:
            client.execute(f"CREATE INDEX ON {self.name.sql} ({quoted(self.tag)})".encode())

    def _check_schema(self, client: Client, where: str, right: str) -> None:
        """Raise where the user lacks a right in the table's schema; a missing schema is found later."""
        row = client.execute(
            "SELECT oid, nspname FROM pg_namespace WHERE nspname = coalesce(%s, current_schema())", (self.name.schema,)
        ).fetchone()
        if row is not None:
            check_rights(client, where, "schema", row[0], quoted(row[1]), (right,))

    def _checked(self, client: Client, oid: int, name: TableName) -> tuple[TableColumn, ...]:
        rows = client.execute(_COLUMNS, (oid,)).fetchall()
        existing = {row[0]: TableColumn(row[0], row[1], row[2], row[3], row[5] or "") for row in rows}
        computed = {row[0] for row in rows if row[4]}
        for column in self.columns:
            existing_column = existing.get(column.name)
            if existing_column is None:
                raise SinkError(
                    f"sink '{self.sink}': table {name} has no column '{column.name}'; write to another table, or"
                    f" ALTER TABLE {name.sql} ADD COLUMN {quoted(column.name)} {column.declared}"
                )
            if column.name in computed:
                raise SinkError(
                    f"sink '{self.sink}': column '{column.name}' of {name} is generated by the server; leave the field"
                    " out of the records"
                )
            if not column.fits(existing_column):
                raise SinkError(
                    f"sink '{self.sink}': column '{column.name}' of {name} is {existing_column.type}, and the records'"
                    f" field needs {column.declared}; write to another table, or make them the same"
                )
        if self.tag is not None and (self.tag not in existing or existing[self.tag].base not in ("text", "varchar")):
            raise SinkError(
                f"sink '{self.sink}': table {name} has no column '{self.tag}' of text, which says what partition wrote"
                f" a row; ALTER TABLE {name.sql} ADD COLUMN {quoted(self.tag)} text, with an index"
            )
        filled = {column.name for column in self.columns} | {self.tag}
        lacking = next(
            (
                existing_column
                for existing_column in existing.values()
                if existing_column.required and existing_column.name not in filled
            ),
            None,
        )
        if lacking is not None:
            raise SinkError(
                f"sink '{self.sink}': column '{lacking.name}' of {name} may not be null and has no default, and the"
                " records have no such field; add the field, or give the column a default"
            )
        return tuple(existing[column.name] for column in self.columns)

    def _check_key(self, client: Client, oid: int, name: TableName) -> None:
        keys = [set(row[0]) for row in client.execute(_KEYS, (oid,)).fetchall()]
        if set(self.key) not in keys:
            columns = ", ".join(map(quoted, self.key))
            raise SinkError(
                f"sink '{self.sink}': table {name} has no primary key or unique index of ({columns}), which upserts"
                f" need; CREATE UNIQUE INDEX ON {name.sql} ({columns})"
            )
