"""The assets of a pipeline before Dagster knows them: what each stands for, and its key, group, kinds and description.

An author changes them by a `PipelineTranslator`. What depends on what is not said here; `catalog.py` works it out.
"""

from __future__ import annotations

from dataclasses import dataclass

from dagster import AssetKey, AssetSpec

from dagster_unified.graph.nodes import ReadingNode, SinkNode, SourceNode
from dagster_unified.graph.plan import Plan, Region
from dagster_unified.orchestration.metadata import columns_metadata, identity_metadata


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a pipeline that an asset stands for: one of the classes below."""

    plan: Plan

    @property
    def name(self) -> str:
        """The last word of its default key."""
        raise NotImplementedError

    @property
    def pipeline(self) -> str:
        """The pipeline's name."""
        return self.plan.name

    def describe(self) -> str:
        """What it is, for messages."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Stage(Part):
    """A stage in BATCH: its intermediate."""

    region: Region

    @property
    def name(self) -> str:
        return f"{self.region.name}_stage"

    def describe(self) -> str:
        return f"stage '{self.region.name}' of {self.pipeline}"


@dataclass(frozen=True, eq=False)
class Table(Part):
    """What a sink writes, in both modes: a table, a folder of files, a topic."""

    sink: SinkNode

    @property
    def name(self) -> str:
        return word(self.sink.name)

    def describe(self) -> str:
        return f"sink '{self.sink.name}' of {self.pipeline}"


@dataclass(frozen=True, eq=False)
class Input(Part):
    """What a source or a lookup reads, where no other asset is known to write it."""

    source: ReadingNode

    @property
    def name(self) -> str:
        return f"{word(self.source.reads)}_source"

    def describe(self) -> str:
        return f"source '{self.source.reads}' of {self.pipeline}"


@dataclass(frozen=True, eq=False)
class Malformed(Part):
    """The malformed rows that a source has set aside."""

    source: SourceNode

    @property
    def name(self) -> str:
        return f"{word(self.source.name)}_malformed"

    def describe(self) -> str:
        return f"malformed rows of '{self.source.name}' of {self.pipeline}"


@dataclass(frozen=True, eq=False)
class Savepoints(Part):
    """The savepoints that runs leave, or that are taken of a stream."""

    @property
    def name(self) -> str:
        return "savepoint"

    def describe(self) -> str:
        return f"savepoints of {self.pipeline}"


@dataclass(frozen=True, eq=False)
class Stream(Part):
    """A stream that starts from a savepoint, and writes the tables that BATCH writes as well."""

    @property
    def name(self) -> str:
        return "stream"

    def describe(self) -> str:
        return f"stream of {self.pipeline}"


class PipelineTranslator:
    """Gives the parts of pipelines their assets: key, group, kinds, tags, owners, description and metadata.

    Override `get_asset_spec`, as in the translators of Dagster's own integrations. What it returns holds for BATCH and
    STREAMING alike: the table that a sink writes is one asset, whichever mode writes it.
    """

    def get_asset_spec(self, part: Part) -> AssetSpec:
        """Return the asset of a part, without what it depends on, which the library adds.

        The key is `<pipeline>/<sink>` for the table of a sink that names no `asset`, `<pipeline>/<stage>_stage` for a
        stage, `<pipeline>/<source>_source` and `<pipeline>/<source>_malformed` for a source, `<pipeline>/savepoint` and
        `<pipeline>/stream`. The group is the pipeline's name.
        """
        plan = part.plan
        key, group = AssetKey([plan.name, part.name]), plan.name
        match part:
            case Table():
                return self._table(part, group)
            case Stage():
                return AssetSpec(
                    key,
                    group_name=group,
                    kinds=_stage_kinds(part),
                    description=_stage_description(part),
                )
            case Input():
                read = part.source.source
                return AssetSpec(
                    key,
                    group_name=group,
                    kinds={read.kind} - {""},
                    description=read.describe(),
                    metadata={"boundedness": read.boundedness.value, **columns_metadata(read.records)},
                )
            case Malformed():
                read = part.source.source
                return AssetSpec(
                    key,
                    group_name=group,
                    kinds={"parquet"},
                    description=f"Rows of source '{read.name}' ({read.describe()}) that do not fit"
                    f" {read.records.describe()}.",
                )
            case Savepoints():
                return AssetSpec(
                    key,
                    group_name=group,
                    kinds={"savepoint"},
                    description=f"The state of the keyed operators of {plan.name}, as runs leave it or as it is taken"
                    " of a stream.",
                )
        return AssetSpec(
            key,
            group_name=group,
            kinds={"spark", "streaming"},
            description=f"{plan.name} in STREAMING, which starts from a savepoint and writes the tables of BATCH.",
        )

    def _table(self, table: Table, group: str) -> AssetSpec:
        sink, records = table.sink.sink, table.plan.graph.written_to(table.sink.id)
        target = sink.target()
        identity = {} if target is None else identity_metadata(target.place, sink.kind)
        return AssetSpec(
            AssetKey(sink.asset or [table.pipeline, table.name]),
            group_name=group,
            kinds=({"table"} if identity else set()) | ({sink.kind} - {""}),
            description=f"{sink.describe()}, written by {table.pipeline} ({sink.capabilities.describe()}).",
            metadata={**columns_metadata(records), **identity},
        )


def _stage_kinds(stage: Stage) -> set[str]:
    """Return `spark`, what the stage reads, and whether it holds state."""
    nodes = stage.plan.nodes_of(stage.region)
    kinds = {"spark", "stage"} | {node.source.kind for node in nodes if isinstance(node, ReadingNode)}
    return (kinds | {"stateful"} if any(node.holds_state for node in nodes) else kinds) - {""}


def _stage_description(stage: Stage) -> str:
    """Return the stage's operators, and why it begins where it does."""
    plan, region = stage.plan, stage.region
    names = " → ".join(node.name for node in plan.nodes_of(region))
    barriers = "; ".join(dict.fromkeys(e.reason for e in plan.exchanges if e.blocking and e.target in region.tasks))
    begins = f" Begins at a barrier: {barriers}." if barriers else ""
    return f"{names}\n\nStage {region.id + 1} of {len(plan.regions)}.{begins}"


def word(name: str) -> str:
    """Return a name as a part of a key: letters, digits and underscores."""
    return "".join(c if c.isalnum() or c == "_" else "_" for c in name)
