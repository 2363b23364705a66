"""Python passes: connected Python operators, which one `mapInArrow` runs.

Knows the plan, programs and Spark's DataFrame API. Lazy: nothing runs here.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dagster_unified.connectors.base import spark_schema
from dagster_unified.engine.dataframe.fragment import Fragment
from dagster_unified.engine.dataframe.observations import observed
from dagster_unified.engine.dataframe.partitions import PartitionAxis
from dagster_unified.engine.shipping import Shipments
from dagster_unified.engine.worker import shipped
from dagster_unified.graph.nodes import ExchangeKind
from dagster_unified.graph.plan import Plan, Port
from dagster_unified.operators.layout import METRICS, OUTPUT, SUBTASK, StreamLayout, combined_schema, output_column
from dagster_unified.operators.metrics import Metrics, merge
from dagster_unified.operators.program.spec import Output, Program

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Observation


@dataclass(frozen=True)
class Pass:
    """One Python pass: the operators in it, and the streams that leave it."""

    members: tuple[int, ...]
    outputs: tuple[Port, ...]

    def stream(self, combined: DataFrame, port: Port, layout: StreamLayout, pass_through: Sequence[str]) -> DataFrame:
        """One of its streams, out of its combined DataFrame."""
        if len(self.outputs) == 1:
            return combined
        number = self.outputs.index(port)
        column = output_column(number)
        names = [f"{column}.{name}" for name in layout.schema.names]
        return combined.where(f"{OUTPUT} = {number}").select(*names, *pass_through)


def find_passes(plan: Plan, fragment: Fragment) -> list[Pass]:
    """The Python passes of a fragment: Python operators of one task that follow each other one-to-one.

    An assigner that reads a field joins a pass, but does not begin one.
    """
    graph = plan.graph
    task_of = {o: t.id for t in plan.tasks for o in t.operators}
    groups: list[list[int]] = []
    for node_id in fragment.nodes:
        node, edges = graph.node(node_id), graph.inputs(node_id)
        before = None
        forwarded = len(edges) == 1 and edges[0].partitioning.kind is ExchangeKind.FORWARD
        if forwarded and task_of[edges[0].source] == task_of[node_id]:
            before = next((group for group in groups if edges[0].source in group), None)
        if before is not None and node.step is not None:
            before.append(node_id)
        elif node.needs_worker:
            groups.append([node_id])
    return [Pass(tuple(group), _leaving(plan, fragment, group)) for group in groups]


def _leaving(plan: Plan, fragment: Fragment, group: list[int]) -> tuple[Port, ...]:
    found = [Port.of(e) for e in plan.graph.edges if e.source in group and e.target not in group]
    return (*dict.fromkeys(found), *[p for p in fragment.carried if p.node in group])


def is_computed_again(plan: Plan, fragment: Fragment, one: Pass) -> bool:
    """Whether a pass would run once for each of several readers.

    Not so where all its streams leave the fragment, since what leaves is computed together.
    """
    carried = [p for p in fragment.carried if p.node in one.members]
    edges = [e for e in plan.graph.edges if e.source in one.members and e.target not in one.members]
    if len(carried) + len(edges) < 2:
        return False
    written = {Port.of(e) for s in fragment.sinks for e in plan.graph.inputs(s)}
    return not set(one.outputs) <= {*fragment.outputs, *fragment.carried, *written}


def keys_program(plan: Plan, stage: str, layout: StreamLayout) -> Program:
    """A program of no operators, which adds the keys that functions compute."""
    bare = StreamLayout(layout.records, layout.timestamped)
    return Program(plan.name, stage, bare, (), (Output(-1, layout),))


def mapped(frame: DataFrame, program: Program, shipments: Shipments, place: Hashable, axis: PartitionAxis) -> DataFrame:
    """Rows through a program: its streams combined, and its reports in rows of their own."""
    from pyspark.sql import functions as F

    if program.in_subtasks:
        frame = frame.withColumn(SUBTASK, F.spark_partition_id())
    schema = axis.schema(combined_schema(tuple(o.layout for o in program.outputs)))
    return frame.mapInArrow(shipments.once(place, lambda: shipped(program)), spark_schema(schema))


def without_reports(frame: DataFrame) -> DataFrame:
    """A pass's streams without its reports."""
    from pyspark.sql import functions as F

    return frame.where(F.col(METRICS).isNull()).drop(METRICS)


@dataclass
class Reports:
    """The reports of a job's passes, which Spark observes while the job runs."""

    axis: PartitionAxis = field(default_factory=PartitionAxis)
    _observations: list[Observation] = field(default_factory=list)

    def taken_from(self, frame: DataFrame) -> DataFrame:
        """A pass's streams; its reports are observed and dropped."""
        from pyspark.sql import functions as F

        report = F.struct(self.axis.index.alias("partition"), F.col(METRICS).alias("report"))
        return without_reports(self.observe(frame, F.collect_list(F.when(F.col(METRICS).isNotNull(), report))))

    def observe(self, frame: DataFrame, reports: Column) -> DataFrame:
        """Rows that yield these reports, an array of structs (partition, report), when they are computed."""
        from pyspark.sql import Observation

        observation = Observation()
        self._observations.append(observation)
        return frame.observe(observation, reports.alias("reports"))

    def metrics(self) -> list[Metrics]:
        """The totals of each partition; call it after the job has run."""
        reports = [r for o in self._observations for r in observed(o).get("reports") or []]
        return [merge(r["report"] for r in reports if r["partition"] == index) for index in range(self.axis.count)]
