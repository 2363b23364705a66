"""A STREAMING job: the queries of one pipeline, started, watched, ended and stopped as one.

The job holds the lease on its checkpoint directory from before its first query starts until after its last one has
stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

from dagster_unified.connectors.paths import for_spark
from dagster_unified.engine import malformed
from dagster_unified.engine.events import EpochCommitted, Observer, Written, nobody
from dagster_unified.engine.failures import translated
from dagster_unified.engine.job_time import JobTime
from dagster_unified.engine.session import is_connect
from dagster_unified.engine.streaming import frames
from dagster_unified.engine.streaming.checkpoint import PATIENCE, CheckpointDirectory, Deployed, HeldLease, wait_for
from dagster_unified.engine.streaming.control import ControlFile
from dagster_unified.engine.streaming.epoch import EpochWriter
from dagster_unified.engine.streaming.savepoint import check_whole, forget_interrupted, save
from dagster_unified.engine.streaming.topology import Lanes, Topology, topology
from dagster_unified.errors import UnifiedError, UnsupportedError
from dagster_unified.graph import nodes as g
from dagster_unified.graph.connectors import Boundedness
from dagster_unified.graph.plan import Plan, Port, Region
from dagster_unified.graph.upgrade import deployed_code, deployment_fingerprint
from dagster_unified.operators.drivers.key_groups import ControlEvent
from dagster_unified.operators.time import wall_clock

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

PROVIDERS = {
    "ROCKSDB": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    "HASHMAP": "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider",
}
LOCAL_FILES = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
"""For a local disk, where Spark's own choice starts a process for every file that it renames: 29 ms for each instead of
7, several times a micro-batch.
"""

STALE = 1.0
"""Seconds after which a running query lists the files of a looked-up table again."""

GRACE = 20.0
"""Seconds for which stopping waits for an epoch that is being committed."""


@dataclass(frozen=True)
class Start:
    """How a job starts: as whom, and from which state. `fresh` begins without any; with `savepoint` new code leaves one
    of what it begins from.

    `loaded` says which loading of a code location asked for it, if one did.
    """

    owner: str
    fresh: bool = False
    savepoint: bool = False
    patience: float = PATIENCE
    loaded: str = ""


class StreamingJob:
    """One pipeline's queries."""

    def __init__(self, plan: Plan, spark: SparkSession, start: Start, observe: Observer = nobody) -> None:
        if plan.execution.mode != "STREAMING":
            raise UnsupportedError(
                f"{plan.name}: this job runs in STREAMING, and the pipeline resolves to {plan.execution.mode}; launch"
                " with execution.runtime-mode=STREAMING"
            )
        if not hasattr(spark, "sparkContext") or is_connect(spark):
            raise UnsupportedError(
                f"{plan.name}: STREAMING needs a classic Spark session, and this one is Spark Connect's; give"
                " SparkResource a master instead of a remote"
            )
        by_group = [node.name for node in plan.graph.nodes if node.runs_by_key]
        if plan.execution.streaming.backend == "HASHMAP" and by_group:
            raise UnsupportedError(
                f"{plan.name}: operator '{by_group[0]}' keeps its state in Spark's transformWithState, which only has"
                " rocksdb; leave state.backend.type out (hashmap is for pipelines whose only keyed operators are"
                " native aggregates)"
            )
        self.plan, self.spark, self.start_as, self.observe = plan, spark, start, observe
        self.directory = CheckpointDirectory(plan.execution.streaming.directory, plan.name)
        self.deployed: Deployed | None = None
        self._lease: HeldLease | None = None
        self._queries: list[_Query] = []
        self._ending = False

    def start(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Takes the lease and starts all queries; waits for a job that was killed to be given up."""
        self._lease = wait_for(self.directory, self.start_as.owner, self.start_as.patience, stopped)
        try:
            before = self.directory.deployed()
            fresh = self.start_as.fresh or (
                before is not None and before.finished
            )  # a bounded input that has ended is begun anew
            held = None if fresh else before
            lanes = Lanes(held.lanes if held else None)
            built = [
                (name, sinks, aggregate, topology(self.plan, sinks, lanes) if aggregate is None else None)
                for name, sinks, aggregate in queries(self.plan)
            ]
            odd = {n.uid: lanes.of(f"{n.uid} malformed") for n in self.plan.graph.sources}
            record = self._record(lanes, built)
            if not self.start_as.fresh:
                check_whole(self.directory)
            if not fresh:
                self.directory.check(record)
                if self.start_as.savepoint and held is not None and held.fingerprint != record.fingerprint:
                    save(self.directory, "before new code", self._lease.check)
            self.deployed = self.directory.deploy(record, fresh)
            forget_interrupted(self.directory)
            self._configure()
            for name, sinks, aggregate, stages in built:
                query = (
                    _Packed(self, name, stages, odd) if stages is not None else _Native(self, name, sinks, aggregate)
                )
                self._queries.append(query)
                try:
                    query.start()
                except Exception as error:
                    raise translated(error, self.plan, name, self.spark) from error
        except BaseException:
            self.stop()
            raise

    def run(self, stopped: Callable[[], bool] = lambda: False, poll: float = 0.1) -> str:
        """Runs until the input has ended ("finished") or `stopped` says so ("stopped").

        Raises what made a query fail.
        """
        try:
            self.start(stopped)
            self._ending = self.plan.execution.boundedness is Boundedness.BOUNDED
            while not stopped():
                alive = [query for query in self._queries if query.advance(self._ending)]
                if not alive:
                    self.directory.finish()
                    return "finished"
                time.sleep(poll)
            return "stopped"
        finally:
            self.stop()

    def drain(self) -> None:
        """Ends the input here: what has arrived is processed, the watermark goes to its end, and the job finishes
        (Flink: `stop --drain`).
        """
        self._ending = True

    def stop(self) -> None:
        """Stops all queries, after the epochs that are being committed, and lets others write."""
        for query in self._queries:
            query.stop()
        self._queries.clear()
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    @property
    def token(self) -> int | None:
        """The fencing token of the lease, while it is held."""
        return self._lease.token if self._lease is not None else None

    def activity(self) -> tuple[int, bool]:
        """How many epochs have been committed, and whether one is being worked on."""
        return sum(query.epochs for query in self._queries), any(query.busy() for query in self._queries)

    def may_write(self) -> None:
        """Raises where another job has taken over."""
        if self._lease is not None:
            self._lease.check()

    def _record(
        self, lanes: Lanes, built: Sequence[tuple[str, tuple[int, ...], int | None, Topology | None]]
    ) -> Deployed:
        levels = {
            name: [sorted(track.program.steps[0].uid for track in level.values()) for level in stages.levels]
            for name, _, _, stages in built
            if stages is not None
        }
        options = self.plan.execution.streaming
        code = deployed_code(self.plan)
        return Deployed(
            version=0,
            id="",
            pipeline=self.plan.name,
            fingerprint=deployment_fingerprint(code),
            generation=0,
            max_parallelism=options.max_parallelism,
            backend=options.backend,
            lanes=lanes.numbers,
            levels=levels,
            code=code,
            loaded=self.start_as.loaded,
        )

    def _configure(self) -> None:
        options = self.plan.execution.streaming
        settings = {
            "spark.sql.streaming.stateStore.providerClass": PROVIDERS[options.backend],
            "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
            "spark.sql.streaming.minBatchesToRetain": str(options.retained),
            "spark.sql.execution.arrow.maxRecordsPerBatch": "50000",
            # over a source's checks of every column it takes minutes and gigabytes
            "spark.sql.constraintPropagation.enabled": "false",
        }
        if self.directory.path.protocol in ("", "file"):
            settings["spark.sql.streaming.checkpointFileManagerClass"] = LOCAL_FILES
        if self.plan.execution.parallelism is not None:
            settings["spark.sql.shuffle.partitions"] = str(self.plan.execution.parallelism)
        for key, value in settings.items():
            self.spark.conf.set(key, value)


def queries(plan: Plan) -> list[tuple[str, tuple[int, ...], int | None]]:
    """The queries that a pipeline needs: one for each native aggregate, one for everything else.

    Gives name, sinks and aggregate.
    """
    graph = plan.graph
    found: dict[int | None, list[int]] = {}
    for node in graph.sinks:
        upstream = plan.upstream(node.id)
        aggregates = [n for n in upstream if graph.node(n).aggregates_natively]
        if aggregates:
            name = graph.node(aggregates[0]).name
            others = [graph.node(n).name for n in upstream if graph.node(n).runs_by_key]
            if len(aggregates) > 1 or others:
                raise UnsupportedError(
                    f"{plan.name}: sink '{node.name}' comes after the native aggregate '{name}' and after"
                    f" '{(others or [graph.node(aggregates[1]).name])[0]}', which STREAMING cannot run in one query;"
                    " use reduce instead of one of them, or write a table between them"
                )
            if any(s.id in upstream and s.id not in plan.upstream(aggregates[0]) for s in graph.sources):
                raise UnsupportedError(
                    f"{plan.name}: sink '{node.name}' unites the native aggregate '{name}' with another stream, which"
                    " STREAMING cannot run; write them to two sinks"
                )
        found.setdefault(aggregates[0] if aggregates else None, []).append(node.id)
    return [
        ("main" if aggregate is None else graph.node(aggregate).uid, tuple(sinks), aggregate)
        for aggregate, sinks in found.items()
    ]


class _StoppedError(UnifiedError):
    """The job is being stopped; not an error to anyone."""


class _Query:
    """One Spark query and its epochs."""

    output_mode = "append"
    several_stateful = True
    """Whether Spark may find several stateful operators in the query."""

    def __init__(self, job: StreamingJob, name: str, tail: Region) -> None:
        assert job.deployed is not None
        self.job, self.name, self.plan = job, name, job.plan
        self.folder = job.directory.path
        self.writer = EpochWriter(
            job.plan,
            job.spark,
            tail,
            f"{job.deployed.id}/{name}",
            job.deployed.timeline,
            self.folder / "epochs" / name,
            job.may_write,
        )
        self.query: StreamingQuery | None = None
        self.failure: Exception | None = None
        self.epochs = 0
        self.tables: list[DataFrame] = []
        """What lookups read in each micro-batch."""

        self._read = time.monotonic()

        self._stopping = False
        self._committing = Lock()
        self._draining: Thread | None = None

    def frame(self) -> DataFrame:
        raise NotImplementedError

    def commit(self, frame: DataFrame, epoch: int) -> EpochCommitted:
        raise NotImplementedError

    def end(self) -> bool:
        """The input is drained: tells the operators, and says whether there is more to be run for it."""
        return False

    def tick(self) -> None:
        """Time has passed."""
        if time.monotonic() - self._read >= STALE:
            frames.read_again(self.tables)
            self._read = time.monotonic()

    def start(self) -> None:
        interval = self.plan.execution.streaming.interval
        writer = self.frame().writeStream.foreachBatch(self._epoch).outputMode(self.output_mode)
        writer = writer.option("checkpointLocation", for_spark(self.folder / "spark" / self.name)).queryName(
            f"{self.plan.name}/{self.name}"
        )
        if interval:
            writer = writer.trigger(processingTime=f"{int(interval.total_seconds() * 1000)} milliseconds")
        self.job.spark.conf.set(
            "spark.sql.streaming.statefulOperator.allowMultiple", str(self.several_stateful).lower()
        )
        self.query = writer.start()

    def advance(self, bounded: bool) -> bool:
        """Looks after the query; says whether it goes on. Raises what made it fail."""
        assert self.query is not None
        if not self.query.isActive:
            raise self._error()
        self.tick()
        if not bounded:
            return True
        if self._draining is None:
            self._draining = Thread(target=self._drain, daemon=True, name=f"drain {self.name}")
            self._draining.start()
        if self._draining.is_alive():
            return True
        if not self.query.isActive:
            raise self._error()
        return False

    def stop(self) -> None:
        if self.query is None:
            return
        waited = self._committing.acquire(timeout=GRACE)
        self._stopping = True
        if waited:
            self._committing.release()
            self._let_spark_commit()
        try:
            self.query.stop()
        except Exception as error:
            if self.query.isActive:
                raise translated(error, self.plan, self.name, self.job.spark) from error

    def _let_spark_commit(self) -> None:
        """Waits until Spark has logged the epoch that the sinks have: else it would be run again, after an upgrade by
        other code.
        """
        deadline = time.monotonic() + GRACE
        while self.busy() and time.monotonic() < deadline:
            time.sleep(0.02)

    def busy(self) -> bool:
        """Whether an epoch is being worked on."""
        return self.query is not None and self.query.isActive and bool(self.query.status["isTriggerActive"])

    def measured(self) -> tuple[int, int, int]:
        """What Spark measured in the micro-batch before: rows read, and rows and bytes of state."""
        found: Any = self.query.lastProgress if self.query is not None else None
        states = found["stateOperators"] if found is not None else []
        return (
            int(found["numInputRows"]) if found else 0,
            sum(s["numRowsTotal"] for s in states),
            sum(s["memoryUsedBytes"] for s in states),
        )

    def _drain(self) -> None:
        assert self.query is not None
        try:
            self.query.processAllAvailable()
            with self._committing:
                # A query that is stopped has nothing available either, and its input has not ended.
                more = not self._stopping and self.query.isActive and self.end()
            if more:
                self.query.processAllAvailable()
        except Exception as error:  # the query's own failure is read from it; anything else is this one's
            if self.query.isActive:
                self.failure = self.failure or error
                self.query.stop()

    def _epoch(self, frame: DataFrame, epoch: int) -> None:
        with self._committing:
            if self._stopping:
                raise _StoppedError("the job is being stopped")
            try:
                self.job.observe(self.commit(frame, epoch))
                self.epochs += 1
            except Exception as error:
                self.failure = error
                raise

    def _error(self) -> UnifiedError:
        assert self.query is not None
        cause: Exception = (
            self.failure or self.query.exception() or UnifiedError(f"{self.plan.name}: query '{self.name}' has stopped")
        )
        return translated(cause, self.plan, self.name, self.job.spark)


class _Packed(_Query):
    """A query of lanes: everything but native aggregates."""

    def __init__(self, job: StreamingJob, name: str, stages: Topology, lanes: dict[str, int]) -> None:
        super().__init__(job, name, stages.tail)
        control = self.folder / "control" / name
        self.frames = frames.PackedFrames(job.plan, stages, job.spark, self.folder, control, lanes, self.tables)
        self.control = ControlFile(str(control))
        self.time = JobTime(job.plan, self.control.read(), wall_clock())
        self.stages = stages
        self.kept = {
            lanes[n.uid]: self._keep(n)
            for n in malformed.diverting(job.plan)
            if any(h.source == n.id for h in stages.heads)
        }
        self.diverted: dict[str, int] = {}

    def frame(self) -> DataFrame:
        return self.frames.build()

    def commit(self, frame: DataFrame, epoch: int) -> EpochCommitted:
        begun = time.monotonic()
        self.diverted = {}
        report, results = self.writer.packed(frame, epoch, self._unpacked, self.kept)
        if self.stages.timed:
            event = self.time.after(report, wall_clock())
            if event is not None:
                self.control.write(event)
        written = {name: Written(result.rows, result.bytes) for name, result in results.items()}
        _, state_rows, state_bytes = self.measured()
        seconds = time.monotonic() - begun
        return EpochCommitted(
            self.name,
            epoch,
            report.rows,
            seconds,
            self.time.watermark(),
            report.metrics.counters,
            written,
            state_rows,
            state_bytes,
            self.diverted,
        )

    def tick(self) -> None:
        super().tick()
        if self.stages.timed:
            event = self.time.tick(wall_clock())
            if event is not None:
                self.control.write(event)

    def end(self) -> bool:
        if self.stages.timed:
            self.control.write(self.time.end(wall_clock()))
        return bool(self.stages.timed)

    def _unpacked(self, frame: DataFrame, port: Port) -> DataFrame:
        return self.frames.lane(frame, self.stages.tail_lanes[port], self.plan.layout(port).schema)

    def _keep(self, node: g.SourceNode) -> Callable[[DataFrame, int], None]:
        def keep(frame: DataFrame, epoch: int) -> None:
            rows = self.frames.lane(frame, self.frames.malformed[node.uid], frames.MALFORMED_ROW)
            self.diverted[node.source.name] = rows.count()
            malformed.keep(
                rows, self.diverted[node.source.name], malformed.in_streaming(self.job.directory, node), str(epoch)
            )

        return keep


class _Native(_Query):
    """A query of one native aggregate: each epoch has the keys that changed, or the windows that closed."""

    several_stateful = False
    """With more than one Spark would take late records for a micro-batch longer."""

    def __init__(self, job: StreamingJob, name: str, sinks: tuple[int, ...], aggregate: int | None) -> None:
        assert aggregate is not None
        upstream = job.plan.upstream(aggregate)
        after = sorted(job.plan.upstream(*sinks) - upstream)
        super().__init__(job, name, Region(-1, "sinks", (), tuple(after), (), (), sinks, ""))
        self.aggregate, self.members = aggregate, sorted(upstream)
        self.packed = {
            node for _, others, native in queries(job.plan) if native is None for node in job.plan.upstream(*others)
        }
        self.windowed = job.plan.graph.node(aggregate).has_native_windows
        self.output_mode = "append" if self.windowed else "update"
        self.control = self.folder / "control" / name

    def frame(self) -> DataFrame:
        return frames.native_frame(
            self.plan, self.job.spark, self.aggregate, self.members, self.folder, self.control, self.tables, self.packed
        )

    def end(self) -> bool:
        if self.windowed:
            control = ControlFile(str(self.control))
            before = control.read() or ControlEvent()
            control.write(ControlEvent(before.number + 1, end=True))
        return self.windowed

    def commit(self, frame: DataFrame, epoch: int) -> EpochCommitted:
        begun = time.monotonic()
        results = self.writer.plain(frame, epoch)
        rows, state_rows, state_bytes = self.measured()
        written = {name: Written(r.rows, r.bytes) for name, r in results.items()}
        late = self.late()
        counters = {"late records": late} if late else {}
        return EpochCommitted(
            self.name,
            epoch,
            rows,
            time.monotonic() - begun,
            self.watermark(),
            counters,
            written,
            state_rows,
            state_bytes,
        )

    def late(self) -> int:
        """How many rows the micro-batch before dropped, because their windows had closed."""
        found: Any = self.query.lastProgress if self.query is not None else None
        return sum(s["numRowsDroppedByWatermark"] for s in found["stateOperators"]) if found is not None else 0

    def watermark(self) -> int | None:
        """Spark's watermark in the micro-batch before; none before the first, which Spark takes for 1970."""
        found: Any = self.query.lastProgress if self.query is not None else None
        text = found["eventTime"].get("watermark") if found is not None else None
        millis = None if text is None else int(datetime.fromisoformat(text).timestamp() * 1000)
        return millis or None
