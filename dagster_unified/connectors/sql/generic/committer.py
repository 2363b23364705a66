"""Loads staged rows in one transaction with the marks of who wrote them: exactly-once. Runs on the driver.

The first statement of a commit writes to the table of marks, so that it waits for whoever is committing. Connections
are closed after each step: an open file of DuckDB keeps other processes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dagster_unified.connectors.protocol.commits import (
    Commit,
    CommitConflictError,
    Committer,
    CommitUncertainError,
    WriteAttempt,
    remove_staging,
)
from dagster_unified.connectors.sql import mariadb
from dagster_unified.connectors.sql.generic.connection import OF_MYSQL, Database, is_locked
from dagster_unified.connectors.sql.generic.replacing import check_same, remove_keys
from dagster_unified.connectors.sql.generic.staging import StagedRows
from dagster_unified.connectors.sql.generic.types import (
    compared_text,
    fits,
    shortened,
    statement_columns,
    stored,
)
from dagster_unified.connectors.sql.table_sink import partition_repeated
from dagster_unified.errors import SinkError, UnavailableError, UnifiedError

if TYPE_CHECKING:
    import sqlalchemy as sa

MARKS = "dagster_unified_commits"
"""The library's table, with the highest version of each writer."""

_ROWS = 10_000
"""Rows of one call of a driver."""

KNOWN = {"sqlite": "SQLite", "duckdb": "DuckDB", "mariadb": "MariaDB"}
"""Dialects whose transactions and comparisons are known to keep what an exactly-once sink promises."""

_MADE: dict[str, Any] = {
    f"{dialect}_{name}": value for dialect in OF_MYSQL for name, value in (("engine", "InnoDB"), ("charset", "utf8mb4"))
}
"""How MariaDB and MySQL make a table."""


@dataclass(frozen=True)
class Plan:
    """What a sink commits, and how."""

    database: Database
    table: str
    db_schema: str | None
    rows: pa.Schema
    mode: str
    key: tuple[str, ...]
    partition_column: str | None
    exactly_once: bool
    """Whether a repeated write must not be there twice; upserts need no such promise."""

    where: str
    """How messages begin."""


class DatabaseCommitter(Committer[StagedRows]):
    """The committer of one sink."""

    def __init__(self, plan: Plan) -> None:
        import sqlalchemy as sa
        from sqlalchemy.sql.elements import quoted_name

        self._plan = plan
        dialect = plan.database.engine(plan.where).dialect.name
        if plan.exactly_once and dialect not in KNOWN:
            raise SinkError(not_exact(plan.where, dialect))
        held = sa.MetaData()
        self._marks = sa.Table(
            MARKS,
            held,
            sa.Column("writer", compared_text(512), primary_key=True),
            sa.Column("version", sa.BigInteger, nullable=False),
            **_MADE,
        )
        columns = statement_columns(plan.rows, plan.key)
        if plan.partition_column is not None:
            columns.append(sa.Column(quoted_name(plan.partition_column, True), compared_text(255), index=True))
        schema = None if plan.db_schema is None else quoted_name(plan.db_schema, True)
        self._table = sa.Table(quoted_name(plan.table, True), held, *columns, schema=schema, **_MADE)
        self._scales: dict[str, int] = {}
        try:
            self._prepare(held)
        except UnifiedError as error:
            if "already exists" not in str(error):
                raise
            self._prepare(held)  # two who began at once, and the other has made the tables

    def _prepare(self, held: sa.MetaData) -> None:
        """Makes the tables that are missing, and looks at those that are there."""
        import sqlalchemy as sa

        plan = self._plan
        with plan.database.transaction(plan.where) as connection:
            held.create_all(connection)
            self._check(sa.inspect(connection), connection.dialect.name)
            if connection.dialect.name == "mariadb":
                mariadb.check_table(connection, plan.table, plan.db_schema, plan.key, plan.partition_column, plan.where)

    def last_version(self, name: str) -> int | None:
        with self._plan.database.transaction(self._plan.where) as connection:
            return self._version(connection, name)

    def commit(self, commits: Sequence[Commit[StagedRows]]) -> None:
        import sqlalchemy as sa

        plan, ending = self._plan, False
        try:
            with plan.database.transaction(plan.where) as connection:
                try:
                    first = [self._mark(connection, commit) for commit in commits]
                    for commit, is_first in zip(commits, first, strict=True):
                        partition = self._clear(connection, commit, is_first)
                        for staged in commit.committables:
                            self._load(connection, staged.table(), partition)
                except sa.exc.DBAPIError as error:
                    if is_locked(error) or _is_mark(error):
                        raise CommitConflictError(f"{plan.where}: another write was first ({error.orig})") from None
                    raise
                ending = True
        except UnavailableError as error:
            if ending:
                raise CommitUncertainError(f"{error}; nobody can tell whether it was committed") from None
            raise

    def clean_up(self, attempts: Sequence[WriteAttempt], committed: bool) -> None:
        remove_staging(attempts, committed)

    # The transaction

    def _mark(self, connection: sa.Connection, commit: Commit[StagedRows]) -> bool:
        """Writes the marks; returns whether it is the first commit of its deployment."""
        first = False
        for name, version in sorted(commit.marks.items()):
            held = self._locked(connection, name)
            own = name == commit.identity.writer
            if held is not None and (held >= version if own else held > version):
                raise CommitConflictError(f"{self._plan.where}: {name} has been committed by another job")
            first = first or (held is None and name == commit.identity.deployment)
            self._remember(connection, name, held, version)
        return first

    def _locked(self, connection: sa.Connection, name: str) -> int | None:
        """The version of a mark, which nobody else changes until this transaction ends."""
        import sqlalchemy as sa

        mine = self._marks.c.writer == name
        connection.execute(sa.update(self._marks).where(mine).values(version=self._marks.c.version))
        return self._version(connection, name)

    def _version(self, connection: sa.Connection, name: str) -> int | None:
        import sqlalchemy as sa

        asked = sa.select(self._marks.c.writer, self._marks.c.version).where(self._marks.c.writer == name)
        found = connection.execute(asked).one_or_none()
        if found is None:
            return None
        check_same((found.writer,), {(name,)}, MARKS, self._plan.where)
        return int(found.version)

    def _remember(self, connection: sa.Connection, name: str, held: int | None, version: int) -> None:
        import sqlalchemy as sa

        if held is None:
            connection.execute(sa.insert(self._marks).values(writer=name, version=version))
        else:
            connection.execute(sa.update(self._marks).where(self._marks.c.writer == name).values(version=version))

    def _clear(self, connection: sa.Connection, commit: Commit[StagedRows], first: bool) -> str | None:
        """Deletes what this commit replaces; returns the partition that its rows are marked with."""
        import sqlalchemy as sa

        plan, identity = self._plan, commit.identity
        if plan.mode == "upsert":
            return None
        if identity.replaces is None:
            if plan.mode == "overwrite" and (identity.epoch is None or first):
                connection.execute(sa.delete(self._table))
            return None
        before = self._locked(connection, identity.replaces)
        self._remember(connection, identity.replaces, before, 0 if before is None else before + 1)
        if plan.partition_column is not None:
            if connection.dialect.name in KNOWN:
                of_partition = self._table.c[plan.partition_column] == identity.partition_key
                connection.execute(sa.delete(self._table).where(of_partition))
            else:
                partition = pa.table({plan.partition_column: [identity.partition_key]})
                remove_keys(connection, self._table, partition.column_names, partition, plan.where)
            return identity.partition_key
        if before is not None:
            raise partition_repeated(plan.where, identity.partition_key)
        return None

    def _load(self, connection: sa.Connection, rows: pa.Table, partition: str | None) -> None:
        import sqlalchemy as sa

        plan, dialect = self._plan, connection.dialect.name
        if plan.key:
            rows = _last_of_each_key(rows, plan.key)
        rows = shortened(stored(rows, dialect, plan.where), self._scales, plan.where)
        if partition is not None and plan.partition_column is not None:
            rows = rows.append_column(plan.partition_column, pa.array([partition] * len(rows), pa.string()))
        if dialect in OF_MYSQL:
            mariadb.check_lengths(connection, plan.table, plan.db_schema, rows, plan.where)
        if plan.key and dialect not in KNOWN:
            remove_keys(connection, self._table, plan.key, rows, plan.where)
        insert = self._insert(dialect)
        if dialect == "duckdb":  # row by row takes it ten times as long
            names = rows.column_names
            connection.execute(sa.text("register(:name, :rows)"), {"name": "staged_rows", "rows": rows})
            staged = sa.table("staged_rows", *[sa.column(name) for name in names])
            connection.execute(insert.from_select(names, sa.select(*staged.c)))
            return
        for start in range(0, len(rows), _ROWS):
            connection.execute(insert, rows.slice(start, _ROWS).to_pylist())

    def _insert(self, dialect: str) -> Any:
        if self._plan.mode != "upsert" or dialect not in KNOWN:
            return self._table.insert()
        from sqlalchemy.dialects import mysql, postgresql, sqlite

        further = [name for name in self._plan.rows.names if name not in self._plan.key]
        if dialect == "mariadb":
            inserting = mysql.insert(self._table)
            replaced = further or self._plan.key  # a key that is there stays what it is
            return inserting.on_duplicate_key_update({name: inserting.inserted[name] for name in replaced})
        upserting: Any = (sqlite if dialect == "sqlite" else postgresql).insert(self._table)  # DuckDB's is PostgreSQL's
        keys = [self._table.c[name] for name in self._plan.key]
        if not further:
            return upserting.on_conflict_do_nothing(index_elements=keys)
        return upserting.on_conflict_do_update(
            index_elements=keys, set_={self._table.c[name]: upserting.excluded[name] for name in further}
        )

    # What is there

    def _check(self, found: Any, dialect: str) -> None:
        """Raises where the records do not fit the table."""
        plan = self._plan
        held = {column["name"]: column for column in found.get_columns(plan.table, plan.db_schema)}
        wanted = {field.name: field.type for field in plan.rows}
        if plan.partition_column is not None:
            wanted[plan.partition_column] = pa.string()
        for name, kind in wanted.items():
            if name not in held:
                raise SinkError(
                    f"{plan.where}: table {plan.table} has no column '{name}'; add it, or write to another table"
                )
            column_type = held[name]["type"]
            scale = getattr(column_type, "scale", None)
            if pa.types.is_decimal(kind) and scale is not None:
                self._scales[name] = scale
            if not fits(kind, column_type, dialect):
                raise SinkError(
                    f"{plan.where}: column '{name}' of {plan.table} is {column_type}, which does not hold the"
                    f" field's {kind}; write to another table, or change the column"
                )
        for name, column in held.items():
            if name not in wanted and not column["nullable"] and column.get("default") is None:
                raise SinkError(
                    f"{plan.where}: column '{name}' of {plan.table} may not be null and has no default, and the records"
                    " have no such field; add the field, or give the column a default"
                )
        if plan.key and dialect in KNOWN:
            keys = [found.get_pk_constraint(plan.table, plan.db_schema)["constrained_columns"]]
            keys += [one["column_names"] for one in found.get_unique_constraints(plan.table, plan.db_schema)]
            keys += [one["column_names"] for one in found.get_indexes(plan.table, plan.db_schema) if one["unique"]]
            if set(plan.key) not in map(set, keys):
                raise SinkError(
                    f"{plan.where}: table {plan.table} has no primary key or unique index of ({', '.join(plan.key)}),"
                    " which upserts need; create one"
                )


def not_exact(where: str, dialect: str) -> str:
    """Says that nobody knows whether a write to a database happens exactly once."""
    return (
        f"{where}: DatabaseSink writes exactly once to {', '.join(KNOWN.values())} (mariadb+pymysql://…); for {dialect}"
        " that is not known: give delivery_guarantee=DeliveryGuarantee.AT_LEAST_ONCE, or mode='upsert' with a key; for"
        " PostgreSQL there is PostgresSink"
    )


def _is_mark(error: Any) -> bool:
    """Whether a row of the marks was there before, as two who begin at once find it."""
    import sqlalchemy as sa

    return isinstance(error, sa.exc.IntegrityError) and MARKS in f"{error.orig} {error.statement}"


def _last_of_each_key(rows: pa.Table, key: tuple[str, ...]) -> pa.Table:
    numbered = rows.select(list(key)).append_column("__row", pa.array(range(len(rows)), pa.int64()))
    import pyarrow.compute as pc

    for place, name in enumerate(key):
        if pa.types.is_floating(numbered.column(name).type):  # to a database -0.0 is the key 0.0
            numbered = numbered.set_column(place, name, pc.add(numbered.column(name), 0.0))
    return rows.take(numbered.group_by(list(key)).aggregate([("__row", "max")]).column("__row_max"))
