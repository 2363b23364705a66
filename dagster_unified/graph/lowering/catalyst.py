"""Which operators of a plan Catalyst runs in place of Python workers, since Spark's SQL can say what they do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dagster_unified.graph.lowering.aggregating import ReducedInSql, reduced_in_sql, windowed_in_sql
from dagster_unified.graph.lowering.mapping import MappedInSql, key_in_sql, mapped_in_sql
from dagster_unified.graph.nodes import Port
from dagster_unified.graph.nodes.keyed import ReduceNode, WindowNode
from dagster_unified.graph.plan import Plan

InSql = MappedInSql | ReducedInSql

_MOST = 24
"""The expressions of a chain, by `_expressions`. The JVM does not compile what Spark makes of many more."""


class OperatorsInSql:
    """Operators of a plan, of those that run together, that Catalyst runs in place of Python workers.

    These are whole chains of maps and filters, and reduces and windows that head a chain. An assigner that reads a
    field runs in Catalyst where all of its chain does.
    """

    def __init__(self, plan: Plan, nodes: Iterable[int], chain_of: Callable[[int], Sequence[int]]) -> None:
        """`chain_of` gives the operators that would run in one pass, behind the one that heads them."""
        self._plan = plan
        self._keys: dict[Port, tuple[str, ...] | None] = {}
        self.operators: dict[int, InSql] = {}
        behind = set[int]()
        for number in sorted(nodes):
            if number in behind or not plan.graph.nodes[number].needs_worker:
                continue
            chain = chain_of(number)
            said = self._said(chain)
            if len(said) < len(chain) or sum(map(_expressions, said.values())) > _MOST:
                said = {number: found} if isinstance(found := said.get(number), ReducedInSql) else {}
                behind |= {number} if said else set(chain)
            else:
                behind |= set(chain)
            self.operators |= {number: found for number, found in said.items() if found is not None}

    def keys(self, port: Port) -> tuple[str, ...] | None:
        """Return what computes the keys of a stream, of rows in its columns; None where only a worker can."""
        if port not in self._keys:
            layout, node = self._plan.layout(port), self._plan.graph.nodes[port.node]
            where = f"{self._plan.name}: key_by behind '{node.name}'"
            found = [key_in_sql(key, layout.records, where) for key in layout.keys]
            texts = tuple(text for text in found if text is not None)
            self._keys[port] = texts if len(texts) == len(found) else None
        return self._keys[port]

    def _said(self, chain: Sequence[int]) -> dict[int, InSql | None]:
        """Return what each operator of a chain is that Catalyst can run, None for an assigner, which is as it is."""
        plan, found = self._plan, dict[int, InSql | None]()
        if chain[0] in plan.subtasks or any(self._may_not_fit(edge.port) for edge in plan.graph.inputs(chain[0])):
            return found
        for number in chain:
            node, layout = plan.graph.nodes[number], plan.input_layout(number)
            where = f"{plan.name}: operator '{node.name}'"
            said: InSql | None = None
            if type(node) is ReduceNode:
                said = reduced_in_sql(node, plan.lowering(node), layout, where)
            elif type(node) is WindowNode:
                said = windowed_in_sql(node, plan.lowering(node), layout, where)
            else:
                said = mapped_in_sql(node, plan.lowering(node), layout.records, where)
            if (said is not None or not node.needs_worker) and self.keys(Port(number)) is not None:
                found[number] = said
        return found

    def _may_not_fit(self, port: Port) -> bool:
        """Return whether a stream has fields of which only a worker can say if their values are of their types."""
        records = self._plan.layout(port).records
        is_seen = self._plan.graph.nodes[port.node].needs_worker or self.keys(port) is None
        return not is_seen and not all(records.is_checked_by_columns(number) for number in range(len(records.names)))


def _expressions(said: InSql | None) -> int:
    """Return how many expressions an operator is; what is computed is also asked about, if it is known."""
    if not isinstance(said, MappedInSql):
        return 0
    if said.columns is None:
        return 1
    return 2 * sum(not (text.startswith("`") and text.count("`") == 2) for text in said.columns)
