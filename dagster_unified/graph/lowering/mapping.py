"""What a map, a filter or a key is, in Spark's SQL. Where only Python knows, to evaluate it raises `LoweringError`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dagster_unified.errors import LoweringError
from dagster_unified.graph.lowering.deciding import Lowering, key_on_columns
from dagster_unified.graph.lowering.inlining import made_fields
from dagster_unified.graph.lowering.language import NONE, Expression, Field, kinds_of
from dagster_unified.graph.lowering.reading import read
from dagster_unified.graph.lowering.record_classes import record_of
from dagster_unified.graph.lowering.sifting import kept_rows
from dagster_unified.graph.lowering.source import UnreadableError
from dagster_unified.graph.lowering.sql import Sql, UnsaidError
from dagster_unified.graph.nodes.base import Node
from dagster_unified.graph.nodes.functions import FilterNode, MapNode
from dagster_unified.operators.layout import ComputedKey
from dagster_unified.records import RecordType, record_type


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
        kept = kept_rows(node.function, taken)
        return None if kept is None else MappedInSql(condition=f"coalesce({kept}, {unknown})")
    if not isinstance(node, MapNode) or node.records is None:
        return None
    return computed_in_sql(node.function, taken, node.records, "map", unknown)


def key_in_sql(key: ComputedKey, taken: RecordType, where: str) -> str | None:
    """Return what computes a key, of texts or integers; None where that cannot be said. An error says `where`."""
    if key_on_columns(key, taken) is None:
        return None
    found = computed_in_sql(key.function, taken, record_type(key.python), "get_key", only_python(where))
    return None if found is None or found.columns is None or found.condition is not None else found.columns[0]


def computed_in_sql(
    function: Any, taken: RecordType, made: RecordType, method: str, unknown: str
) -> MappedInSql | None:
    """Return what a function makes of a record, and `unknown` where only Python knows; None where that is not said."""
    sql = Sql(taken.names)
    try:
        result, known = sql.bind(read(function, method, record_in_sql(taken)))
        fields = [
            _result(sql, value, taken, made, number, unknown) for number, value in enumerate(made_fields(result, made))
        ]
    except (UnreadableError, UnsaidError, RecursionError):
        return None
    condition = f"CASE WHEN {' AND '.join(known)} THEN true ELSE {unknown} END" if known else None
    return MappedInSql(tuple(fields), condition)


def _result(sql: Sql, value: Expression, taken: RecordType, made: RecordType, number: int, unknown: str) -> str:
    if isinstance(value, Field) and taken.types[value.number] == made.types[number]:
        return sql.result(value, unknown)  # of any type
    text = sql.result(value, unknown)
    missing = bool(value.kinds & NONE) and not made.schema.field(number).nullable
    return f"coalesce({text}, {unknown})" if missing else text


def record_in_sql(taken: RecordType, first: int = 0) -> Expression:
    """Return a record of a type, whose fields have numbers from `first` on; raises `UnreadableError`."""
    return record_of(taken.python, taken.shape, taken.names, [kinds_of(info) for info in taken.types], first)


def only_python(where: str) -> str:
    """Return what stands where only Python knows a value: to evaluate it is an error, which says `where`."""
    message = f"{LoweringError.__module__}.LoweringError: {where}: a value can only be computed by its function"
    return f"raise_error(CAST(X'{message.encode().hex()}' AS STRING))"
