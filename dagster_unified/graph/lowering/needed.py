"""Which fields of the records of each stream somebody reads, where functions that are known are all that does.

Fields that nobody reads need not travel: not through an exchange, and not to a Python worker.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from dagster_unified.graph.lowering.deciding import Lowering, key_on_columns
from dagster_unified.graph.nodes import Edge, Port
from dagster_unified.graph.nodes.base import Node
from dagster_unified.graph.nodes.functions import AssignTimestampsNode
from dagster_unified.graph.nodes.keyed import WindowNode
from dagster_unified.graph.plan import Plan
from dagster_unified.operators.layout import ComputedKey
from dagster_unified.records import RecordType

Fields = frozenset[int]


class NeededFields:
    """The fields that are read of streams between some operators of a plan; of those that leave, all are."""

    def __init__(
        self,
        plan: Plan,
        nodes: Collection[int],
        leaving: Collection[Port],
        in_python: Callable[[int], bool],
        is_unseen: Callable[[Port], bool],
    ) -> None:
        """`in_python` tells whether an operator runs in a worker.

        `is_unseen` tells whether values of a stream may not be of their types, as nobody has looked at them.
        """
        self._plan, self._leaving = plan, frozenset(leaving)
        self._is_unseen = is_unseen
        self._readers: dict[Port, list[Edge]] = {}
        for edge in plan.graph.edges:
            self._readers.setdefault(edge.port, []).append(edge)
        self._inputs: dict[int, Fields] = {}
        for number in sorted(nodes, reverse=True):  # each after those that read what it emits
            node = plan.graph.node(number)
            if plan.graph.inputs(number) and in_python(number):
                self._inputs[number] = self._of_input(node)

    def of_input(self, node: int) -> Fields:
        """Return the fields that an operator, and what comes behind it, reads of its main input."""
        return self._inputs[node]

    def of_stream(self, port: Port) -> Fields:
        """Return the fields that are read of the stream of an operator, also by what comes behind its readers."""
        everything = _all(self._plan.layout(port).records)
        edges = self._readers.get(port)
        if port in self._leaving or not edges:
            return everything
        return frozenset[int]().union(*(self._of_edge(edge, everything) for edge in edges))

    def before_keys(self, port: Port) -> Fields:
        """Return the fields that a stream needs which nobody has looked at before its keys are computed."""
        return self.of_stream(port) | self.for_keys(port) | _unchecked(self._plan.layout(port).records)

    def for_keys(self, port: Port) -> Fields:
        """Return the fields that the functions of a stream's keys read of its records."""
        layout = self._plan.layout(port)
        return frozenset[int]().union(*(self._of_key(key, layout.records) for key in layout.keys))

    def _of_edge(self, edge: Edge, everything: Fields) -> Fields:
        main = edge.target in self._inputs and edge in self._plan.graph.main_inputs(edge.target)
        return self._inputs[edge.target] if main else everything

    def _of_input(self, node: Node) -> Fields:
        edges = self._plan.graph.main_inputs(node.id)
        records = self._plan.input_layout(node.id).records
        read = self._read(node, records)
        if read is None:
            return _all(records)
        keys = [edge.partitioning.key for edge in edges] + [node.key]
        names = [name for key in keys if key is not None for name in key.fields]
        read |= {records.names.index(name) for name in names}
        if any(self._is_unseen(edge.port) for edge in edges):
            read |= _unchecked(records)
        return read or frozenset([0])  # rows without any column have no number

    def _read(self, node: Node, records: RecordType) -> Fields | None:
        """Return the fields that a function, and what comes behind it, reads of its records; None where it may all."""
        if isinstance(node, AssignTimestampsNode):
            is_field = isinstance(node.assigner, str) and node.generator is None
            return self._behind(node) | {records.names.index(node.assigner)} if is_field else None
        lowering = self._plan.lowering(node)
        if lowering is None:
            return None
        if lowering.inlined is not None:
            behind = self._behind(node)
            going = (name for number, name in enumerate(lowering.inlined.fields) if number in behind)
            return frozenset(lowering.inlined.reads) | _fields(going)
        if lowering.fields is not None:
            waits = getattr(node.user_function, "requires_time_sorted_input", False)
            return None if waits else frozenset(lowering.fields)
        return self._folded(node, lowering, records)

    def _folded(self, node: Node, lowering: Lowering, records: RecordType) -> Fields | None:
        """Return the fields that an aggregate of windows reads, of which no element goes on whole."""
        if lowering.fold is None or not isinstance(node, WindowNode) or node.function.aggregate is None:
            return None
        is_copied = records.copier is not None and not self._plan.execution.object_reuse
        if is_copied or any(port.node == node.id and port.tag is not None for port in self._readers):
            return None
        inlined = lowering.fold.inlined
        held, size = len(inlined.fields), len(records.names)
        numbers = {*inlined.reads, *_fields(inlined.fields)}
        return frozenset(number - held for number in numbers if held <= number < held + size)

    def _behind(self, node: Node) -> Fields:
        """Return the fields that are read of what an operator without side outputs emits, and for its keys."""
        port = Port(node.id)
        return self.of_stream(port) | self.for_keys(port)

    def _of_key(self, key: ComputedKey, records: RecordType) -> Fields:
        known = key_on_columns(key, records)
        return _all(records) if known is None else frozenset(known.reads) | _fields(known.fields)


def _all(records: RecordType) -> Fields:
    return frozenset(range(len(records.names)))


def _unchecked(records: RecordType) -> Fields:
    """Return the fields of which only a worker can say whether their values are of their types."""
    return frozenset(number for number in _all(records) if not records.is_checked_by_columns(number))


def _fields(texts: Iterable[str]) -> Fields:
    """Return the fields that some texts are, each alone."""
    return frozenset(int(text[1:]) for text in texts if text.startswith("F"))
