"""The committer of a sink into PostgreSQL: locks attempts, commits them, and drops what dead attempts have staged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from dagster_unified.connectors.protocol.commits import (
    Commit,
    CommitConflictError,
    Committer,
    CommitUncertainError,
    WriteAttempt,
)
from dagster_unified.connectors.sql.postgres.connection import (
    CONFLICTS,
    check_rights,
    errors_of,
    lost,
    quoted,
    sqlstate,
    translated,
)
from dagster_unified.connectors.sql.postgres.staging import (
    ORDER,
    PostgresCommittable,
    Staging,
    attempt_tag,
    lock_of,
    tags_of,
    writer_tag,
)
from dagster_unified.connectors.sql.postgres.tables import DDL_LOCK, Target, Wanted
from dagster_unified.connectors.sql.table_sink import MarkedWrite, Mode
from dagster_unified.errors import SinkError, UnavailableError

if TYPE_CHECKING:
    import psycopg

    Client: TypeAlias = psycopg.Connection[tuple[Any, ...]]

_COMMIT = "__commit"
"""A column of the rows that came in committables: the commit that they belong to."""

_STAGED = """
SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relkind = 'r' AND c.relname LIKE 'staged\\_%%' AND pg_has_role(c.relowner, 'USAGE')
"""


@dataclass(frozen=True)
class WritePlan:
    """The tables and options of a sink's commits."""

    staging: Staging
    wanted: Wanted
    mode: Mode
    where: str
    """How messages begin."""

    @property
    def server(self) -> str:
        """Where the server is, for messages."""
        return self.staging.connection.describe()

    @property
    def marks(self) -> str:
        """The library's table of marks."""
        return f"{quoted(self.staging.schema)}.commits"

    def staged(self, client: Client) -> list[str]:
        """The existing staging tables."""
        return [row[0] for row in client.execute(_STAGED, (self.staging.schema,)).fetchall()]

    def unstaged(self) -> UnavailableError:
        """The error for missing staged rows."""
        return UnavailableError(
            f"{self.where}: staged rows are gone, since {self.server} has crashed or another job has removed"
            " them; nothing was committed, and another attempt stages them again"
        )


class PostgresWrite(MarkedWrite[PostgresCommittable]):
    """The transaction of some commits, on a client that has begun it."""

    def __init__(self, plan: WritePlan, target: Target, client: Client) -> None:
        super().__init__(plan.mode, plan.wanted.tag, plan.where)
        self._plan, self._target, self._client = plan, target, client
        self._inline: list[int] = []

    def write(self, commits: Sequence[Commit[PostgresCommittable]]) -> None:
        # before any lock is taken, since the server does not end a COPY whose client has stopped
        self._inline = self._copy_inline(commits)
        super().write(commits)

    def raise_mark(self, name: str, version: int, again: bool) -> bool | None:
        statement = (
            f"INSERT INTO {self._plan.marks} AS held (writer, version) VALUES (%s, %s) ON CONFLICT (writer) DO UPDATE"
            f" SET version = EXCLUDED.version, committed_at = now()"
            f" WHERE held.version {'<=' if again else '<'} EXCLUDED.version RETURNING held.xmax = 0"
        )
        row = self._client.execute(statement.encode(), (name, version)).fetchone()
        return None if row is None else bool(row[0])

    def count_run(self, name: str) -> bool:
        statement = (
            f"INSERT INTO {self._plan.marks} AS held (writer, version) VALUES (%s, 0) ON CONFLICT (writer) DO UPDATE"
            " SET version = held.version + 1, committed_at = now() RETURNING held.version"
        )
        row = self._client.execute(statement.encode(), (name,)).fetchone()
        return row is not None and row[0] > 0

    def delete_all(self) -> None:
        # readers go on; TRUNCATE would stop them, and show older snapshots an empty table
        self._client.execute(f"LOCK TABLE {self._target.name.sql} IN SHARE ROW EXCLUSIVE MODE".encode())
        self._client.execute(f"DELETE FROM {self._target.name.sql}".encode())

    def delete_partition(self, column: str, key: str) -> None:
        self._client.execute(f"DELETE FROM {self._target.name.sql} WHERE {quoted(column)} = %s".encode(), (key,))

    def load(self, number: int, committables: Sequence[PostgresCommittable], partition: str | None) -> None:
        tables = {f"{quoted(self._plan.staging.schema)}.{quoted(c.table)}": c for c in committables if c.table}
        if tables and not {c.table for c in tables.values()} <= set(self._plan.staged(self._client)):
            raise self._plan.unstaged()
        sources = [(table, committable.rows) for table, committable in tables.items()]
        if self._inline[number]:
            sources.append((f"(SELECT * FROM pg_temp.inline_rows WHERE {_COMMIT} = {number})", self._inline[number]))
        for source, _ in sources:
            self._check_values(source)
        if self.mode == "upsert":
            self._upsert(sources)
        else:
            self._insert(sources, partition)
        for table in tables:
            self._client.execute(f"DROP TABLE {table}".encode())

    def _insert(self, sources: Sequence[tuple[str, int]], partition: str | None) -> None:
        columns, values = self._columns()
        if partition is not None and self.partition_column is not None:
            columns, values = [*columns, quoted(self.partition_column)], [*values, "%s::text"]
        parameters = None if partition is None else (partition,)
        for source, rows in sources:
            statement = (
                f"INSERT INTO {self._target.name.sql} ({', '.join(columns)}) SELECT {', '.join(values)}"
                f" FROM {source} AS staged"
            )
            # a trigger of the table may leave rows out
            if self._client.execute(statement.encode(), parameters).rowcount != rows:
                self._check_rows(source, rows)

    def _upsert(self, sources: Sequence[tuple[str, int]]) -> None:
        if not sources:
            return
        for source, rows in sources:
            self._check_rows(source, rows)
        columns, values = self._columns()
        keys = ", ".join(map(quoted, self._plan.wanted.key))
        same = ", ".join(self._keys())
        staged = ", ".join(quoted(name) for name, _ in self._plan.staging.fields)
        rows_of_all = " UNION ALL ".join(f"SELECT {staged} FROM {source} AS staged" for source, _ in sources)
        changed = [column for column in columns if column not in map(quoted, self._plan.wanted.key)]
        update = ", ".join(f"{column} = EXCLUDED.{column}" for column in changed)
        self._client.execute(
            (
                f"INSERT INTO {self._target.name.sql} ({', '.join(columns)}) SELECT {', '.join(values)} FROM"
                f" (SELECT DISTINCT ON ({same}) * FROM ({rows_of_all}) AS every"
                f" ORDER BY {same}, {quoted(ORDER)} DESC) AS latest"
                f" ON CONFLICT ({keys}) DO {f'UPDATE SET {update}' if changed else 'NOTHING'}"
            ).encode()
        )

    def _keys(self) -> list[str]:
        """The staged keys as the table compares them, such as a `uuid`, or in a collation that ignores case."""
        pairs = {
            target.name: (column, target)
            for column, target in zip(self._plan.staging.columns, self._target.columns, strict=True)
        }
        return [
            f"({column.expression(target)})::{target.type}"
            + (f" COLLATE {target.collation}" if target.collation else "")
            for column, target in map(pairs.__getitem__, self._plan.wanted.key)
        ]

    def _columns(self) -> tuple[list[str], list[str]]:
        """The table's columns, and the staged values for them."""
        pairs = list(zip(self._plan.staging.columns, self._target.columns, strict=True))
        return [quoted(target.name) for _, target in pairs], [column.expression(target) for column, target in pairs]

    def _copy_inline(self, commits: Sequence[Commit[PostgresCommittable]]) -> list[int]:
        """Copy the rows in committables to the server; returns how many each commit has."""
        counts = [sum(c.rows for c in commit.committables if not c.table) for commit in commits]
        if not any(counts):
            return counts
        fields = [*self._plan.staging.fields, (_COMMIT, "int4")]
        columns = ", ".join(f"{quoted(name)} {kind}" for name, kind in fields)
        self._client.execute(f"CREATE TEMP TABLE IF NOT EXISTS inline_rows ({columns}) ON COMMIT DELETE ROWS".encode())
        with (
            self._client.cursor() as cursor,
            cursor.copy("COPY pg_temp.inline_rows FROM STDIN (FORMAT BINARY)") as copy,
        ):
            copy.set_types([kind for _, kind in fields])
            for number, commit in enumerate(commits):
                for committable in commit.committables:
                    for batch in committable.batches():
                        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                            copy.write_row((*row, number))
        return counts

    def _check_values(self, source: str) -> None:
        """Raise `SinkError` where a column would round a value, or cut it off."""
        pairs = zip(self._plan.staging.columns, self._target.columns, strict=True)
        checked = [
            (column, target) for column, target in pairs if column.may_be_rounded(target) or column.may_be_cut(target)
        ]
        if not checked:
            return
        changed = [
            f"{quoted(column.name)} <> {quoted(column.name)}::{target.type}::{column.type}"
            for column, target in checked
        ]
        asked = ", ".join(f"EXISTS (SELECT FROM {source} AS staged WHERE {condition})" for condition in changed)
        answers = self._client.execute(f"SELECT {asked}".encode()).fetchone() or ()
        for (column, target), is_changed in zip(checked, answers, strict=True):
            if is_changed:
                what, remedy = (
                    ("longer texts", "cut") if column.may_be_cut(target) else ("values with more digits", "round")
                )
                raise SinkError(
                    f"{self.where}: field '{column.name}' has {what} than its column holds, which is {target.type};"
                    f" {remedy} them, or change the column"
                )

    def _check_rows(self, source: str, rows: int) -> None:
        counted = self._client.execute(f"SELECT count(*) FROM {source} AS staged".encode()).fetchone()
        if counted is None or counted[0] != rows:
            raise self._plan.unstaged()


R = TypeVar("R")

_IDLE_SECONDS = 20
"""Seconds after which the server ends a transaction whose client has stopped, so that its successor can go on."""

_LOCK_SECONDS = 10
"""Seconds that one attempt at a commit waits for a lock."""

_LIBRARY = """
SELECT n.oid, c.oid FROM pg_namespace n LEFT JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = 'commits'
WHERE n.nspname = %s
"""
"""The library's schema, and its table of marks."""


class PostgresCommitter(Committer[PostgresCommittable]):
    """The committer of one sink. Keeps a connection, and connects anew after the server went away."""

    def __init__(self, plan: WritePlan) -> None:
        self._plan = plan
        self._connected: Client | None = None
        self._locked_tags: set[str] = set()
        self._target = self._with_live_connection(self._prepare)

    def last_version(self, name: str) -> int | None:
        statement = f"SELECT version FROM {self._plan.marks} WHERE writer = %s".encode()
        row = self._with_live_connection(lambda client: client.execute(statement, (name,)).fetchone())
        return None if row is None else int(row[0])

    def begin(self, attempts: Sequence[WriteAttempt]) -> None:
        """Lock each attempt, which shows that its driver lives, and drop what dead attempts have staged."""
        tags = [attempt_tag(attempt) for attempt in attempts]
        writers = {writer_tag(attempt.identity) for attempt in attempts}

        def started(client: Client) -> None:
            for tag in tags:
                client.execute("SELECT pg_advisory_lock(%s)", (lock_of(tag),))
                self._locked_tags.add(tag)
            self._sweep(client, writers)

        self._with_live_connection(started)

    def commit(self, commits: Sequence[Commit[PostgresCommittable]]) -> None:
        client = self._open()
        try:
            with client.transaction():
                PostgresWrite(self._plan, self._target, client).write(commits)
        except Exception as error:
            state = sqlstate(error)
            if isinstance(error, CommitConflictError):
                raise
            if state in CONFLICTS:
                raise CommitConflictError(f"{self._plan.where}: another write was first ({error})") from error
            if lost(error):
                self._forget()
                raise CommitUncertainError(
                    f"{self._plan.where}: the connection to {self._plan.server} was lost while it committed"
                ) from error
            if state == "42P01" and "staged_" in str(error):
                raise self._plan.unstaged() from error
            raise translated(error, self._plan.staging.connection, self._plan.where) or error from error

    def clean_up(self, attempts: Sequence[WriteAttempt], committed: bool) -> None:
        """Drop what failed or repeated tasks have staged."""
        tags = {attempt_tag(attempt) for attempt in attempts}

        def cleaned(client: Client) -> None:
            for table in self._plan.staged(client):
                if (table_tags := tags_of(table)) is not None and table_tags[1] in tags:
                    self._drop(client, table)
            for tag in tags & self._locked_tags:
                client.execute("SELECT pg_advisory_unlock(%s)", (lock_of(tag),))
            self._locked_tags -= tags

        self._with_live_connection(cleaned)

    def close(self) -> None:
        self._forget()

    # What is there

    def _prepare(self, client: Client) -> Target:
        schema = self._plan.staging.schema
        where = self._plan.where
        there = client.execute(_LIBRARY, (schema,)).fetchone()
        if there is None:
            row = client.execute("SELECT oid, datname FROM pg_database WHERE datname = current_database()").fetchone()
            assert row is not None
            check_rights(client, where, "database", row[0], quoted(row[1]), ("CREATE",))
        else:
            check_rights(client, where, "schema", there[0], quoted(schema), ("USAGE", "CREATE"))
        marks = None if there is None else there[1]
        if marks is not None:
            check_rights(client, where, "table", marks, self._plan.marks, ("SELECT", "INSERT", "UPDATE"))
        else:
            with client.transaction():
                client.execute("SELECT pg_advisory_xact_lock(%s)", (DDL_LOCK,))
                if client.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (schema,)).fetchone() is None:
                    client.execute(f"CREATE SCHEMA {quoted(schema)}".encode())  # IF NOT EXISTS needs the right to
                client.execute(
                    f"CREATE TABLE IF NOT EXISTS {self._plan.marks} (writer text PRIMARY KEY, version bigint NOT NULL,"
                    " committed_at timestamptz NOT NULL DEFAULT now())".encode()
                )
        return self._plan.wanted.ensure(client)

    def _sweep(self, client: Client, writers: set[str]) -> None:
        """Drop the tables of earlier attempts of these writers, and of any attempt whose driver is gone."""
        for table in self._plan.staged(client):
            tags = tags_of(table)
            if tags is None or tags[1] in self._locked_tags:
                continue
            if tags[0] in writers:
                self._drop(client, table)
                continue
            row = client.execute("SELECT pg_try_advisory_lock(%s)", (lock_of(tags[1]),)).fetchone()
            if row is not None and row[0]:
                self._drop(client, table)
                client.execute("SELECT pg_advisory_unlock(%s)", (lock_of(tags[1]),))

    def _drop(self, client: Client, table: str) -> None:
        """Drop a staging table, unless somebody still uses it: then the next write drops it."""
        import psycopg

        with suppress(psycopg.errors.LockNotAvailable), client.transaction():
            client.execute("SET LOCAL lock_timeout = '1s'")
            client.execute(f"DROP TABLE IF EXISTS {quoted(self._plan.staging.schema)}.{quoted(table)}".encode())

    # The connection

    def _with_live_connection(self, ask: Callable[[Client], R]) -> R:
        """Run `ask`; run it again where the connection turns out to be dead."""
        plan = self._plan
        was_connected = self._connected is not None
        with errors_of(plan.staging.connection, plan.where):
            try:
                return ask(self._open())
            except Exception as error:
                if not lost(error):
                    raise
                self._forget()
                if not was_connected:
                    raise
            return ask(self._open())

    def _open(self) -> Client:
        if self._connected is None:
            self._connected = self._plan.staging.connection.connect(self._plan.where, autocommit=True)
            with errors_of(self._plan.staging.connection, self._plan.where):
                self._connected.execute(
                    f"SET idle_in_transaction_session_timeout = '{_IDLE_SECONDS}s';"
                    f" SET lock_timeout = '{_LOCK_SECONDS}s'; SET client_min_messages = warning;"
                    " SELECT set_config('synchronous_commit', 'on', false)"
                    " WHERE current_setting('synchronous_commit') = 'off'".encode()
                )
        return self._connected

    def _forget(self) -> None:
        """Close the connection; its locks and its table of inline rows go with it."""
        connected, self._connected = self._connected, None
        self._locked_tags = set()
        if connected is not None:
            connected.close()
