"""What a commit does in PostgreSQL: raises marks, deletes what is replaced, and moves staged rows into the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from dagster_unified.connectors.protocol.commits import Commit
from dagster_unified.connectors.sql.marked_write import MarkedWrite
from dagster_unified.connectors.sql.postgres.names import quoted
from dagster_unified.connectors.sql.postgres.staging import ORDER, PostgresCommittable, Staging
from dagster_unified.connectors.sql.postgres.tables import Target, Wanted
from dagster_unified.connectors.sql.table_sink import Mode
from dagster_unified.errors import SinkError, UnavailableError

if TYPE_CHECKING:
    import psycopg

    Client: TypeAlias = psycopg.Connection[tuple[Any, ...]]

_COMMIT = "__commit"
"""A column of the rows that came with committables: which commit they belong to."""

_STAGED = """
SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relkind = 'r' AND c.relname LIKE 'staged\\_%%' AND pg_has_role(c.relowner, 'USAGE')
"""


@dataclass(frozen=True)
class WritePlan:
    """What a sink commits, and how."""

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
        """The staging tables that there are."""
        return [row[0] for row in client.execute(_STAGED, (self.staging.schema,)).fetchall()]

    def unstaged(self) -> UnavailableError:
        """The error of staged rows that are not there."""
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

    def _copy_inline(self, commits: Sequence[Commit[PostgresCommittable]]) -> list[int]:
        """Copies the rows that came with committables to the server; returns how many each commit has."""
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
        """Raises where a column would round a value, or cut it off."""
        pairs = zip(self._plan.staging.columns, self._target.columns, strict=True)
        checked = [(column, held) for column, held in pairs if column.may_be_rounded(held) or column.may_be_cut(held)]
        if not checked:
            return
        changed = [
            f"{quoted(column.name)} <> {quoted(column.name)}::{held.type}::{column.type}" for column, held in checked
        ]
        asked = ", ".join(f"EXISTS (SELECT FROM {source} AS staged WHERE {condition})" for condition in changed)
        found = self._client.execute(f"SELECT {asked}".encode()).fetchone() or ()
        for (column, held), is_changed in zip(checked, found, strict=True):
            if is_changed:
                what, remedy = (
                    ("longer texts", "cut") if column.may_be_cut(held) else ("values with more digits", "round")
                )
                raise SinkError(
                    f"{self.where}: field '{column.name}' has {what} than its column holds, which is {held.type};"
                    f" {remedy} them, or change the column"
                )

    def _check_rows(self, source: str, rows: int) -> None:
        counted = self._client.execute(f"SELECT count(*) FROM {source} AS staged".encode()).fetchone()
        if counted is None or counted[0] != rows:
            raise self._plan.unstaged()
