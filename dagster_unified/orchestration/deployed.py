"""The deployments that a call of `unified_definitions` is given, by pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from dagster import TimeWindowPartitionsDefinition

from dagster_unified.api.pipeline import Pipeline
from dagster_unified.errors import ConfigurationError, PipelineError
from dagster_unified.graph.connectors import Boundedness
from dagster_unified.graph.mode import boundedness
from dagster_unified.graph.nodes import Graph
from dagster_unified.graph.plan import Plan, plan
from dagster_unified.graph.targets import check_targets, written
from dagster_unified.orchestration.checks import Checks
from dagster_unified.orchestration.deployments import BatchDeployment, StreamingDeployment, configuration_of
from dagster_unified.orchestration.external_assets import Upstream, has_savepoints
from dagster_unified.orchestration.stream_partitions import partitions_of_stream

Value = TypeVar("Value")


@dataclass
class Deployed:
    """A pipeline, and its deployments."""

    pipeline: Pipeline
    batch: BatchDeployment | None = None
    streaming: StreamingDeployment | None = None

    @cached_property
    def graph(self) -> Graph:
        return self.pipeline.graph()

    @cached_property
    def plan(self) -> Plan:
        """The plan that the assets show."""
        if self.batch is not None:
            return self.batch.loaded()
        assert self.streaming is not None
        return plan(self.graph, configuration_of(self.streaming))

    @cached_property
    def stream_partitions(self) -> TimeWindowPartitionsDefinition | None:
        """The partitions by which the stream is materialized, if it is."""
        return None if self.streaming is None else partitions_of_stream(self.streaming, self.batch)

    @cached_property
    def has_savepoints(self) -> bool:
        """Whether it leaves savepoints, or one can be taken of it."""
        return has_savepoints(self.plan, self.batch, self.streaming)

    @property
    def checks(self) -> Checks | None:
        checks = self._only("checks", [d.checks for d in self._declared if d.checks is not None])
        if checks is not None and checks.rows_within is not None and self.batch is None:
            raise ConfigurationError(
                f"{self.pipeline.name}: rows_within compares the row counts of runs in BATCH, and this pipeline is"
                " deployed in STREAMING only; leave it out, or see with fresh_within whether rows still come"
            )
        return checks

    @property
    def upstream(self) -> Upstream:
        """The user's assets, by the names of the sources that read them."""
        return self._only("upstream", [d.upstream for d in self._declared if d.upstream]) or {}

    @property
    def _declared(self) -> list[BatchDeployment | StreamingDeployment]:
        return [deployment for deployment in (self.batch, self.streaming) if deployment is not None]

    def _only(self, argument: str, values: Sequence[Value]) -> Value | None:
        if len(values) > 1:
            raise ConfigurationError(
                f"{self.pipeline.name}: both its BatchDeployment and its StreamingDeployment give {argument}; they go"
                " for the assets of both, so give them in one place"
            )
        return values[0] if values else None


def by_pipeline(declared: Sequence[Pipeline | BatchDeployment | StreamingDeployment]) -> list[Deployed]:
    """Return the deployments of each pipeline. Raises where two of them contradict each other."""
    by_name: dict[str, Deployed] = {}
    for declaration in declared:
        if not isinstance(declaration, (Pipeline, BatchDeployment, StreamingDeployment)):
            raise ConfigurationError(
                f"unified_definitions takes pipelines and deployments of pipelines, each by itself, not {declaration!r}"
            )
        pipeline = declaration if isinstance(declaration, Pipeline) else declaration.pipeline
        deployed = by_name.setdefault(pipeline.name, Deployed(pipeline))
        if deployed.pipeline is not pipeline:
            raise PipelineError(
                f"two pipelines are named '{pipeline.name}'; a name is part of asset keys and storage paths"
            )
        if isinstance(declaration, Pipeline):
            continue
        kind = "batch" if isinstance(declaration, BatchDeployment) else "streaming"
        if getattr(deployed, kind) is not None:
            raise PipelineError(
                f"{pipeline.name} has two deployments of one kind: {type(declaration).__name__}; give one, or build a"
                " second pipeline with another name"
            )
        setattr(deployed, kind, declaration)
    for pipeline in (declaration for declaration in declared if isinstance(declaration, Pipeline)):
        deployed = by_name[pipeline.name]
        if boundedness(deployed.graph) is Boundedness.BOUNDED:
            deployed.batch = deployed.batch or BatchDeployment(pipeline)
        else:
            deployed.streaming = deployed.streaming or StreamingDeployment(pipeline)
    check_targets(target for deployed in by_name.values() for target in written(deployed.graph))
    return list(by_name.values())
