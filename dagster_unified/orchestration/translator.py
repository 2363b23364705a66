"""How a stage becomes an asset. Override a method of `StageTranslator` to change keys, groups, tags or metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dagster import AssetKey

from dagster_unified.graph.nodes import ReadingNode, SinkNode, SourceNode
from dagster_unified.graph.plan import Plan, Region


class StageTranslator:
    """Gives a stage's asset its key, group, tags, kinds, description and metadata."""

    def get_asset_key(self, plan: Plan, region: Region) -> AssetKey:
        """`<pipeline>/<stage>`."""
        return AssetKey([plan.name, region.name])

    def get_source_key(self, plan: Plan, source: ReadingNode) -> AssetKey:
        """Return the external asset that stands for a source, or for the table of a lookup."""
        return AssetKey([plan.name, "sources", _word(source.reads)])

    def get_malformed_key(self, plan: Plan, source: SourceNode) -> AssetKey:
        """Return the asset that stands for the malformed rows which a source has set aside."""
        return AssetKey([plan.name, "malformed", _word(source.name)])

    def get_sink_key(self, plan: Plan, sink: SinkNode) -> AssetKey:
        """Return the asset that stands for a sink which STREAMING alone writes."""
        return AssetKey([plan.name, _word(sink.name)])

    def get_stage_sink_key(self, plan: Plan, sink: SinkNode) -> AssetKey:
        """Return the asset of a sink of a BATCH stage that writes several: `<pipeline>/sinks/<sink>`."""
        return AssetKey([plan.name, "sinks", _word(sink.name)])

    def get_savepoint_key(self, plan: Plan) -> AssetKey:
        """Return the asset that stands for the pipeline's savepoints: `<pipeline>/savepoint`."""
        return AssetKey([plan.name, "savepoint"])

    def get_stream_key(self, plan: Plan) -> AssetKey:
        """The asset that stands for a stream which starts from a savepoint and writes to the sinks of BATCH stages."""
        return AssetKey([plan.name, "stream"])

    def get_group_name(self, plan: Plan, region: Region) -> str:
        """Return the pipeline's name."""
        return plan.name

    def get_tags(self, plan: Plan, region: Region) -> Mapping[str, str]:
        """No tags."""
        return {}

    def get_kinds(self, plan: Plan, region: Region) -> set[str]:
        """`spark`, and what the stage writes or reads."""
        kinds = {"spark"}
        kinds |= {n.sink.kind for n in plan.graph.sinks if n.id in region.sinks and n.sink.kind}
        kinds |= {n.source.kind for n in plan.graph.readers if n.id in region.nodes and n.source.kind}
        if any(node.holds_state for node in plan.nodes_of(region)):
            kinds.add("stateful")
        return kinds

    def get_description(self, plan: Plan, region: Region) -> str:
        """Return the stage's operators, and why it begins where it does."""
        names = " → ".join(node.name for node in plan.nodes_of(region))
        barriers = "; ".join(dict.fromkeys(e.reason for e in plan.exchanges if e.blocking and e.target in region.tasks))
        return f"{names}\n\nStage {region.id + 1} of {len(plan.regions)}." + (
            f" Begins at a barrier: {barriers}." if barriers else ""
        )

    def get_metadata(self, plan: Plan, region: Region) -> Mapping[str, Any]:
        """No further metadata."""
        return {}


def _word(name: str) -> str:
    return "".join(c if c.isalnum() or c == "_" else "_" for c in name)
