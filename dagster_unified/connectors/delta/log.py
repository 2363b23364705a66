"""Appends entries to the log of a Delta table on a local file system, without listing it.

For a commit `deltalake` lists the whole log three times, which takes longer with each entry, and a stream writes one
with each epoch. Where nobody has written since the table was read, an entry that only adds files is in conflict with
nothing, so creating the next file, if it is not there, is the whole commit. That is the rule of Delta's protocol
(https://github.com/delta-io/delta/blob/master/PROTOCOL.md#delta-log-entries). `deltalake` makes all other commits.

Knows the log's files; not who writes, nor why.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self
from uuid import uuid4

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from deltalake.transaction import AddAction, Transaction

_PLAIN_WRITER = 2
"""The last version of the protocol whose tables ask no more of an entry than `deltalake` does for files that are there.
"""

_PLAIN_FEATURES = {"appendOnly", "invariants", "timestampNtz"}
"""What newer tables may name and ask no more either."""

_PLAIN_PATH = re.compile(r"[\w./-]+", re.ASCII)
"""Paths that the log has as they are; it encodes others."""

_CHECKPOINT_INTERVAL = 100
"""Entries for each checkpoint, where the table does not say."""


class LogEnd:
    """The last entry of a table's log, and what it and those before it say of transactions."""

    def __init__(self, table: DeltaTable, folder: Path) -> None:
        self._folder = folder
        self.version = table.version()
        """That of the last entry."""
        self._interval = int(table.metadata().configuration.get("delta.checkpointInterval") or _CHECKPOINT_INTERVAL)
        self._last = self._identity()
        self.transactions: dict[str, int] = {}
        """The versions of the application transactions that were appended since the table was read."""

    @classmethod
    def of(cls, table: DeltaTable, path: str) -> Self | None:
        """The end of the log of a table at a local path; None where entries have to say more than is known here."""
        protocol = table.protocol()
        plain = protocol.min_writer_version <= _PLAIN_WRITER or (
            protocol.writer_features is not None and _PLAIN_FEATURES.issuperset(protocol.writer_features)
        )
        if not plain or table.metadata().partition_columns:
            return None
        return cls(table, Path(path) / "_delta_log")

    def takes(self, adds: Sequence[AddAction]) -> bool:
        """Whether the next entry may add these files: one after which a checkpoint is due is left to `deltalake`."""
        return (self.version + 2) % self._interval != 0 and all(_PLAIN_PATH.fullmatch(add.path) for add in adds)

    def append(self, adds: Sequence[AddAction], transactions: Sequence[Transaction]) -> bool:
        """Add files and transactions; returns False, and adds nothing, where another has written meanwhile."""
        if self._last is None or self._identity() != self._last:  # the table was removed, or made anew
            return False
        actions = [_commit_info(), *map(_add, adds), *map(_transaction, transactions)]
        new = self._folder / f"_commit_{uuid4().hex}.json.tmp"
        try:
            new.write_text("\n".join(json.dumps(action, separators=(",", ":")) for action in actions))
            os.link(new, self._entry(self.version + 1))
        except FileExistsError:
            return False
        finally:
            new.unlink(missing_ok=True)
        self.version += 1
        self._last = self._identity()
        self.transactions.update({one.app_id: one.version for one in transactions})
        return True

    def _entry(self, version: int) -> Path:
        return self._folder / f"{version:020d}.json"

    def _identity(self) -> tuple[int, int] | None:
        """What tells the last entry from another of its name."""
        try:
            found = self._entry(self.version).stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns


def _commit_info() -> dict[str, object]:
    operation = {"operation": "WRITE", "operationParameters": {"mode": "Append", "partitionBy": "[]"}}
    return {"commitInfo": {"timestamp": int(time.time() * 1000), **operation, "engineInfo": "dagster-unified"}}


def _add(action: AddAction) -> dict[str, object]:
    return {
        "add": {
            "path": action.path,
            "partitionValues": {},
            "size": action.size,
            "modificationTime": action.modification_time,
            "dataChange": True,
            "stats": action.stats,
        }
    }


def _transaction(action: Transaction) -> dict[str, object]:
    return {"txn": {"appId": action.app_id, "version": action.version}}
