"""What differs between two savepoints, operator by operator and key by key."""

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
"""How many keys are shown of each kind."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Changed:
    """A key whose state differs. `before` and `after` have the columns that do."""

    key: Row
    before: Row
    after: Row


@dataclass
class OperatorDiff:
    """What differs in the state of one operator: counts of keys, and the first of them.

    Or in the records that wait for it, or were handed on by it: these have no keys, and are in one savepoint only or in
    both, each as often as it is there.
    """

    uid: str
    name: str
    what: str = "keys"
    """What is counted."""

    only_a: int = 0
    only_b: int = 0
    changed: int = 0
    same: int = 0
    first_only_a: list[Row] = field(default_factory=list)
    first_only_b: list[Row] = field(default_factory=list)
    first_changed: list[Changed] = field(default_factory=list)


def diff(a: Savepoint, b: Savepoint, uids: Sequence[str] = (), examples: int = EXAMPLES) -> list[OperatorDiff]:
    """What differs between two savepoints in the state of some operators, by default of all.

    So do the records that wait for them in iterations, and that were handed on behind these. Timers are compared by
    their times. A key and sixteen bytes of each row of `a` are held in memory.
    """
    names = {operator.uid: operator.name for one in (b, a) for operator in one.operators}
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
        """The records."""
        if self.table is not None:
            for batch in read_batches(self.savepoint.path, self.table):
                yield from batch.to_pylist()


def _waiting(savepoint: Savepoint) -> dict[tuple[str, str], OperatorState]:
    """The tables of records, by the uid that they go by, and what they are."""
    found: dict[tuple[str, str], OperatorState] = {}
    for loop in savepoint.iterations:
        for one in loop.feedback:
            kind = f"{'replayed ' * one.replayed}{'broadcast ' * one.broadcast}records that wait"
            found[one.table.uid, kind] = one.table
    return found | {(table.uid, "records handed on"): table for table in savepoint.manifest.handed_on}


def _of_records(place: tuple[str, str], a: _Records, b: _Records, examples: int) -> OperatorDiff:
    name = next(one.table.name for one in (b, a) if one.table is not None)
    found = OperatorDiff(place[0], name, place[1])
    before = Counter(map(_digest, a.rows()))
    for row in b.rows():
        digest = _digest(row)
        if before[digest]:
            before[digest] -= 1
            found.same += 1
        else:
            found.only_b += 1
            _first(found.first_only_b, row, examples)
    found.only_a = before.total()
    for row in a.rows() if found.only_a else ():
        digest = _digest(row)
        if before[digest]:
            before[digest] -= 1
            _first(found.first_only_a, row, examples)
    return found


def _of_operator(a: Savepoint, b: Savepoint, uid: str, name: str, examples: int) -> OperatorDiff:
    there = [uid in {operator.uid for operator in one.operators} for one in (a, b)]
    if not any(there):
        a.operator(uid)  # raises
    key = (a if there[0] else b).operator(uid).key
    found = OperatorDiff(uid, name)
    before = {hashable(own): _digest(row) for own, row in _rows(a, uid, key)} if there[0] else {}
    changed: dict[Any, Row] = {}
    for own, row in _rows(b, uid, key) if there[1] else ():
        old = before.pop(hashable(own), None)
        if old is None:
            found.only_b += 1
            _first(found.first_only_b, own, examples)
        elif old == _digest(row):
            found.same += 1
        else:
            found.changed += 1
            if len(changed) < examples:
                changed[hashable(own)] = row
    found.only_a = len(before)
    if before or changed:
        for own, row in _rows(a, uid, key):
            place = hashable(own)
            if place in before:
                _first(found.first_only_a, own, examples)
            elif place in changed:
                after = changed.pop(place)
                columns = [n for n in {**row, **after} if _digest(row.get(n)) != _digest(after.get(n))]
                found.first_changed.append(Changed(own, _only(row, columns), _only(after, columns)))
    return found


def _first(keys: list[Row], key: Row, examples: int) -> None:
    if len(keys) < examples:
        keys.append(key)


def _only(row: Row, columns: Sequence[str]) -> Row:
    return {name: row[name] for name in columns if name in row}


def _rows(savepoint: Savepoint, uid: str, key: Sequence[str]) -> Iterator[tuple[Row, Row]]:
    """The key of each row, and what else is in it."""
    for row in savepoint.rows(uid):
        own = {name: row.pop(name, None) for name in key}
        times = timer_times(row)
        for name in (EVENT_TIMERS, PROCESSING_TIMERS):
            row.pop(name, None)
        row.update(times)
        yield own, row


_encode = msgspec.msgpack.Encoder().encode


def _digest(value: Any) -> bytes:
    return blake2b(_encode(_ordered(value)), digest_size=16).digest()


def _ordered(value: Any) -> Any:
    """A value in the one form of all that equal it, in which the entries of dicts are in an order of their own."""
    if isinstance(value, dict) and all(type(name) is str for name in value):
        return [(name, _ordered(value[name])) for name in sorted(value)]
    return one_form(value)
