"""The table that a sink writes to: what it is like, whether a stream fits it, and how it is made where it is missing.

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
"""An advisory lock under which the library makes tables and schemas, since IF NOT EXISTS alone is no lock."""

_FOUND = """
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
    """A table that is there and fits."""

    name: TableName
    columns: tuple[TableColumn, ...]
    """The table's columns for the columns of the stream, in the stream's order."""


@dataclass(frozen=True)
class Wanted:
    """What a sink needs of its table."""

    sink: str
    name: TableName
    columns: Sequence[StagedColumn]
    key: tuple[str, ...]
    tag: str | None
    """A column of text that the sink fills itself, with the partition of each row."""

    privileges: tuple[str, ...]

    def ensure(self, client: Client) -> Target:
        """The table, made if it is missing; raises where the stream does not fit it, or may not be written."""
        where = f"sink '{self.sink}'"
        if self.name.schema is not None:
            self._check_schema(client, where, "USAGE")
        found = client.execute(_FOUND, (self.name.sql,)).fetchone()
        if found is None:
            self._check_schema(client, where, "CREATE")
            with client.transaction():
                client.execute("SELECT pg_advisory_xact_lock(%s)", (DDL_LOCK,))
                self._create(client)
            found = client.execute(_FOUND, (self.name.sql,)).fetchone()
            if found is None:
                raise SinkError(f"sink '{self.sink}': {self.name} was dropped while the job began; start it again")
        oid, schema, table, kind = found
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
        """Raises where the user may not do it in the table's schema; one that is not there is met later."""
        found = client.execute(
            "SELECT oid, nspname FROM pg_namespace WHERE nspname = coalesce(%s, current_schema())", (self.name.schema,)
        ).fetchone()
        if found is not None:
            check_rights(client, where, "schema", found[0], quoted(found[1]), (right,))

    def _checked(self, client: Client, oid: int, name: TableName) -> tuple[TableColumn, ...]:
        rows = client.execute(_COLUMNS, (oid,)).fetchall()
        held = {row[0]: TableColumn(row[0], row[1], row[2], row[3], row[5] or "") for row in rows}
        computed = {row[0] for row in rows if row[4]}
        for column in self.columns:
            there = held.get(column.name)
            if there is None:
                raise SinkError(
                    f"sink '{self.sink}': table {name} has no column '{column.name}'; write to another table, or"
                    f" ALTER TABLE {name.sql} ADD COLUMN {quoted(column.name)} {column.declared}"
                )
            if column.name in computed:
                raise SinkError(
                    f"sink '{self.sink}': column '{column.name}' of {name} is generated by the server; leave the field"
                    " out of the records"
                )
            if not column.fits(there):
                raise SinkError(
                    f"sink '{self.sink}': column '{column.name}' of {name} is {there.type}, and the records' field"
                    f" needs {column.declared}; write to another table, or make them the same"
                )
        if self.tag is not None and (self.tag not in held or held[self.tag].base not in ("text", "varchar")):
            raise SinkError(
                f"sink '{self.sink}': table {name} has no column '{self.tag}' of text, which says what partition wrote"
                f" a row; ALTER TABLE {name.sql} ADD COLUMN {quoted(self.tag)} text, with an index"
            )
        given = {column.name for column in self.columns} | {self.tag}
        lacking = next((there for there in held.values() if there.required and there.name not in given), None)
        if lacking is not None:
            raise SinkError(
                f"sink '{self.sink}': column '{lacking.name}' of {name} may not be null and has no default, and the"
                " records have no such field; add the field, or give the column a default"
            )
        return tuple(held[column.name] for column in self.columns)

    def _check_key(self, client: Client, oid: int, name: TableName) -> None:
        keys = [set(row[0]) for row in client.execute(_KEYS, (oid,)).fetchall()]
        if set(self.key) not in keys:
            columns = ", ".join(map(quoted, self.key))
            raise SinkError(
                f"sink '{self.sink}': table {name} has no primary key or unique index of ({columns}), which upserts"
                f" need; CREATE UNIQUE INDEX ON {name.sql} ({columns})"
            )
