"""Commands about what savepoints hold: `state ls`, `state show` and `state diff`. They start no Spark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from dagster_unified.cli.terminal import Json, out, say, table, write

if TYPE_CHECKING:
    from dagster_unified.state import Operator, Savepoint
    from dagster_unified.state.diff import OperatorDiff
    from dagster_unified.state.manifest import Feedback

state = App(name="state", help="Look into savepoints: list what they hold, show keys, compare two.")

Folder = Annotated[str, Parameter(help="A savepoint's folder, also one of a streaming deployment.")]


@state.command
def ls(path: Folder, /, *, json: Json = False) -> int:
    """List the operators that have state in a savepoint, and what was read of its sources."""
    from dagster_unified.state import Savepoint

    savepoint = Savepoint.read(path)
    manifest = savepoint.manifest
    if json:
        _print_json(_described(savepoint))
        return 0
    by = manifest.reason or f"{savepoint.mode} run {manifest.run}".strip()
    partition = f", after partition {manifest.partition}" if manifest.partition else ""
    say(
        f"{savepoint.pipeline}: taken {savepoint.taken:%Y-%m-%d %H:%M:%S} UTC ({by}{partition}), by version"
        f" {manifest.library}"
    )
    operators = [_operator(savepoint, operator) for operator in savepoint.operators]
    out().print(table(("operator", "name", "rows", "bytes", "key", "states", "watermark"), operators))
    if savepoint.iterations:
        iterations = [
            (
                loop.uid,
                loop.name,
                "none yet" if loop.bounded else f"{loop.round:,}",
                "\n".join(map(_waiting, loop.feedback)),
            )
            for loop in savepoint.iterations
        ]
        out().print(table(("iteration", "name", "last epoch", "records that wait"), iterations))
    if manifest.handed_on:
        unread = [(stream.name, stream.uid, f"{stream.rows:,}") for stream in manifest.handed_on]
        out().print(table(("handed on by", "stream", "records not read"), unread))
    sources = [(uid, position.describe()) for uid, position in savepoint.positions.items()]
    out().print(table(("source", "what was read"), sources))
    return 0


def _operator(savepoint: Savepoint, operator: Operator) -> Sequence[str]:
    states = "\n".join(f"{column.state}: {_short_type(column.type)}" for column in operator.states)
    watermark = savepoint.watermarks.get(operator.uid)
    reached = "" if watermark is None else _moment(watermark)
    rows, size, key = f"{operator.rows:,}", f"{operator.bytes:,}", ", ".join(operator.key)
    return (operator.uid, operator.name, rows, size, key, states, reached)


@state.command
def show(
    path: Folder,
    uid: str,
    /,
    *,
    key: Annotated[list[str], Parameter(name="--key", negative="")] = [],
    rows: int = 20,
    json: Json = False,
) -> int:
    """Show the state of one operator, key by key: its states, its timers, the elements that are held back.

    With --json it prints one line for each key.

    Parameters
    ----------
    uid
        The operator.
    key
        Only the state of this key, all of it; once for each column of the key.
    rows
        How many keys are shown.
    """
    from dagster_unified.errors import StateError
    from dagster_unified.state import Savepoint

    savepoint = Savepoint.read(path)
    operator = savepoint.operator(uid)
    if key and len(key) != len(operator.key):
        columns = ", ".join(operator.key)
        raise StateError(f"'{uid}' is keyed by {columns}: give --key once for each of them, not {len(key)} times")
    shown = list(islice(_matching(savepoint, operator, key), 1 if key else rows))
    if key and not shown:
        raise StateError(f"'{uid}' has no state of key {', '.join(key)} in {savepoint.path}")
    if json:
        for row in shown:
            _print_json(row, indent=0)
        return 0
    readable = [_readable(operator, row) for row in shown]
    if key:
        say(*(f"{name} = {value}" for name, value in readable[0].items()))
        return 0
    names = list(dict.fromkeys([*operator.key, *(name for row in readable for name in row)]))
    out().print(table(names, ([_shortened(row.get(name, "")) for name in names] for row in readable)))
    say(f"{len(shown):,} of {operator.rows:,} rows")
    return 0


@state.command
def diff(path_a: Folder, path_b: Folder, /, *, uid: str | None = None, rows: int = 10, json: Json = False) -> int:
    """Compare two savepoints: which keys, and records that wait, are in one of them only, and whose state differs.

    The exit code is 1 where they differ.

    Parameters
    ----------
    uid
        Only the state of this operator.
    rows
        How many keys of each kind are shown for each operator.
    """
    from dagster_unified.state import Savepoint
    from dagster_unified.state.diff import diff as compare

    a, b = Savepoint.read(path_a), Savepoint.read(path_b)
    differences = compare(a, b, [] if uid is None else [uid], rows)
    if json:
        _print_json(differences)
    else:
        for operator in differences:
            _print_diff(operator)
    return int(any(operator.only_a or operator.only_b or operator.changed for operator in differences))


def _print_diff(operator: OperatorDiff) -> None:
    say(
        f"{operator.uid}: {operator.same:,} {operator.what} are the same, {operator.changed:,} changed,"
        f" {operator.only_a:,} only in A, {operator.only_b:,} only in B"
    )
    say(*(f"- {_key(key)}" for key in operator.first_only_a))
    say(*(f"+ {_key(key)}" for key in operator.first_only_b))
    for changed in operator.first_changed:
        for name in dict.fromkeys([*changed.before, *changed.after]):
            before, after = (
                _value(name, row[name]) if name in row else "none" for row in (changed.before, changed.after)
            )
            say(f"~ {_key(changed.key)}: {_heading(name)}: {_shortened(before)} -> {_shortened(after)}")


def _key(key: dict[str, Any]) -> str:
    if all(value is None for value in key.values()):
        return "broadcast state"
    return ", ".join(f"{name}={_text(value)}" for name, value in key.items())


# Rows


def _matching(savepoint: Savepoint, operator: Operator, key: Sequence[str]) -> Iterator[dict[str, Any]]:
    for row in savepoint.rows(operator.uid):
        if not key or [_text(row.get(name)) for name in operator.key] == list(key):
            yield row


def _readable(operator: Operator, row: dict[str, Any]) -> dict[str, str]:
    """Return a row as text, the key first and timers as times."""
    names = [*operator.key, *(name for name in row if name not in operator.key)]
    return {_heading(name): _value(name, row[name]) for name in names if name in row}


_HEADINGS = {
    "__event_timers": "event timers",
    "__processing_timers": "processing timers",
    "__held_back": "held back",
}


def _heading(name: str) -> str:
    return _HEADINGS.get(name, name)


def _value(name: str, value: Any) -> str:
    if name in ("__event_timers", "__processing_timers"):
        times = (timer["timestamp"] if isinstance(timer, dict) else timer for timer in value)
        return ", ".join(map(_moment, times))
    if name == "__held_back":
        return ", ".join(f"{_moment(element['timestamp'])}: {_text(element['record'])}" for element in value)
    return _text(value)


def _text(value: Any) -> str:
    """Return a value as a person writes it, which is also how `--key` takes it."""
    if isinstance(value, datetime):
        return value.isoformat(sep=" ")
    if isinstance(value, dict) and list(value) == [f"_{place}" for place in range(1, len(value) + 1)]:
        value = tuple(value.values())  # as a savepoint has one
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_text(k)}: {_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_text, value)) + ")"
    return str(value)


def _shortened(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


def _moment(milliseconds: int) -> str:
    """Return a time as text; one that no calendar has, such as the end of time, as its number."""
    from dagster_unified.operators.time import to_datetime

    try:
        return to_datetime(milliseconds).isoformat(sep=" ", timespec="milliseconds")[:-6]
    except OverflowError:
        return str(milliseconds)


def _short_type(kind: str) -> str:
    return _shortened(kind.replace(" not null", ""), 60)


# JSON


def _described(savepoint: Savepoint) -> dict[str, Any]:
    operators = [
        {
            "uid": operator.uid,
            "name": operator.name,
            "rows": operator.rows,
            "bytes": operator.bytes,
            "key": operator.key,
            "states": [
                {"name": column.state, "column": column.name, "type": column.type} for column in operator.states
            ],
            "watermark": savepoint.watermarks.get(operator.uid),
        }
        for operator in savepoint.operators
    ]
    return {
        "path": savepoint.path,
        "pipeline": savepoint.pipeline,
        "mode": savepoint.mode,
        "taken": savepoint.taken,
        "run": savepoint.manifest.run,
        "partition": savepoint.manifest.partition,
        "reason": savepoint.manifest.reason,
        "library": savepoint.manifest.library,
        "epochs": savepoint.epochs,
        "operators": operators,
        "iterations": [
            {
                "uid": loop.uid,
                "name": loop.name,
                "bounded": loop.bounded,
                "round": loop.round,
                "feedback": [
                    {
                        "operator": feedback.table.uid,
                        "broadcast": feedback.broadcast,
                        "replayed": feedback.replayed,
                        "rows": feedback.table.rows,
                    }
                    for feedback in loop.feedback
                ],
            }
            for loop in savepoint.iterations
        ],
        "handed_on": [
            {"stream": stream.uid, "operator": stream.name, "rows": stream.rows}
            for stream in savepoint.manifest.handed_on
        ],
        "sources": {uid: position.describe() for uid, position in savepoint.positions.items()},
    }


def _waiting(feedback: Feedback) -> str:
    how = " by broadcast" * feedback.broadcast + ", in every epoch" * feedback.replayed
    return f"{feedback.table.rows:,} to {feedback.table.uid}{how}"


def _print_json(value: Any, indent: int = 2) -> None:
    import msgspec

    text = msgspec.json.encode(_keyed_by_text(value), enc_hook=str)
    write((msgspec.json.format(text, indent=indent) if indent else text).decode())


def _keyed_by_text(value: Any) -> Any:
    """Return the value in terms of JSON: keys of objects are texts, bytes a text as Python writes it."""
    import msgspec

    if isinstance(value, dict):
        return {k if isinstance(k, str) else _text(k): _keyed_by_text(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_keyed_by_text(v) for v in value]
    if isinstance(value, bytes):
        return repr(value)
    return _keyed_by_text(msgspec.structs.asdict(value)) if isinstance(value, msgspec.Struct) else value
