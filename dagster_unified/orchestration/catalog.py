"""Which asset stands for which part of the pipelines that are deployed together, and what depends on what.

A table has one asset, whoever writes it and in whichever mode. A pipeline that reads what another one writes depends on
that table's asset: places are compared, and nobody has to say it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from dagster import AssetDep, AssetKey, AssetSpec

from dagster_unified.connectors.asset import AssetSource
from dagster_unified.engine.malformed import diverting
from dagster_unified.errors import ConfigurationError
from dagster_unified.graph.nodes import ReadingNode
from dagster_unified.graph.plan import Plan
from dagster_unified.orchestration.deployed import Deployed
from dagster_unified.orchestration.metadata import columns_metadata, identity_metadata
from dagster_unified.orchestration.translator import (
    Input,
    Malformed,
    Part,
    PipelineTranslator,
    Savepoints,
    Stage,
    Stream,
    Table,
)


class Catalog:
    """The assets of some pipelines. Raises `ConfigurationError` where two parts of them would be one asset."""

    def __init__(self, deployed: Sequence[Deployed], translator: PipelineTranslator) -> None:
        self._translator = translator
        self._deployed = {of_pipeline.plan.name: of_pipeline for of_pipeline in deployed}
        self._specs: dict[tuple[type[Part], str, str], AssetSpec] = {}
        self._writers: dict[AssetKey, list[Table]] = {}
        """The sinks that write a table; the first one's pipeline makes its asset."""

        self._reads: dict[tuple[str, int], list[AssetDep]] = {}
        """What sources and lookups read, by pipeline and node."""

        self._places: dict[str, AssetKey] = {}
        self._inputs: dict[AssetKey, str] = {}
        """The pipelines whose definitions have the asset of what sources read, where several read it."""

        for tables in self._by_place():
            self._unite(tables)
        self._check_keys()
        for of_pipeline in deployed:
            for node in of_pipeline.plan.graph.readers:
                self._inputs.setdefault(self.key(Input(of_pipeline.plan, node)), of_pipeline.plan.name)
        self._follows = self._without_circles()

    @property
    def deployed(self) -> list[Deployed]:
        """The pipelines."""
        return list(self._deployed.values())

    def spec(self, part: Part) -> AssetSpec:
        """Return the asset of a part, without what it depends on."""
        called = (type(part), part.pipeline, part.name)
        if called not in self._specs:
            self._specs[called] = self._translator.get_asset_spec(part)
        return self._specs[called]

    def key(self, part: Part) -> AssetKey:
        """Return the key of a part's asset."""
        return self.spec(part).key

    # Tables

    def tables(self, plan: Plan) -> dict[str, AssetKey]:
        """Return the assets of what a pipeline's sinks write, by the sinks' names."""
        return {node.name: self.key(Table(plan, node)) for node in plan.graph.sinks}

    def made_by(self, plan: Plan, sinks: Collection[int]) -> dict[int, AssetSpec]:
        """Return the assets of the tables that a pipeline makes, by the sink, with what they depend on.

        A table that several pipelines write depends on all of them, and is made by one.
        """
        specs = {node.id: self.spec(Table(plan, node)) for node in plan.graph.sinks if node.id in sinks}
        return {
            number: spec.replace_attributes(deps=self._deps_of_table(spec.key))
            for number, spec in specs.items()
            if self._writers[spec.key][0].pipeline == plan.name
        }

    def _deps_of_table(self, key: AssetKey) -> list[AssetDep]:
        deps: dict[AssetKey, AssetDep] = {}
        for writer in self._writers[key]:
            plan, deployed = writer.plan, self._deployed[writer.pipeline]
            if deployed.batch is not None:
                found = [AssetDep(self.key(Stage(plan, plan.region_of(writer.sink.id))))]
            else:
                before = plan.graph.upstream(writer.sink.id)
                found = self.read_by(plan, [node for node in plan.graph.readers if node.id in before])
            for dep in found:
                deps.setdefault(dep.asset_key, dep)
        return list(deps.values())

    # Sources

    def read_by(self, plan: Plan, readers: Iterable[ReadingNode]) -> list[AssetDep]:
        """Return the assets that some sources and lookups read, each once.

        Those that the author names as `upstream`; else the tables that other pipelines write to the same place; else
        assets that stand for what is read.
        """
        deps: dict[AssetKey, AssetDep] = {}
        for node in readers:
            for dep in self.reads(plan, node):
                deps.setdefault(dep.asset_key, dep)
        return list(deps.values())

    def reads(self, plan: Plan, node: ReadingNode) -> list[AssetDep]:
        """Return the assets that one of them reads."""
        known = self._reads.get((plan.name, node.id))
        if known is None:
            known = self._reads[plan.name, node.id] = self._found(plan, node)
        return known

    def _found(self, plan: Plan, node: ReadingNode) -> list[AssetDep]:
        upstream = self._deployed[plan.name].upstream
        if node.source.name in upstream:
            return [AssetDep.from_coercible(upstream[node.source.name])]
        if isinstance(node.source, AssetSource):
            return [AssetDep(AssetKey(node.source.asset))]
        places = node.source.places()
        tables = [key for place in places if (key := self._written_elsewhere(plan.name, place.uri)) is not None]
        deps = [AssetDep(key) for key in dict.fromkeys(tables)]
        if places and len(tables) == len(places):
            return deps
        key = self.key(Input(plan, node))
        if not node.source.reads_table:
            return [*deps, AssetDep(key)]
        # Without an asset of its own, so that Dagster finds the one that has the table's name, if there is any.
        identity = identity_metadata(places[0], node.source.kind) if places else {}
        return [*deps, AssetDep(key, metadata={**identity, **columns_metadata(node.source.records)})]

    def inputs(self, plan: Plan) -> list[AssetSpec]:
        """Return the external assets that stand for what a pipeline reads, and that nobody else is to define."""
        specs: dict[AssetKey, AssetSpec] = {}
        for node in plan.graph.readers:
            spec = self.spec(Input(plan, node))
            read = {dep.asset_key for dep in self.reads(plan, node)}
            if not node.source.reads_table and spec.key in read and self._inputs[spec.key] == plan.name:
                specs.setdefault(spec.key, spec)
        return list(specs.values())

    def unknown(self, plan: Plan, readers: Iterable[ReadingNode]) -> list[AssetKey]:
        """Return the assets among those that stand for something that nobody materializes."""
        standing_in = ((self.key(Input(plan, node)), node) for node in readers)
        return [key for key, node in standing_in if key in {dep.asset_key for dep in self.reads(plan, node)}]

    def _written_elsewhere(self, pipeline: str, place: str) -> AssetKey | None:
        key = self._places.get(place)
        writers = {table.pipeline for table in self._writers[key]} if key is not None else set()
        return key if writers and writers <= self._follows[pipeline] else None

    def _without_circles(self) -> dict[str, set[str]]:
        """Return the pipelines whose tables each pipeline reads, as far as these do not read its own, over any way."""
        reads: dict[str, set[str]] = defaultdict(set)
        for name, deployed in self._deployed.items():
            for node in deployed.plan.graph.readers:
                if node.source.name not in deployed.upstream:
                    keys = (self._places.get(place.uri) for place in node.source.places())
                    reads[name] |= {table.pipeline for key in keys if key is not None for table in self._writers[key]}
        return {name: {other for other in reads[name] if name not in _reached(reads, other)} for name in self._deployed}

    # One asset, one part

    def _by_place(self) -> list[list[Table]]:
        """Return all tables; those that several sinks write together."""
        by_place: dict[object, list[Table]] = defaultdict(list)
        for deployed in self._deployed.values():
            for node in deployed.plan.graph.sinks:
                target = node.sink.target()
                by_place[target.place.uri if target is not None else node].append(Table(deployed.plan, node))
        return list(by_place.values())

    def _unite(self, tables: Sequence[Table]) -> None:
        """Give the sinks that write one table one asset: the one that an author names, or that of a BATCH pipeline."""
        chosen = sorted(tables, key=lambda t: (not t.sink.sink.asset, self._deployed[t.pipeline].batch is None))
        named = {table.sink.sink.asset: table for table in chosen if table.sink.sink.asset}
        if len(named) > 1:
            (first, one), (second, other) = list(named.items())[:2]
            raise ConfigurationError(
                f"{one.describe()} and {other.describe()} write one table, and name two assets for it,"
                f" {'/'.join(first)} and {'/'.join(second)}; name one"
            )
        spec = self.spec(chosen[0])
        for table in chosen[1:]:
            self._specs[(Table, table.pipeline, table.name)] = spec
        makers = sorted(tables, key=lambda table: self._deployed[table.pipeline].batch is None)
        known = self._writers.setdefault(spec.key, makers)
        if known is not makers:
            raise _both(known[0], makers[0], spec.key)
        target = chosen[0].sink.sink.target()
        if target is not None:
            self._places[target.place.uri] = spec.key

    def _check_keys(self) -> None:
        owners: dict[AssetKey, Part] = {key: tables[0] for key, tables in self._writers.items()}
        for deployed in self._deployed.values():
            plan = deployed.plan
            parts: list[Part] = [Input(plan, node) for node in plan.graph.readers]
            parts += [Malformed(plan, node) for node in diverting(plan)]
            parts.append(Savepoints(plan))  # any run may leave one
            parts += [Stream(plan)] if deployed.batch is not None and deployed.streaming is not None else []
            parts += [Stage(plan, region) for region in plan.regions if deployed.batch is not None]
            for part in parts:
                other = owners.setdefault(self.key(part), part)
                if other is not part and not _read_alike(other, part):
                    raise _both(other, part, self.key(part))


def _read_alike(one: Part, other: Part) -> bool:
    """Return whether two parts are sources of one pipeline with one name, or sources that read the same."""
    if not isinstance(one, Input) or not isinstance(other, Input):
        return False
    named_alike = (one.pipeline, one.source.reads) == (other.pipeline, other.source.reads)
    places = one.source.source.places()
    return named_alike or (bool(places) and places == other.source.source.places())


def _both(one: Part, other: Part, key: AssetKey) -> ConfigurationError:
    return ConfigurationError(
        f"{one.describe()} and {other.describe()} would both be the asset {key.to_user_string()}; give one of them"
        " another name, or another key by asset= or a translator"
    )


def _reached(reads: dict[str, set[str]], start: str) -> set[str]:
    """Return the pipelines that one reads from, over any way, and itself."""
    reached, pending = {start}, [start]
    while pending:
        more = reads.get(pending.pop(), set()) - reached
        reached |= more
        pending += more
    return reached
