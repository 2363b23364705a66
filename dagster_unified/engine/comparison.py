"""Compares tables row by row: two that should be equal, and two that a stream's old and new code are writing.

Knows tables of Arrow; not who wrote them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from typing import Any

import msgspec
import pyarrow as pa

from dagster_unified.connectors.protocol.commits import Rewritten


@dataclass(frozen=True)
class Difference:
    """A row that only one of the tables has, or that differs, by its key.

    `batch` is the row as BATCH has it, `table` as the sink's table has it; None where there is none.
    """

    key: str
    batch: str | None
    table: str | None


@dataclass(frozen=True)
class Comparison:
    """How two tables compare: rows of each, differing rows in all, and the first of those."""

    batch_rows: int
    table_rows: int
    different: int
    first: tuple[Difference, ...]


class Unequal(msgspec.Struct, frozen=True):
    """A row that the new code writes and the old code does not, or the other way round; None where there is none."""

    key: str
    new: str | None
    old: str | None


class Compared(msgspec.Struct, frozen=True):
    """How what new code has written compares with what the old code wrote meanwhile.

    A row is `undecided` where the old code changed it after the point that the new code has reached.
    """

    rows: int
    """The rows that the new code has written."""

    different: int = 0
    undecided: int = 0
    first: tuple[Unequal, ...] = ()
    """The first rows that differ."""

    columns: tuple[str, ...] = ()
    """The columns that only one of them writes; rows are compared without these."""

    not_compared: str = ""
    """Why the table could not be compared; empty where it was."""

    @property
    def is_equal(self) -> bool:
        """Whether no row differs, and not all of them are undecided."""
        return not self.different and (not self.rows or self.undecided < self.rows)

    def describe(self) -> str:
        """Say how the rows compared."""
        if self.not_compared:
            return f"not compared ({self.not_compared})"
        undecided = f", {self.undecided} undecided" if self.undecided else ""
        columns = f", without the columns {', '.join(self.columns)}" if self.columns else ""
        first = self.first[0] if self.first else None
        row = f"; the first: new {first.new or 'none'}, old {first.old or 'none'}" if first is not None else ""
        return f"{self.rows} rows, {self.different} different{undecided}{columns}{row}"


def compare(batch: pa.Table, table: pa.Table, key: Sequence[str] = (), limit: int = 10) -> Comparison:
    """Compare row by row: by `key` where there is one, else as bags of rows."""
    names = sorted(batch.column_names)
    ours, theirs = _rows(batch, names, key), _rows(table.select(names), names, key)
    different = [
        Difference(k, ours.get(k), theirs.get(k)) for k in sorted({*ours, *theirs}) if ours.get(k) != theirs.get(k)
    ]
    return Comparison(batch.num_rows, table.num_rows, len(different), tuple(different[:limit]))


def _rows(table: pa.Table, names: Sequence[str], key: Sequence[str]) -> dict[str, str]:
    """Return rows as text by their key; without a key by themselves, and by their number among equal ones."""
    named = sorted((_text(row, names), _text(row, key)) for row in table.to_pylist())
    rows: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for text, name in named:
        name = name if key else text
        seen[name] += 1
        rows[name if seen[name] == 1 else f"{name} #{seen[name]}"] = text
    return rows


def compare_new_code(
    new: pa.Table, old: Rewritten, later: Sequence[Rewritten], key: Sequence[str] = (), limit: int = 10
) -> Compared:
    """Compare what new code has written with what the old code had when it had read as much, and a little later.

    The old code may take one more epoch to write what follows from a watermark. So what it had is to be among what the
    new code wrote, and what the new code wrote is to be among what the old code has later. By `key` where there is one,
    a row is to be as the old code had it then or has it later.
    """
    names = [name for name in new.column_names if name in old.added.column_names]
    columns = tuple(sorted({*new.column_names} ^ {*old.added.column_names}))
    unequal, undecided = _by_key(new, old, later, names, key) if key else (_by_row(new, old, later[-1], names), 0)
    return Compared(new.num_rows, len(unequal), undecided, tuple(unequal[:limit]), columns)


def _by_row(new: pa.Table, old: Rewritten, later: Rewritten, names: Sequence[str]) -> list[Unequal]:
    """Return the rows that one of them has more often than the other."""
    ours = _texts(new, names)
    had, has = (_texts(each.added, names) - _texts(each.removed, names) for each in (old, later))
    lacking = [Unequal(row, None, row) for row in sorted((had - ours).elements())]
    return lacking + [Unequal(row, row, None) for row in sorted((ours - has).elements())]


def _by_key(
    new: pa.Table, old: Rewritten, later: Sequence[Rewritten], names: Sequence[str], key: Sequence[str]
) -> tuple[list[Unequal], int]:
    """Return the keys whose rows differ, and how many rows the old code has changed since."""
    ours, removed = _rows(new, names, key), _rows(old.removed, names, key)
    has = [_rows(each.added, names, key) for each in (old, *later)]
    had = {name for name, row in has[0].items() if removed.get(name) != row}
    unequal, undecided = [], 0
    for name in sorted({*ours, *had}):
        seen = {row for rows in has if (row := rows.get(name)) is not None}
        if ours.get(name) in seen:
            continue
        if len(seen) > 1:
            undecided += 1
        else:
            unequal.append(Unequal(name, ours.get(name), next(iter(seen), None)))
    return unequal, undecided


def _texts(table: pa.Table, names: Sequence[str]) -> Counter[str]:
    return Counter(_text(row, names) for row in table.select(names).to_pylist())


def _text(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return some columns of a row as people write them."""
    values = ((name, row[name]) for name in names)
    return ", ".join(f"{n}={v.isoformat() if isinstance(v, date | time) else repr(v)}" for n, v in values)
