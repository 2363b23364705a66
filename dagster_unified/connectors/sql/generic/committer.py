"""The committer of a sink into a database that SQLAlchemy reaches. Runs on the driver.

Connections are closed after each step: an open file of DuckDB keeps other processes out.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from dagster_unified.connectors.sql.dialects import dialect_of, exactly_once
from dagster_unified.connectors.sql.generic.connection import is_locked
from dagster_unified.connectors.sql.generic.dialect import Dialect
from dagster_unified.connectors.sql.generic.staging import StagedRows
from dagster_unified.connectors.sql.generic.transaction import MARKS, DatabaseWrite, WritePlan
from dagster_unified.connectors.sql.generic.types import compared_text, statement_columns
from dagster_unified.connectors.sql.mariadb import TABLE_OPTIONS
from dagster_unified.errors import SinkError, UnavailableError, UnifiedError

if TYPE_CHECKING:
    import sqlalchemy as sa


class DatabaseCommitter(Committer[StagedRows]):
    """The committer of one sink."""

    def __init__(self, plan: WritePlan) -> None:
        import sqlalchemy as sa
        from sqlalchemy.sql.elements import quoted_name

        self._plan = plan
        self._dialect = dialect_of(plan.database.engine(plan.where).dialect.name)
        if plan.exactly_once and not self._dialect.exactly_once:
            raise SinkError(not_exact(plan.where, self._dialect))
        held = sa.MetaData()
        self._marks = sa.Table(
            MARKS,
            held,
            sa.Column("writer", compared_text(512), primary_key=True),
            sa.Column("version", sa.BigInteger, nullable=False),
            **TABLE_OPTIONS,
        )
        columns = statement_columns(plan.rows, plan.key)
        if plan.partition_column is not None:
            columns.append(sa.Column(quoted_name(plan.partition_column, True), compared_text(255), index=True))
        schema = None if plan.db_schema is None else quoted_name(plan.db_schema, True)
        self._table = sa.Table(quoted_name(plan.table, True), held, *columns, schema=schema, **TABLE_OPTIONS)
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
            self._check(sa.inspect(connection))
            self._dialect.check_table(
                connection, plan.table, plan.db_schema, plan.key, plan.partition_column, plan.where
            )

    def last_version(self, name: str) -> int | None:
        with self._plan.database.transaction(self._plan.where) as connection:
            return self._transaction(connection).version(name)

    def commit(self, commits: Sequence[Commit[StagedRows]]) -> None:
        import sqlalchemy as sa

        plan, ending = self._plan, False
        try:
            with plan.database.transaction(plan.where) as connection:
                try:
                    self._transaction(connection).write(commits)
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

    def _transaction(self, connection: sa.Connection) -> DatabaseWrite:
        return DatabaseWrite(self._plan, self._dialect, connection, self._marks, self._table, self._scales)

    # What is there

    def _check(self, found: Any) -> None:
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
            if not self._dialect.holds(kind, column_type):
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
        if plan.key and self._dialect.exactly_once:
            keys = [found.get_pk_constraint(plan.table, plan.db_schema)["constrained_columns"]]
            keys += [one["column_names"] for one in found.get_unique_constraints(plan.table, plan.db_schema)]
            keys += [one["column_names"] for one in found.get_indexes(plan.table, plan.db_schema) if one["unique"]]
            if set(plan.key) not in map(set, keys):
                raise SinkError(
                    f"{plan.where}: table {plan.table} has no primary key or unique index of ({', '.join(plan.key)}),"
                    " which upserts need; create one"
                )


def not_exact(where: str, dialect: Dialect) -> str:
    """Says that nobody knows whether a write to a database happens exactly once."""
    return (
        f"{where}: DatabaseSink writes exactly once to {', '.join(exactly_once())} (mariadb+pymysql://…); for"
        f" {dialect.name} that is not known: give delivery_guarantee=DeliveryGuarantee.AT_LEAST_ONCE, or mode='upsert'"
        " with a key; for PostgreSQL there is PostgresSink"
    )


def _is_mark(error: Any) -> bool:
    """Whether a row of the marks was there before, as two who begin at once find it."""
    import sqlalchemy as sa

    return isinstance(error, sa.exc.IntegrityError) and MARKS in f"{error.orig} {error.statement}"
