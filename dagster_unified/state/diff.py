"""The differences between two savepoints, operator by operator and key by key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import msgspec

from dagster_unified.operators.keys import one_form
from dagster_unified.operators.state.table import EVENT_TIMERS, PROCESSING_TIMERS
from dagster_unified.state.manifest import OperatorState
from dagster_unified.state.savepoint import Savepoint
from dagster_unified.state.state_table import hashable, timer_times
from dagster_unified.state.tables import read_batches

EXAMPLES = 10
"""Keys shown of each kind."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Changed:
    """A key whose state differs. `before` and `after` have the columns that differ."""

    key: Row
    before: Row
    after: Row


@dataclass
class OperatorDiff:
    """The differences in the state of one operator: counts of keys, and the first keys.

    Or in the records that wait for it, or that it handed on: these have no keys, and count once for each time that they
    are in one savepoint only, or in both.
    """

    uid: str
    name: str
    what: str = "keys"
    """The things that are counted."""

    only_a: int = 0
    only_b: int = 0
    changed: int = 0
    same: int = 0
    first_only_a: list[Row] = field(default_factory=list)
    first_only_b: list[Row] = field(default_factory=list)
    first_changed: list[Changed] = field(default_factory=list)


def diff(a: Savepoint, b: Savepoint, uids: Sequence[str] = (), examples: int = EXAMPLES) -> list[OperatorDiff]:
    """The differences between two savepoints in the state of some operators, by default of all.

    Includes the records that wait for these operators in iterations, and those handed on. Timers are compared by their
    times. Holds a key and sixteen bytes for each row of `a` in memory.
    """
    names = {operator.uid: operator.name for savepoint in (b, a) for operator in savepoint.operators}
    before, after = _waiting(a), _waiting(b)
    waiting = [place for place in {**before, **after} if not uids or place[0] in uids]
    known = [uid for uid in uids or names if uid in names or not any(uid == place[0] for place in waiting)]
    return [
        *(_of_operator(a, b, uid, names.get(uid, uid), examples) for uid in known),
        *(
            _of_records(place, _Records(a, before.get(place)), _Records(b, after.get(place)), examples)
            for place in waiting
        ),
    ]


@dataclass(frozen=True)
class _Records:
    """A table of records in a savepoint, if it has it."""

    savepoint: Savepoint
    table: OperatorState | None

    def rows(self) -> Iterator[Row]:
        if self.table is not None:
            for batch in read_batches(self.savepoint.path, self.table):
                yield from batch.to_pylist()


def _waiting(savepoint: Savepoint) -> dict[tuple[str, str], OperatorState]:
    """The tables of records, by uid and kind."""
    tables: dict[tuple[str, str], OperatorState] = {}
    for loop in savepoint.iterations:
        for records in loop.feedback:
            kind = f"{'replayed ' * records.replayed}{'broadcast ' * records.broadcast}records that wait"
            tables[records.table.uid, kind] = records.table
    return tables | {(table.uid, "records handed on"): table for table in savepoint.manifest.handed_on}


def _of_records(place: tuple[str, str], a: _Records, b: _Records, examples: int) -> OperatorDiff:
    name = next(records.table.name for records in (b, a) if records.table is not None)
    result = OperatorDiff(place[0], name, place[1])
    before = Counter(map(_digest, a.rows()))
    for row in b.rows():
        digest = _digest(row)
        if before[digest]:
            before[digest] -= 1
            result.same += 1
        else:
            result.only_b += 1
            _first(result.first_only_b, row, examples)
    result.only_a = before.total()
    for row in a.rows() if result.only_a else ():
        digest = _digest(row)
        if before[digest]:
            before[digest] -= 1
            _first(result.first_only_a, row, examples)
    return result


def _of_operator(a: Savepoint, b: Savepoint, uid: str, name: str, examples: int) -> OperatorDiff:
    has_operator = [uid in {operator.uid for operator in savepoint.operators} for savepoint in (a, b)]
    if not any(has_operator):
        a.operator(uid)  # raises
    key = (a if has_operator[0] else b).operator(uid).key
    result = OperatorDiff(uid, name)
    before = (
        {hashable(key_row): _digest(row) for key_row, row in _columns_by_key(a, uid, key)} if has_operator[0] else {}
    )
    changed: dict[Any, Row] = {}
    for key_row, row in _columns_by_key(b, uid, key) if has_operator[1] else ():
        old = before.pop(hashable(key_row), None)
        if old is None:
            result.only_b += 1
            _first(result.first_only_b, key_row, examples)
        elif old == _digest(row):
            result.same += 1
        else:
            result.changed += 1
            if len(changed) < examples:
                changed[hashable(key_row)] = row
    result.only_a = len(before)
    if before or changed:
        for key_row, row in _columns_by_key(a, uid, key):
            place = hashable(key_row)
            if place in before:
                _first(result.first_only_a, key_row, examples)
            elif place in changed:
                after = changed.pop(place)
                columns = [n for n in {**row, **after} if _digest(row.get(n)) != _digest(after.get(n))]
                result.first_changed.append(Changed(key_row, _only(row, columns), _only(after, columns)))
    return result


def _first(keys: list[Row], key: Row, examples: int) -> None:
    if len(keys) < examples:
        keys.append(key)


def _only(row: Row, columns: Sequence[str]) -> Row:
    return {name: row[name] for name in columns if name in row}


def _columns_by_key(savepoint: Savepoint, uid: str, key: Sequence[str]) -> Iterator[tuple[Row, Row]]:
    for row in savepoint.rows(uid):
        key_row = {name: row.pop(name, None) for name in key}
        times = timer_times(row)
        for name in (EVENT_TIMERS, PROCESSING_TIMERS):
            row.pop(name, None)
        row.update(times)
        yield key_row, row


_encode = msgspec.msgpack.Encoder().encode


def _digest(value: Any) -> bytes:
    return blake2b(_encode(_ordered(value)), digest_size=16).digest()


def _ordered(value: Any) -> Any:
    """A value in one form for all values that equal it; entries of dicts are sorted."""
    if isinstance(value, dict) and all(type(name) is str for name in value):
        return [(name, _ordered(value[name])) for name in sorted(value)]
    return one_form(value)
