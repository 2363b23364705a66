"""Which operators of a plan run as what their functions do, and why others do not."""

from __future__ import annotations

from dataclasses import dataclass

from dagster_unified.graph.lowering.fields_read import fields_read
from dagster_unified.graph.lowering.inlining import inlined_filter, inlined_flat_map, inlined_map
from dagster_unified.graph.lowering.reducing import aggregated, built_in, reduced
from dagster_unified.graph.lowering.source import UnreadableError
from dagster_unified.graph.mode import Execution
from dagster_unified.graph.nodes.base import Node
from dagster_unified.graph.nodes.functions import FilterNode, FlatMapNode, MapNode
from dagster_unified.graph.nodes.keyed import KeyedProcessNode, ReduceNode, WindowNode
from dagster_unified.operators.by_field import Fold
from dagster_unified.operators.layout import ComputedKey
from dagster_unified.operators.program.inlined import Inlined
from dagster_unified.operators.windows.contents import Windowing
from dagster_unified.records import RecordType, record_type


@dataclass(frozen=True)
class Lowering:
    """How the function of an operator runs."""

    inlined: Inlined | None = None
    """What takes its place in a chain on columns."""

    fold: Fold | None = None
    """What a function that combines records does to each field, so that runs of records are folded in columns."""

    fields: tuple[int, ...] | None = None
    """The fields that it reads of records that it is given, where these are not all."""

    reads: tuple[str, ...] = ()
    """The names of the fields that it reads, or of those that it folds records into."""

    why_not: str = ""
    """Why it is called for each record."""

    def describe(self, in_catalyst: bool) -> str:
        """Say it, for `explain`."""
        if self.fold is not None:
            fields = [f"{name} {way}" for name, way in zip(self.reads, list[str](self.fold.ways), strict=True)]
            return f"combined by field{' in Catalyst' if in_catalyst else ''}: {', '.join(fields)}"
        if self.fields is not None:
            return f"called for each record, of which it reads {', '.join(self.reads) or 'no field'}"
        if self.inlined is None:
            return f"called for each record: {self.why_not}"
        return f"{'in Catalyst' if in_catalyst else 'inlined'}, reads {', '.join(self.reads) or 'no field'}"


def lowering_of(node: Node, taken: RecordType, execution: Execution) -> Lowering:
    """Return how the function of a map, a filter, a flat_map, a reduce or a window runs on records of a type."""
    if not execution.lowers:
        return Lowering(why_not="execution.lowering is OFF")
    if node.in_python:
        return Lowering(why_not="in_python() says so")
    try:
        if isinstance(node, WindowNode):
            return _windowed(node.function, taken)
        if isinstance(node, KeyedProcessNode):
            fields = fields_read(node.function, "process_element", taken)
            if len(fields) == len(taken.names):
                return Lowering(why_not="it reads all fields")
            return Lowering(fields=fields, reads=tuple(taken.names[number] for number in fields))
        if isinstance(node, ReduceNode):
            fold = reduced(node.function, taken) if node.rolling is None else built_in(*node.rolling, taken)
            return Lowering(fold=fold, reads=taken.names)
        inlined = _inlined(node, taken)
    except UnreadableError as error:
        return Lowering(why_not=str(error))
    except RecursionError:
        return Lowering(why_not="it is too long")
    return Lowering(inlined, reads=tuple(taken.names[number] for number in inlined.reads))


def key_on_columns(key: ComputedKey, taken: RecordType) -> Inlined | None:
    """Return what computes a key on columns, where that is known; it is a text or an integer, and not None."""
    if key.python not in (str, int):  # others have several columns, or are equal in several forms
        return None
    try:
        return inlined_map(key.function, taken, record_type(key.python), "get_key")
    except (UnreadableError, RecursionError):
        return None


def _windowed(spec: Windowing, taken: RecordType) -> Lowering:
    if not spec.takes_runs:
        raise UnreadableError("its windows take elements one by one")
    if spec.aggregate is None:
        fold = reduced(spec.reduce, taken) if spec.built_in is None else built_in(*spec.built_in, taken)
        return Lowering(fold=fold, reads=taken.names)
    fold = aggregated(spec.aggregate, spec.accumulator_type, taken)
    return Lowering(fold=fold, reads=record_type(spec.accumulator_type).names)


def _inlined(node: Node, taken: RecordType) -> Inlined:
    if isinstance(node, FilterNode):
        return inlined_filter(node.function, taken)
    if not isinstance(node, (MapNode, FlatMapNode)):
        raise UnreadableError(f"a {node.kind} is not read")
    assert node.records is not None
    return (inlined_map if isinstance(node, MapNode) else inlined_flat_map)(node.function, taken, node.records)
