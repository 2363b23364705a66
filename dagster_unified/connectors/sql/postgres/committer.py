"""The committer of a sink into PostgreSQL: takes locks for attempts, commits them, and drops what dead ones staged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from dagster_unified.connectors.protocol.commits import (
    Commit,
    CommitConflictError,
    Committer,
    CommitUncertainError,
    WriteAttempt,
)
from dagster_unified.connectors.sql.postgres.connection import CONFLICTS, errors_of, lost, sqlstate, translated
from dagster_unified.connectors.sql.postgres.names import quoted
from dagster_unified.connectors.sql.postgres.rights import check_rights
from dagster_unified.connectors.sql.postgres.staging import (
    PostgresCommittable,
    attempt_tag,
    lock_of,
    tags_of,
    writer_tag,
)
from dagster_unified.connectors.sql.postgres.tables import DDL_LOCK, Target
from dagster_unified.connectors.sql.postgres.transaction import PostgresWrite, WritePlan

if TYPE_CHECKING:
    import psycopg

    Client: TypeAlias = psycopg.Connection[tuple[Any, ...]]

R = TypeVar("R")

_IDLE_SECONDS = 20
"""After which the server ends a transaction whose client has stopped, so that its successor goes on."""

_LOCK_SECONDS = 10
"""How long one attempt at a commit waits for a lock."""

_LIBRARY = """
SELECT n.oid, c.oid FROM pg_namespace n LEFT JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = 'commits'
WHERE n.nspname = %s
"""
"""The library's schema, and its table of marks."""


class PostgresCommitter(Committer[PostgresCommittable]):
    """The committer of one sink. Keeps a connection, which it makes anew after the server went away."""

    def __init__(self, plan: WritePlan) -> None:
        self._plan = plan
        self._connected: Client | None = None
        self._held: set[str] = set()
        self._target = self._asked(self._prepare)

    def last_version(self, name: str) -> int | None:
        statement = f"SELECT version FROM {self._plan.marks} WHERE writer = %s".encode()
        row = self._asked(lambda client: client.execute(statement, (name,)).fetchone())
        return None if row is None else int(row[0])

    def begin(self, attempts: Sequence[WriteAttempt]) -> None:
        """Takes a lock for each attempt, which says that its driver lives, and drops what dead ones have staged."""
        tags = [attempt_tag(attempt) for attempt in attempts]
        writers = {writer_tag(attempt.identity) for attempt in attempts}

        def started(client: Client) -> None:
            for tag in tags:
                client.execute("SELECT pg_advisory_lock(%s)", (lock_of(tag),))
                self._held.add(tag)
            self._sweep(client, writers)

        self._asked(started)

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
        """Drops what tasks that failed, or ran twice, have staged."""
        tags = {attempt_tag(attempt) for attempt in attempts}

        def cleaned(client: Client) -> None:
            for table in self._plan.staged(client):
                if (found := tags_of(table)) is not None and found[1] in tags:
                    self._drop(client, table)
            for tag in tags & self._held:
                client.execute("SELECT pg_advisory_unlock(%s)", (lock_of(tag),))
            self._held -= tags

        self._asked(cleaned)

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
        """Drops the tables of earlier attempts of these writers, and those of any whose driver is gone."""
        for table in self._plan.staged(client):
            tags = tags_of(table)
            if tags is None or tags[1] in self._held:
                continue
            if tags[0] in writers:
                self._drop(client, table)
                continue
            row = client.execute("SELECT pg_try_advisory_lock(%s)", (lock_of(tags[1]),)).fetchone()
            if row is not None and row[0]:
                self._drop(client, table)
                client.execute("SELECT pg_advisory_unlock(%s)", (lock_of(tags[1]),))

    def _drop(self, client: Client, table: str) -> None:
        """Drops a staging table, unless somebody still uses it: then the next write does."""
        import psycopg

        with suppress(psycopg.errors.LockNotAvailable), client.transaction():
            client.execute("SET LOCAL lock_timeout = '1s'")
            client.execute(f"DROP TABLE IF EXISTS {quoted(self._plan.staging.schema)}.{quoted(table)}".encode())

    # The connection

    def _asked(self, ask: Callable[[Client], R]) -> R:
        """What the server answers; asked a second time where the connection turns out to be dead."""
        plan = self._plan
        kept = self._connected is not None
        with errors_of(plan.staging.connection, plan.where):
            try:
                return ask(self._open())
            except Exception as error:
                if not lost(error):
                    raise
                self._forget()
                if not kept:
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
        """Closes the connection, with which its locks and its table of inline rows are gone."""
        connected, self._connected = self._connected, None
        self._held = set()
        if connected is not None:
            connected.close()
