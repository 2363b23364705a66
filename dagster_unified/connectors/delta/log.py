"""The log of a Delta table: which files each version added and removed, and how rows changed.

`deltalake` knows the files of a snapshot, and not what one version did, so entries are read here as Delta's protocol
describes them (https://github.com/delta-io/delta/blob/master/PROTOCOL.md, "Actions").
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from dagster_unified.storage.paths import children, read_whole

if TYPE_CHECKING:
    from upath import UPath

_ENTRY = re.compile(r"(\d{20})\.json")


class AddedFile(msgspec.Struct, frozen=True, rename="camel"):
    """A data file that an entry adds; `path` is percent-encoded, and below the table's folder unless it is a URL."""

    path: str
    size: int
    partition_values: dict[str, str | None] = {}
    data_change: bool = True
    stats: str | None = None
    deletion_vector: dict[str, Any] | None = None


class Statistics(msgspec.Struct, frozen=True, rename="camel"):
    """The smallest and the largest value of columns of a file, as far as its writer has counted them."""

    min_values: dict[str, object] = {}
    max_values: dict[str, object] = {}


class RemovedFile(msgspec.Struct, frozen=True, rename="camel"):
    """A data file that an entry removes; without a change of data it was compacted.

    A writer may leave out the values of its partition.
    """

    path: str
    partition_values: dict[str, str | None] | None = None
    data_change: bool = True
    deletion_vector: dict[str, Any] | None = None


class ChangeFile(msgspec.Struct, frozen=True, rename="camel"):
    """A file of the change data feed, which says each change of an entry that has one."""

    path: str
    partition_values: dict[str, str | None] = {}


class TableMetadata(msgspec.Struct, frozen=True, rename="camel"):
    """The table's columns, as Delta writes schemas, and its properties."""

    id: str
    schema_string: str
    configuration: dict[str, str | None] = {}


class TableProtocol(msgspec.Struct, frozen=True, rename="camel"):
    """What the table requires of its readers."""

    min_reader_version: int
    reader_features: list[str] | None = None


class CommitInfo(msgspec.Struct, frozen=True, rename="camel"):
    """Who committed, and how."""

    operation: str = "a write"
    operation_parameters: dict[str, Any] | None = None
    timestamp: int = 0
    in_commit_timestamp: int | None = None


class Transaction(msgspec.Struct, frozen=True, rename="camel"):
    """The version that an application has reached with an entry, such as the epoch of a stream."""

    app_id: str
    version: int


class _Action(msgspec.Struct, frozen=True, rename="camel"):
    """One line of an entry: one of these, or another that does not matter here."""

    add: AddedFile | None = None
    remove: RemovedFile | None = None
    cdc: ChangeFile | None = None
    meta_data: TableMetadata | None = None
    protocol: TableProtocol | None = None
    commit_info: CommitInfo | None = None
    txn: Transaction | None = None


class Version(NamedTuple):
    """The entry of one version, as far as a reader needs it."""

    number: int
    operation: str
    added: tuple[AddedFile, ...]
    """The files with rows that are new in the table; files that others were compacted into have none."""

    removed: tuple[RemovedFile, ...]
    """The files whose rows are in the table no more."""

    changes: tuple[ChangeFile, ...]
    """The files of the change data feed: all changes of the version, if it has any."""

    committed_at: int
    """Milliseconds since the epoch."""

    metadata: TableMetadata | None
    protocol: TableProtocol | None
    transactions: dict[str, int]
    """The versions that applications have reached, by their ids."""


def newest_version(table: UPath, known: int | None = None) -> int | None:
    """The number of the newest version; None where there is no table.

    Where a version is known, the next one is asked for first: mostly there is none, and a listing takes longer.
    """
    if known is not None and not _entry(table, known + 1).exists():
        return known
    return max(_versions(table), default=None)


def oldest_version(table: UPath) -> int | None:
    """The number of the oldest version whose entry is still in the log."""
    return min(_versions(table), default=None)


def version(table: UPath, number: int) -> Version | None:
    """The entry of a version; None where it is not in the log: it is not there yet, or was cleaned up."""
    try:
        text = read_whole(_entry(table, number))
    except FileNotFoundError:
        return None
    actions = [msgspec.json.decode(line, type=_Action) for line in text.splitlines() if line.strip()]
    info = next((action.commit_info for action in actions if action.commit_info is not None), CommitInfo())
    return Version(
        number,
        _described(info),
        tuple(action.add for action in actions if action.add is not None and action.add.data_change),
        tuple(action.remove for action in actions if action.remove is not None and action.remove.data_change),
        tuple(action.cdc for action in actions if action.cdc is not None),
        info.timestamp if info.in_commit_timestamp is None else info.in_commit_timestamp,
        next((action.meta_data for action in actions if action.meta_data is not None), None),
        next((action.protocol for action in actions if action.protocol is not None), None),
        {action.txn.app_id: action.txn.version for action in actions if action.txn is not None},
    )


def statistics(file: AddedFile) -> Statistics:
    """The statistics that an entry has of a file."""
    return msgspec.json.decode(file.stats, type=Statistics) if file.stats else Statistics()


def _described(info: CommitInfo) -> str:
    mode = (info.operation_parameters or {}).get("mode")
    return f"{info.operation}, {json.dumps(mode)}" if mode else info.operation


def _versions(table: UPath) -> list[int]:
    return [int(match[1]) for name in children(table / "_delta_log") if (match := _ENTRY.fullmatch(name))]


def _entry(table: UPath, number: int) -> UPath:
    return table / "_delta_log" / f"{number:020d}.json"
