"""What other assets return in memory, as inputs of a stage's step, for the `AssetSource`s that it reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from dagster import AssetExecutionContext, AssetIn, AssetKey

from dagster_unified.connectors.asset import AssetSource, values_of
from dagster_unified.errors import ConfigurationError, MalformedInputError, PipelineError
from dagster_unified.graph.connectors import WHOLE
from dagster_unified.graph.nodes import ReadingNode
from dagster_unified.graph.plan import Plan
from dagster_unified.orchestration._dagster_compat import has_partitions


@dataclass(frozen=True)
class AssetValues:
    """The inputs of a step that `AssetSource`s read."""

    pipeline: str
    nodes: Sequence[ReadingNode]

    @classmethod
    def read_by(cls, plan: Plan, readers: Iterable[ReadingNode]) -> AssetValues:
        """Return those of some sources and lookups."""
        return cls(plan.name, [node for node in readers if isinstance(node.source, AssetSource)])

    @cached_property
    def sources(self) -> Mapping[str, AssetSource[Any]]:
        """The sources, by name."""
        return {node.reads: node.source for node in self.nodes if isinstance(node.source, AssetSource)}

    def check(self, reads: Mapping[str, Sequence[AssetKey]]) -> None:
        """Raise `ConfigurationError` where `upstream` names another asset than the source does."""
        for name, source in self.sources.items():
            if list(reads[name]) != [AssetKey(source.asset)]:
                raise ConfigurationError(
                    f"{self.pipeline}: source '{name}' reads {source.describe()}, and upstream names another asset for"
                    " it; name the asset in the source, and leave it out of upstream, or say there only how partitions"
                    " belong together"
                )

    def inputs(self) -> dict[str, AssetIn]:
        """Return the inputs of the step; sources of one asset share one."""
        return {_input(source): AssetIn(AssetKey(source.asset)) for source in self.sources.values()}

    def by_partition(
        self, context: AssetExecutionContext, given: Mapping[str, object], partitions: Sequence[str]
    ) -> Mapping[str, Mapping[str, Sequence[object]]]:
        """Return, by partition of the run, the values that each source reads; of a run without partitions by `WHOLE`.

        Raises `PipelineError` where nothing says which records of an asset belong to a partition.
        """
        found: dict[str, dict[str, Sequence[object]]] = {key: {} for key in partitions or [WHOLE]}
        for name, source in self.sources.items():
            says = source.partition_columns or source.in_every_partition
            if partitions and not says and not has_partitions(context, _input(source)):
                raise PipelineError(
                    f"{self.pipeline}: source '{name}' ({source.describe()}): the asset has no partitions, and does not"
                    " say which of its records belong to one; name the field that says it, with"
                    " .partitioned_by(field), or give all of it to each partition, with .for_every_partition()"
                )
            for key, values in values_of(given[_input(source)], list(found), source).items():
                found[key][name] = values
        return found


def reading(plan: Plan, values: Mapping[str, Sequence[object]]) -> Plan:
    """Return the plan whose sources read these values; raises `MalformedInputError` for one that does not fit."""
    try:
        nodes = [
            replace(node, source=node.source.reading(values[node.reads]))
            if isinstance(node, ReadingNode) and isinstance(node.source, AssetSource) and node.reads in values
            else node
            for node in plan.graph.nodes
        ]
    except MalformedInputError as error:
        raise MalformedInputError(f"{plan.name}: {error}") from error
    return replace(plan, graph=replace(plan.graph, nodes=tuple(nodes)))


def _input(source: AssetSource[Any]) -> str:
    """The name of an input, which Dagster wants to be a word."""
    return AssetKey(source.asset).to_python_identifier()
