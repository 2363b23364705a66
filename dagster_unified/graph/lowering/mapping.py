"""What a map, a filter or a key is, in Spark's SQL. Where only Python knows, to evaluate it raises `LoweringError`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dagster_unified.errors import LoweringError
from dagster_unified.graph.lowering.deciding import Lowering, key_on_columns
from dagster_unified.graph.lowering.inlining import made_fields
from dagster_unified.graph.lowering.language import NONE
from dagster_unified.graph.lowering.reading import read
from dagster_unified.graph.lowering.record_classes import record_of
from dagster_unified.graph.lowering.sifting import kept_rows
from dagster_unified.graph.lowering.source import UnreadableError
from dagster_unified.graph.lowering.sql import Sql, UnsaidError
from dagster_unified.graph.nodes.base import Node
from dagster_unified.graph.nodes.functions import FilterNode, MapNode
from dagster_unified.operators.functions.base import Function
from dagster_unified.operators.layout import ComputedKey
from dagster_unified.records import RecordType


@dataclass(frozen=True)
class MappedInSql:
    """What a map or a filter makes of a row."""

    columns: tuple[str, ...] | None = None
    """The fields of the result; None where a row stays as it is."""

    condition: str | None = None
    """Whether a row goes on."""


def mapped_in_sql(node: Node, lowering: Lowering | None, taken: RecordType, where: str) -> MappedInSql | None:
    """Return what a map or a filter makes of a row; None where that cannot be said. An error says `where`."""
    if lowering is None or lowering.inlined is None:
        return None
    unknown = only_python(where)
    if isinstance(node, FilterNode):
        kept = None if is_closed(node.function) else kept_rows(node.function, taken)
        return None if kept is None else MappedInSql(condition=f"coalesce({kept}, {unknown})")
    if not isinstance(node, MapNode) or node.records is None or is_closed(node.function):
        return None
    return computed_in_sql(node.function, taken, node.records, "map", unknown)


def key_in_sql(key: ComputedKey, taken: RecordType, where: str) -> str | None:
    """Return what computes a key, of texts or integers; None where that cannot be said. An error says `where`."""
    if key_on_columns(key, taken) is None:
        return None
    sql = Sql(taken.names)
    try:
        value, known = sql.bind(read(key.function, "get_key", record_of(taken)))
        return None if known else f"coalesce({sql.result(value)}, {only_python(where)})"
    except (UnreadableError, UnsaidError, RecursionError):
        return None


def is_closed(function: Any) -> bool:
    """Return whether a function is told that its operator ends."""
    return isinstance(function, Function) and type(function).close is not Function.close


def computed_in_sql(
    function: Any, taken: RecordType, made: RecordType, method: str, unknown: str
) -> MappedInSql | None:
    """Return what a function makes of a record; None where that is not said.

    The condition is `unknown` for a row of which only Python knows what comes of it, whether that is read or not.
    """
    sql = Sql(taken.names)
    try:
        result, known = sql.bind(read(function, method, record_of(taken)))
        values = made_fields(result, made)
        for number, value in enumerate(values):
            known.append(sql.is_known(value))
            if value.kinds & NONE and not made.schema.field(number).nullable:
                known.append(f"(({sql.result(value)}) IS NOT NULL)")
        return MappedInSql(tuple(map(sql.result, values)), all_known(known, unknown))
    except (UnreadableError, UnsaidError, RecursionError):
        return None


def all_known(known: Iterable[str], unknown: str) -> str | None:
    """Return a condition that is true where these all are, and `unknown` elsewhere; None where it is always true."""
    asked = [condition for condition in dict.fromkeys(known) if condition != "true"]
    return f"CASE WHEN {' AND '.join(asked)} THEN true ELSE {unknown} END" if asked else None


def only_python(where: str) -> str:
    """Return what stands where only Python knows a value: to evaluate it is an error, which says `where`."""
    message = f"{LoweringError.__module__}.LoweringError: {where}: a value can only be computed by its function"
    return f"raise_error(CAST(X'{message.encode().hex()}' AS STRING))"
