"""Commits staged rows in one transaction with the marks of who wrote them: exactly-once without two-phase commit.

The marks are rows of a table of the library. The first statement of a commit writes them, on condition that no later
ones are there: it waits for whoever is committing under the same mark, and a writer that was succeeded finds that it
was. Runs on the driver.
"""

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
from dagster_unified.connectors.sql.postgres.connection import CONFLICTS, errors_of, lost, sqlstate, translated
from dagster_unified.connectors.sql.postgres.names import quoted
from dagster_unified.connectors.sql.postgres.rights import check_rights
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
from dagster_unified.connectors.sql.table_sink import partition_repeated
from dagster_unified.errors import SinkError, UnavailableError

if TYPE_CHECKING:
    import psycopg

    Client: TypeAlias = psycopg.Connection[tuple[Any, ...]]

R = TypeVar("R")

_IDLE_SECONDS = 20
"""After which the server ends a transaction whose client has stopped, so that its successor goes on."""

_LOCK_SECONDS = 10
"""How long one attempt at a commit waits for a lock."""

_COMMIT = "__commit"
"""A column of the rows that came with committables: which commit they belong to."""

_STAGED = """
SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relkind = 'r' AND c.relname LIKE 'staged\\_%%' AND pg_has_role(c.relowner, 'USAGE')
"""


_LIBRARY = """
SELECT n.oid, c.oid FROM pg_namespace n LEFT JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = 'commits'
WHERE n.nspname = %s
"""
"""The library's schema, and its table of marks."""


@dataclass(frozen=True)
class Plan:
    """What a sink commits, and how."""

    staging: Staging
    wanted: Wanted
    mode: str
    where: str
    """How messages begin."""


class PostgresCommitter(Committer[PostgresCommittable]):
    """The committer of one sink. Keeps a connection, which it makes anew after the server went away."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._connected: Client | None = None
        self._marks = f"{quoted(plan.staging.schema)}.commits"
        self._held: set[str] = set()
        self._target = self._asked(self._prepare)

    def last_version(self, name: str) -> int | None:
        statement = f"SELECT version FROM {self._marks} WHERE writer = %s".encode()
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
                self._merge(client, commits)
        except Exception as error:
            state = sqlstate(error)
            if isinstance(error, CommitConflictError):
                raise
            if state in CONFLICTS:
                raise CommitConflictError(f"{self._plan.where}: another write was first ({error})") from error
            if lost(error):
                self._forget()
                raise CommitUncertainError(
                    f"{self._plan.where}: the connection to {self._server} was lost while it committed"
                ) from error
            if state == "42P01" and "staged_" in str(error):
                raise self._unstaged() from error
            raise translated(error, self._plan.staging.connection, self._plan.where) or error from error

    def clean_up(self, attempts: Sequence[WriteAttempt], committed: bool) -> None:
        """Drops what tasks that failed, or ran twice, have staged."""
        tags = {attempt_tag(attempt) for attempt in attempts}

        def cleaned(client: Client) -> None:
            for table in self._staged(client):
                if (found := tags_of(table)) is not None and found[1] in tags:
                    self._drop(client, table)
            for tag in tags & self._held:
                client.execute("SELECT pg_advisory_unlock(%s)", (lock_of(tag),))
            self._held -= tags

        self._asked(cleaned)

    def close(self) -> None:
        self._forget()

    # The transaction

    def _merge(self, client: Client, commits: Sequence[Commit[PostgresCommittable]]) -> None:
        # Before any lock is taken, since the server does not end a COPY whose client has stopped.
        inline = self._copy_inline(client, commits)
        first = self._mark(client, commits)
        for number, commit in enumerate(commits):
            tables = [committable for committable in commit.committables if committable.table]
            self._check_staged(client, tables)
            partition = self._clear(client, commit, first[number])
            sources = [(f"{quoted(self._plan.staging.schema)}.{quoted(c.table)}", c.rows) for c in tables]
            if inline[number]:
                sources.append((f"(SELECT * FROM pg_temp.inline_rows WHERE {_COMMIT} = {number})", inline[number]))
            for source, _ in sources:
                self._check_values(client, source)
            if self._plan.mode == "upsert":
                self._upsert(client, sources)
            else:
                self._insert(client, sources, partition)
            for committable in tables:
                client.execute(f"DROP TABLE {quoted(self._plan.staging.schema)}.{quoted(committable.table)}".encode())

    def _mark(self, client: Client, commits: Sequence[Commit[PostgresCommittable]]) -> list[bool]:
        """Writes the marks; returns which commits are the first of their deployment."""
        names = sorted((name, number) for number, commit in enumerate(commits) for name in commit.marks)
        inserted: dict[tuple[str, int], bool] = {}
        for name, number in names:
            identity, version = commits[number].identity, commits[number].marks[name]
            holds = "<" if name == identity.writer else "<="
            statement = (
                f"INSERT INTO {self._marks} AS held (writer, version) VALUES (%s, %s) ON CONFLICT (writer) DO UPDATE"
                f" SET version = EXCLUDED.version, committed_at = now() WHERE held.version {holds} EXCLUDED.version"
                " RETURNING held.xmax = 0"
            )
            row = client.execute(statement.encode(), (name, version)).fetchone()
            if row is None:
                raise CommitConflictError(f"{self._plan.where}: {name} has been committed by another job")
            inserted[name, number] = bool(row[0])
        return [
            commit.identity.deployment is not None and inserted[commit.identity.deployment, number]
            for number, commit in enumerate(commits)
        ]

    def _clear(self, client: Client, commit: Commit[PostgresCommittable], first: bool) -> str | None:
        """Deletes what this commit replaces; returns the partition that its rows are marked with."""
        plan, identity = self._plan, commit.identity
        if plan.mode == "upsert":
            return None
        table, tag = self._target.name.sql, plan.wanted.tag
        if identity.replaces is None:
            if plan.mode == "overwrite" and (identity.epoch is None or first):
                # readers go on; TRUNCATE would stop them, and show older snapshots an empty table
                client.execute(f"LOCK TABLE {table} IN SHARE ROW EXCLUSIVE MODE".encode())
                client.execute(f"DELETE FROM {table}".encode())
            return None
        again = self._count_run(client, identity.replaces)
        if tag is not None:
            client.execute(f"DELETE FROM {table} WHERE {quoted(tag)} = %s".encode(), (identity.partition_key,))
            return identity.partition_key
        if again:
            raise partition_repeated(plan.where, identity.partition_key)
        return None

    def _count_run(self, client: Client, replaces: str) -> bool:
        """Waits for other runs of the partition; returns whether one has committed before."""
        statement = (
            f"INSERT INTO {self._marks} AS held (writer, version) VALUES (%s, 0) ON CONFLICT (writer) DO UPDATE"
            " SET version = held.version + 1, committed_at = now() RETURNING held.version"
        )
        row = client.execute(statement.encode(), (replaces,)).fetchone()
        return row is not None and row[0] > 0

    def _insert(self, client: Client, sources: Sequence[tuple[str, int]], partition: str | None) -> None:
        columns, values = self._columns()
        if partition is not None and self._plan.wanted.tag is not None:
            columns, values = [*columns, quoted(self._plan.wanted.tag)], [*values, "%s::text"]
        parameters = None if partition is None else (partition,)
        for source, rows in sources:
            statement = (
                f"INSERT INTO {self._target.name.sql} ({', '.join(columns)}) SELECT {', '.join(values)}"
                f" FROM {source} AS staged"
            )
            # a trigger of the table may leave rows out
            if client.execute(statement.encode(), parameters).rowcount != rows:
                self._check_rows(client, source, rows)

    def _upsert(self, client: Client, sources: Sequence[tuple[str, int]]) -> None:
        if not sources:
            return
        for source, rows in sources:
            self._check_rows(client, source, rows)
        columns, values = self._columns()
        keys = ", ".join(map(quoted, self._plan.wanted.key))
        same = ", ".join(self._keys())
        staged = ", ".join(quoted(name) for name, _ in self._plan.staging.fields)
        rows_of_all = " UNION ALL ".join(f"SELECT {staged} FROM {source} AS staged" for source, _ in sources)
        changed = [column for column in columns if column not in map(quoted, self._plan.wanted.key)]
        update = ", ".join(f"{column} = EXCLUDED.{column}" for column in changed)
        client.execute(
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
            held.name: (column, held)
            for column, held in zip(self._plan.staging.columns, self._target.columns, strict=True)
        }
        return [
            f"({column.expression(held)})::{held.type}" + (f" COLLATE {held.collation}" if held.collation else "")
            for column, held in map(pairs.__getitem__, self._plan.wanted.key)
        ]

    def _columns(self) -> tuple[list[str], list[str]]:
        """The table's columns, and the staged values for them."""
        pairs = list(zip(self._plan.staging.columns, self._target.columns, strict=True))
        return [quoted(held.name) for _, held in pairs], [column.expression(held) for column, held in pairs]

    def _copy_inline(self, client: Client, commits: Sequence[Commit[PostgresCommittable]]) -> list[int]:
        """Copies the rows that came with committables to the server; returns how many each commit has."""
        counts = [sum(c.rows for c in commit.committables if not c.table) for commit in commits]
        if not any(counts):
            return counts
        fields = [*self._plan.staging.fields, (_COMMIT, "int4")]
        columns = ", ".join(f"{quoted(name)} {kind}" for name, kind in fields)
        client.execute(f"CREATE TEMP TABLE IF NOT EXISTS inline_rows ({columns}) ON COMMIT DELETE ROWS".encode())
        with client.cursor() as cursor, cursor.copy("COPY pg_temp.inline_rows FROM STDIN (FORMAT BINARY)") as copy:
            copy.set_types([kind for _, kind in fields])
            for number, commit in enumerate(commits):
                for committable in commit.committables:
                    for batch in committable.batches():
                        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                            copy.write_row((*row, number))
        return counts

    def _check_staged(self, client: Client, committables: Sequence[PostgresCommittable]) -> None:
        names = {committable.table for committable in committables}
        if names and not names <= set(self._staged(client)):
            raise self._unstaged()

    def _check_values(self, client: Client, source: str) -> None:
        """Raises where a column would round a value, or cut it off."""
        pairs = zip(self._plan.staging.columns, self._target.columns, strict=True)
        checked = [(column, held) for column, held in pairs if column.may_be_rounded(held) or column.may_be_cut(held)]
        if not checked:
            return
        changed = [
            f"{quoted(column.name)} <> {quoted(column.name)}::{held.type}::{column.type}" for column, held in checked
        ]
        asked = ", ".join(f"EXISTS (SELECT FROM {source} AS staged WHERE {condition})" for condition in changed)
        found = client.execute(f"SELECT {asked}".encode()).fetchone() or ()
        for (column, held), is_changed in zip(checked, found, strict=True):
            if is_changed:
                what, remedy = (
                    ("longer texts", "cut") if column.may_be_cut(held) else ("values with more digits", "round")
                )
                raise SinkError(
                    f"{self._plan.where}: field '{column.name}' has {what} than its column holds, which is {held.type};"
                    f" {remedy} them, or change the column"
                )

    def _check_rows(self, client: Client, source: str, rows: int) -> None:
        counted = client.execute(f"SELECT count(*) FROM {source} AS staged".encode()).fetchone()
        if counted is None or counted[0] != rows:
            raise self._unstaged()

    def _unstaged(self) -> UnavailableError:
        return UnavailableError(
            f"{self._plan.where}: staged rows are gone, since {self._server} has crashed or another job has removed"
            " them; nothing was committed, and another attempt stages them again"
        )

    # What is there

    @property
    def _server(self) -> str:
        return self._plan.staging.connection.describe()

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
            check_rights(client, where, "table", marks, self._marks, ("SELECT", "INSERT", "UPDATE"))
        else:
            with client.transaction():
                client.execute("SELECT pg_advisory_xact_lock(%s)", (DDL_LOCK,))
                if client.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (schema,)).fetchone() is None:
                    client.execute(f"CREATE SCHEMA {quoted(schema)}".encode())  # IF NOT EXISTS needs the right to
                client.execute(
                    f"CREATE TABLE IF NOT EXISTS {self._marks} (writer text PRIMARY KEY, version bigint NOT NULL,"
                    " committed_at timestamptz NOT NULL DEFAULT now())".encode()
                )
        return self._plan.wanted.ensure(client)

    def _staged(self, client: Client) -> list[str]:
        return [row[0] for row in client.execute(_STAGED, (self._plan.staging.schema,)).fetchall()]

    def _sweep(self, client: Client, writers: set[str]) -> None:
        """Drops the tables of earlier attempts of these writers, and those of any whose driver is gone."""
        for table in self._staged(client):
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
