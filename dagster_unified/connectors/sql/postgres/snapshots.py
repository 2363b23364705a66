"""Keeps a snapshot of a database open while workers read it.

A snapshot that is exported lives as long as the transaction that exported it, which also keeps others from dropping or
truncating the tables that it has looked at. It ends with the read. Where nobody says when that is, whoever reads holds
a lock, so that the holder sees when nobody has read for a while.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec

from dagster_unified.connectors.reads import at_end_of_read
from dagster_unified.connectors.sql.postgres.connection import PostgresConnection, errors_of
from dagster_unified.connectors.sql.postgres.staging import lock_of

if TYPE_CHECKING:
    import psycopg

_LINGER_SECONDS = 600.0
"""How long a snapshot is kept that nobody reads: for a branch of a plan that begins late, or a task's next attempt."""

_LOOK_SECONDS = 5.0


class Snapshot(msgspec.Struct, frozen=True):
    """A snapshot, for workers."""

    name: str
    lock: int
    """The advisory lock that a reader holds."""


def export(connection: PostgresConnection, where: str) -> tuple[Snapshot, psycopg.Connection[tuple[Any, ...]]]:
    """Export a snapshot, kept by a thread until it is not used any more; and the connection that looks at it."""
    client = connection.connect(where)
    with errors_of(connection, where):
        client.execute("SET idle_in_transaction_session_timeout = 0; SET TIME ZONE 'UTC'")
        client.commit()
        client.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        row = client.execute("SELECT pg_export_snapshot()").fetchone()
    assert row is not None
    return Snapshot(row[0], lock_of(uuid4().hex[:14])), client


def keep(snapshot: Snapshot, client: psycopg.Connection[tuple[Any, ...]]) -> None:
    """Keep the snapshot until it has been read, nobody has read it for a while, or this process ends."""
    ended = threading.Event()
    holder = threading.Thread(target=_hold, args=(snapshot, client, ended), name="postgres-snapshot", daemon=True)
    holder.start()

    def release() -> None:
        ended.set()
        holder.join(_LOOK_SECONDS)

    at_end_of_read(release)


def _hold(snapshot: Snapshot, client: psycopg.Connection[tuple[Any, ...]], ended: threading.Event) -> None:
    used = time.monotonic()
    statement = (
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1"
        " AND (classid::int8 << 32) | objid::int8 = %s"
    )
    with suppress(Exception):  # the connection is gone, and the snapshot with it: readers say so
        while time.monotonic() - used < _LINGER_SECONDS and not ended.wait(_LOOK_SECONDS):
            row = client.execute(statement, (snapshot.lock,)).fetchone()
            if row is not None and row[0]:
                used = time.monotonic()
    with suppress(Exception):
        client.close()
