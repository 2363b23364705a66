"""The query of everything but native aggregates: packed rows in lanes, through levels of keyed operators.

Knows Spark's DataFrame API, the line of stages and the job's time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from dagster_unified.connectors.protocol.frame import MALFORMED, PART, spark_schema
from dagster_unified.connectors.protocol.positions import ALL
from dagster_unified.connectors.protocol.source import Ending, SparkSource
from dagster_unified.connectors.protocol.splits import SplitSource
from dagster_unified.engine import malformed
from dagster_unified.engine.dataframe.frames import spark_source
from dagster_unified.engine.dataframe.native import Natives
from dagster_unified.engine.dataframe.passes import observed
from dagster_unified.engine.events import EpochCommitted, ignore_events
from dagster_unified.engine.failures import naming_operator
from dagster_unified.engine.iterations.files import text_of
from dagster_unified.engine.job_time import JobTime
from dagster_unified.engine.malformed import Diverted
from dagster_unified.engine.state_tables.savepoints import StartingState
from dagster_unified.engine.streaming import worker
from dagster_unified.engine.streaming.checkpoint import INITIAL
from dagster_unified.engine.streaming.control import ControlFile, event_of
from dagster_unified.engine.streaming.cross_query import QueryInputPosition, QueryOutputs, QueryOutputsInEpoch
from dagster_unified.engine.streaming.epoch import EpochRunner, EpochWriter, Outcome
from dagster_unified.engine.streaming.iterations import (
    FOLDER,
    Host,
    IterationsInEpoch,
    StreamIterations,
)
from dagster_unified.engine.streaming.processor import KeyGroupProcessor
from dagster_unified.engine.streaming.query import Deployment, Query
from dagster_unified.engine.streaming.sources import Alignment, LookupTables, Splits
from dagster_unified.errors import UnsupportedError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.nodes import Port
from dagster_unified.graph.plan import Plan
from dagster_unified.graph.topology import Exchanged, Head, Native, Topology
from dagster_unified.operators.drivers.key_groups import ControlEvent
from dagster_unified.operators.drivers.stages import Report, merge_reports
from dagster_unified.operators.metrics import merge
from dagster_unified.operators.routing import PACKED, REPORT, BatchOrder, Route, RoutedProgram, sequence
from dagster_unified.operators.time import wall_clock
from dagster_unified.spark_internals.placing import PLACED, SPREAD, spread
from dagster_unified.spark_internals.spark_log import offsets_of_sources
from dagster_unified.storage.paths import for_spark, is_local, load

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, GroupedData, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from upath import UPath

MALFORMED_ROW = pa.schema([("file", pa.string()), ("row", pa.string()), ("reason", pa.string())])


@dataclass
class KeyGroupFrames:
    """The line of stages of one query."""

    plan: Plan
    topology: Topology
    spark: SparkSession
    folder: UPath
    control: ControlFile
    tasks: int
    """Over how many tasks the key groups are spread."""

    tables: LookupTables

    log: str
    """Spark's log of the query's offsets, as workers read it."""

    malformed: Mapping[str, int] = field(default_factory=dict)
    """The lane of each source's malformed rows, by the source's uid."""

    start: StartingState | None = None
    """The state from which the query starts, until it has committed its first epoch."""

    alignment: Alignment | None = None

    endings: dict[int, Ending] = field(default_factory=dict)
    """What says how much has been read of the sources that come to an end, once the frame is built."""

    def build(self) -> DataFrame:
        """Every row of the query's output, packed, with its reports."""
        groups = self.plan.execution.streaming.max_parallelism
        packed = spark_schema(PACKED)
        frames = [self._head(head, groups) for head in self.topology.heads]
        if self.topology.awaits_events:
            frames.append(self._control(groups))
        frame = frames[0]
        for other in frames[1:]:
            frame = frame.unionByName(other)
        for stage in self.topology.between[0]:
            frame = self._through(frame, stage, groups)
        for level, programs, between in zip(
            self.topology.levels, self.topology.passes, self.topology.between[1:], strict=True
        ):
            processor = KeyGroupProcessor(worker.shipped(level, self.log))
            initial = self._initial(level, groups)
            placed = spread(frame, level, groups, self.tasks).groupBy(*PLACED)
            frame = placed.transformWithState(processor, packed, "Append", "None", initial)
            if programs:
                frame = frame.mapInArrow(worker.between(programs, groups, self.log), packed)
            for stage in between:
                frame = self._through(frame, stage, groups)
        return frame

    def _initial(self, level: Mapping[int, RoutedProgram], groups: int) -> GroupedData | None:
        """The pages that a level's key groups start from; None where it starts without state.

        They are made here, before anything runs: what is wrong with the savepoint is an error of the start.
        """
        from pyspark.sql import functions as F

        if self.start is None:
            return None
        initial: DataFrame | None = None
        for lane, routed in level.items():
            pages = self.start.pages(routed.program.steps[0].uid, groups)
            if pages is not None:
                page, data = F.col("page").cast("int").alias("number"), F.col("state").alias("data")
                of_lane = pages.select(F.lit(lane).alias("lane"), F.col("group").cast("int").alias("group"), page, data)
                initial = of_lane if initial is None else initial.unionByName(of_lane)
        if initial is None:
            return None
        folder = self.folder / INITIAL / str(min(level))
        codec = "uncompressed" if is_local(self.folder) else "lz4_raw"  # it is read once
        initial.write.mode("overwrite").option("compression", codec).parquet(for_spark(folder))
        pages_at_start = load(self.spark.read.format("parquet").schema(initial.schema), [folder])
        return spread(pages_at_start, level, groups, self.tasks).groupBy(*PLACED)

    def _through(self, frame: DataFrame, stage: Native | Exchanged, groups: int) -> DataFrame:
        """What runs between two levels beside their pass."""
        if isinstance(stage, Native):
            return self._natively(frame, stage, groups)
        exchanged = spread(frame, stage.programs, stage.subtasks, self.tasks).repartition(*PLACED).drop(SPREAD)
        return exchanged.mapInArrow(worker.in_subtasks(stage.programs, groups, self.log), spark_schema(PACKED))

    def _natively(self, frame: DataFrame, native: Native, groups: int) -> DataFrame:
        """Native operators on the rows of one lane, which become columns for them; all other rows pass through."""
        from pyspark.sql import functions as F

        schema = worker.with_pass_through(self.plan.input_layout(native.nodes[0]).schema)
        wide = frame.mapInArrow(worker.spread(native.lane, schema), spark_schema(schema))
        natives = Natives(self.plan.name, self.plan.graph.node(native.nodes[0]).name, self.spark, self.tables)
        others = F.col(worker.LANE) != native.lane
        for number in native.nodes:
            node = self.plan.graph.node(number)
            with naming_operator(self.plan.name, node):
                wide = natives.run(node, wide, worker.PASS_THROUGH, others)
        return wide.mapInArrow(worker.gather(native.lane, native.routed, groups, self.log), spark_schema(PACKED))

    def _head(self, head: Head, groups: int) -> DataFrame:
        node = self.plan.graph.node(head.source)
        assert isinstance(node, g.SourceNode)
        source = spark_source(self.plan.name, node)
        folder = self.folder / "sources" / node.uid
        watermarks = self.alignment.file(node.id) if self.alignment is not None else None
        if watermarks is not None:
            assert isinstance(source, SplitSource)
            source = source.going_by(watermarks)
        frame, route = source.read_stream(self.spark, folder), None
        ending = source.ending(folder) if self._may_end_early(source) else None
        if ending is not None:
            self.endings[node.id] = ending
        parts = [name for name in (PART,) if name in frame.columns]
        if head.native:
            frame = self._natively_from(node, head, frame, parts)
        elif MALFORMED not in frame.columns:
            frame = frame.select(*head.routed.program.input.schema.names, *parts)
        elif source.keeps_malformed():
            route = Route(self.malformed[node.uid], MALFORMED_ROW, tuple(MALFORMED_ROW.names))
        return frame.mapInArrow(worker.head(head.routed, groups, self.log, route, node.uid), spark_schema(PACKED))

    def _may_end_early(self, source: SparkSource[Any]) -> bool:
        """Whether a source, or a part of it, may end while others go on that wait for it."""
        nodes = self.plan.graph.nodes
        others = len(self.plan.graph.sources) > 1 or any(isinstance(n, g.QueryOutputNode) for n in nodes)
        return others or isinstance(source, SplitSource)

    def _natively_from(self, node: g.SourceNode, head: Head, frame: DataFrame, parts: list[str]) -> DataFrame:
        """A source's rows after the native operators directly behind it, each with its part."""
        if MALFORMED in frame.columns:
            raise UnsupportedError(
                f"{self.plan.name}: source '{node.name}' drops or diverts malformed rows and has native operators"
                " behind it, which STREAMING cannot run; use on_malformed='fail', or a Python operator first"
            )
        natives = Natives(self.plan.name, node.name, self.spark, self.tables)
        frame = frame.select(*node.source.records.names, *parts)
        for number in head.native:
            operator = self.plan.graph.node(number)
            with naming_operator(self.plan.name, operator):
                frame = natives.run(operator, frame, parts)
        return frame.select(*head.routed.program.input.records.names, *parts)

    def _control(self, groups: int) -> DataFrame:
        """The control events: a row for each key group or subtask of what waits for them, and one an iteration."""
        from pyspark.sql import functions as F

        events = self.control.stream(self.spark)
        nodes = {node.uid: node for node in self.plan.graph.nodes}
        counts = {
            lane: self.plan.subtasks_with_state(nodes[uid]) or groups for lane, uid in self.topology.timed.items()
        }
        counts |= dict.fromkeys(self.topology.iterations, 1)
        places = [F.struct(F.lit(lane).alias("lane"), F.lit(counts[lane]).alias("count")) for lane in sorted(counts)]
        waiting = F.array(*places).cast("array<struct<lane: int, count: int>>")
        addressed = events.select("event", F.inline(waiting)).select(
            "event", "lane", F.explode(F.sequence(F.lit(0), F.col("count") - 1)).alias("group")
        )
        seq = F.lit(sequence(BatchOrder.EVENT, 0)).cast("long").alias("seq")
        return addressed.select("lane", "group", seq, F.col("event").cast("binary").alias("data"))


class PackedRows:
    """The rows of one micro-batch without their reports, which Spark observes while it computes them."""

    def __init__(self, frame: DataFrame) -> None:
        from pyspark.sql import Observation
        from pyspark.sql import functions as F

        self._observation = Observation()
        # in SQL, since each call of Spark's API asks the JVM several times, in every micro-batch
        reports = F.expr(f"collect_list(CASE WHEN lane = {REPORT} THEN data END) AS reports")
        rows = F.expr(f"count_if(lane <> {REPORT}) AS rows")
        self.frame = frame.observe(self._observation, reports, rows).where(f"lane <> {REPORT}")

    def are_none(self) -> bool:
        """Whether there were no rows; call it after they were computed."""
        return not int(observed(self._observation).get("rows") or 0)

    def report(self) -> Report:
        """What the operators reported; call it after the rows were computed."""
        return merge_reports(bytes(r) for r in observed(self._observation).get("reports") or [])


def stream_of(frame: DataFrame, lane: int, schema: pa.Schema) -> DataFrame:
    """One stream out of packed rows, in its own columns."""
    return frame.where(f"lane = {lane}").select("data").mapInArrow(worker.unpack(schema), spark_schema(schema))


class KeyGroupRunner(EpochRunner):
    """Takes packed rows to the sinks, and keeps malformed ones: those of some sources, by lane."""

    def __init__(
        self,
        writer: EpochWriter,
        lanes: Mapping[Port, int],
        malformed_rows: Mapping[int, Diverted],
        iterations: StreamIterations,
        query_outputs: QueryOutputs,
        iterations_folder: UPath,
    ) -> None:
        super().__init__(writer)
        self._lanes, self._iterations = lanes, iterations
        self._query_outputs, self._folder = query_outputs, iterations_folder
        self._kept = {lane: partial(self._keep, lane, diverted) for lane, diverted in malformed_rows.items()}
        self._diverted: dict[str, int] = {}

    def begin(self, host: Host, start: StartingState | None = None) -> None:
        super().begin(host, start)
        self._iterations.begin(self.writer.plan, host, self._folder, start)
        self._query_outputs.begin(start)

    def run(self, frame: DataFrame, epoch: int, ends: bool) -> Outcome:
        self._diverted = {}
        rows = PackedRows(frame)
        iterated = None
        if self._iterations:
            iterated = IterationsInEpoch(self._iterations, epoch, self._query_outputs.ended_by(epoch, ends))
        outputs = None
        if self._query_outputs:
            loops = self._iterations
            outputs = QueryOutputsInEpoch(
                self._query_outputs, epoch, lambda: loops.circulates, loops.subtasks, self.writer.check
            )
        written, metrics = self.writer.commit(
            rows.frame, epoch, self._unpacked, self._kept, rows.are_none, iterated, outputs
        )
        owed, self._query_outputs.must_announce_idle = self._query_outputs.must_announce_idle, False
        return Outcome(written, metrics, rows.report(), self._diverted, self._iterations.circulates, owed)

    def _unpacked(self, frame: DataFrame, port: Port) -> DataFrame:
        return stream_of(frame, self._lanes[port], self.writer.plan.layout(port).schema)

    def _keep(self, lane: int, diverted: Diverted, frame: DataFrame, epoch: int) -> None:
        rows = stream_of(frame, lane, MALFORMED_ROW)
        count = self._diverted[diverted.source] = rows.count()
        malformed.keep(rows, count, diverted, str(epoch))


class KeyGroupQuery(Query):
    """The query of key groups. `lanes` are those of the sources' malformed rows, by uid."""

    def __init__(
        self,
        deployment: Deployment,
        name: str,
        stages: Topology,
        lanes: Mapping[str, int],
        start: StartingState | None = None,
    ) -> None:
        super().__init__(deployment, name, stages.tail)
        self.control = ControlFile(str(self.folder / "control" / name))
        self.control.claim(deployment.token)
        read = {head.source for head in stages.heads}
        self.alignment = Alignment(self.plan, read, self.folder / "sources")
        self.frames = KeyGroupFrames(
            self.plan,
            stages,
            self.spark,
            self.folder,
            self.control,
            deployment.deployed.tasks,
            self.tables,
            self.log,
            lanes,
            start,
            self.alignment,
        )
        if start is not None and self.control.read() is None:
            # At least the first event, so that there is an epoch, and the state is taken, also where there is no data.
            event = start.manifest.event
            self.control.write(msgspec.structs.replace(event, number=max(1, event.number)))
        latest = self.control.read()
        self.time = JobTime(self.plan, latest, wall_clock())
        if latest is not None and latest.end:
            self.goes_on_at_end()
        self.stages = stages
        self.splits = Splits(self.spark, self.folder, name)
        kept = {
            lanes[node.uid]: malformed.in_streaming(self.directory, node)
            for node in malformed.diverting(self.plan)
            if node.id in read
        }
        self._query_inputs = {
            head.source: QueryInputPosition(text_of(self.folder / FOLDER / node.uid))
            for head in stages.heads
            if isinstance(node := self.plan.graph.node(head.source), g.QueryInputNode)
        }
        self.iterations = StreamIterations(self.plan, stages.tail.nodes)
        folder, offsets = self.folder / FOLDER, self.folder / "spark" / name / "offsets"
        query_outputs = QueryOutputs(self.plan, stages.tail.sinks, folder, offsets)
        self.runner = KeyGroupRunner(self.writer, stages.tail_lanes, kept, self.iterations, query_outputs, folder)
        self._begins = start

    def frame(self) -> DataFrame:
        frame = self.frames.build()
        last = self.directory.last_epoch(self.name)
        self._note_positions(last)
        if last is not None:
            self._note_delivered(last)
        return frame

    def start(self) -> None:
        if not self.through_connect:
            self.runner.begin(self.host(), self._begins)
        elif self._begins is not None:  # where its epochs run, only what is written here is begun with
            self.runner.begin(replace(self.host(), observe=ignore_events), self._begins)
        if self.iterations and (self.through_connect or self.iterations.circulates):
            self.time.wake()
        if self.stages.levels:
            self.splits.begin()
        self.alignment.tell(self.time, wall_clock())
        super().start()

    def attach(self, running: StreamingQuery, started: int) -> None:
        self.alignment.tell(self.time, wall_clock())
        if self.iterations:
            self.time.wake()  # the job before may not have heard of what circulates
        super().attach(running, started)

    def stop(self) -> None:
        super().stop()
        self.splits.end()

    def committed(self, outcome: Outcome, epoch: int, started: float) -> EpochCommitted:
        report = outcome.report
        self._note_positions(epoch)
        self._note_delivered(epoch)
        if outcome.circulates or outcome.must_announce_idle or self._looks_for_end():
            self.time.wake()
        counts = self.plan.execution.streaming.event_time_unit is not None
        if self.stages.awaits_events or self.alignment or counts:
            event = self.time.after(report, wall_clock())
            if event is not None and self.stages.awaits_events:
                self.control.write(event)
        self.alignment.tell(self.time, wall_clock())
        self.splits.look(epoch + 1)
        _, state_rows, state_bytes = self.measured()
        metrics = merge([report.metrics, outcome.metrics])
        event_times = metrics.event_times
        return EpochCommitted(
            self.name,
            epoch,
            report.rows,
            time.monotonic() - started,
            self.time.watermark(),
            msgspec.structs.replace(metrics, event_times={}),
            outcome.written,
            state_rows,
            state_bytes,
            outcome.diverted,
            self._backlog(),
            event_times,
            self._complete_until(epoch) if counts else {},
            read=report.read,
        )

    def _complete_until(self, epoch: int) -> dict[str, int]:
        """Return the event time up to which each sink has what belongs to it."""
        event = event_of(self._logged(epoch)) if self.stages.awaits_events else ControlEvent()
        return {
            name: self.time.complete_until(assigners, waiting, event, wall_clock())
            for name, (assigners, waiting) in self._time_of_sinks.items()
        }

    @cached_property
    def _time_of_sinks(self) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
        """The assigners of each sink's event time, and the operators before it that wait for watermarks, by uid."""
        graph = self.plan.graph
        of_sinks = {}
        for number in self.stages.tail.sinks:
            if isinstance(node := graph.node(number), g.SinkNode):
                before = [graph.node(n).uid for n in graph.upstream(number)]
                waiting = tuple(uid for uid in before if self.time.waits_for_watermarks(uid))
                of_sinks[node.name] = self.plan.assigners_before(number), waiting
        return of_sinks

    def _note_positions(self, epoch: int | None) -> None:
        """Note which sources have been read to their end, and what was handed on, by an epoch or before the first."""
        awaits = self.stages.awaits_events or bool(self.alignment)
        endings = self.frames.endings if awaits else {}
        if not (endings or self._query_inputs):
            return
        offsets = offsets_of_sources(self._logged(epoch)) if epoch is not None else []
        positions = {head.source: offset for head, offset in zip(self.stages.heads, offsets, strict=False)}
        logs = self.folder / "spark" / self.name / "sources"
        ended = {
            head.source: endings[head.source](logs / str(number), positions.get(head.source))
            for number, head in enumerate(self.stages.heads)
            if head.source in endings
        }
        for source, position in self._query_inputs.items() if positions else ():
            last = position.reached(positions[source])
            if last is not None:
                self.time.reached(self.plan.graph.node(source).uid, last.watermark, last.last_event_time, last.idle)
                ended[source] = frozenset([ALL] if last.ended else ())
        if not awaits:  # what was handed on is noted as read, and nobody asks for the time
            return
        self.alignment.ended(ended)
        self.time.ended({self.plan.graph.node(source).uid: parts for source, parts in ended.items()})
        self.frames.endings = {source: ending for source, ending in endings.items() if ALL not in ended[source]}

    def _looks_for_end(self) -> bool:
        """Whether only a further epoch shows that a source has ended."""
        nodes = (self.plan.graph.node(source) for source in self.frames.endings)
        return any(isinstance(n, g.SourceNode) and spark_source(self.plan.name, n).ends_where_it_stands for n in nodes)

    def _note_delivered(self, epoch: int) -> None:
        """Note which operators an epoch has told of the end of their input."""
        if self.time.awaits_delivery:
            self.time.delivered(event_of(self._logged(epoch)))

    def _backlog(self) -> dict[str, int]:
        """What waits to be read after the micro-batch before, by source."""
        progress, backlog = self.progress(), {}
        if progress is None:
            return {}
        for head, source in zip(self.stages.heads, progress["sources"], strict=False):
            node = self.plan.graph.node(head.source)
            assert isinstance(node, g.SourceNode)
            offset, latest = source["endOffset"], source["latestOffset"]
            waiting = spark_source(self.plan.name, node).backlog(str(offset), str(latest)) if latest else None
            if waiting is not None:
                backlog[node.source.name] = waiting
        return backlog

    def tick(self) -> None:
        super().tick()
        self.alignment.tell(self.time, wall_clock())
        if self.stages.awaits_events:
            event = self.time.tick(wall_clock())
            if event is not None:
                self.control.write(event)

    def has_read_inputs(self) -> Callable[[], bool]:
        logged = {position: position.logged() for position in self._query_inputs.values()}
        return lambda: all(position.read >= count for position, count in logged.items())

    def ends_alignment(self) -> bool:
        if self.alignment:
            self.alignment.end()
        return bool(self.alignment)

    def end(self) -> bool:
        if self.stages.awaits_events:
            self.control.write(self.time.end(wall_clock()))
        return self.stages.awaits_events
