"""A STREAMING job: the queries of one pipeline, started, watched, ended and stopped as one.

The job holds the lease on its checkpoint directory from before its first query starts until after its last one has
stopped.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from dagster_unified.connectors import written_ahead
from dagster_unified.engine.cluster import watching
from dagster_unified.engine.dataframe.passes import MAX_ROWS, may_be_large, small_rows
from dagster_unified.engine.events import (
    Observer,
    PhaseBegun,
    QueriesStopped,
    QueriesTakenOver,
    StartDelayed,
    ignore_events,
)
from dagster_unified.engine.failures import naming_store, translated
from dagster_unified.engine.positions import after, check_positions
from dagster_unified.engine.session import PARTITIONS, partitions, server_of
from dagster_unified.engine.state_tables.savepoints import StartingState, starting_state
from dagster_unified.engine.streaming import attaching, sources
from dagster_unified.engine.streaming.checkpoint import (
    INITIAL,
    PATIENCE,
    CheckpointDirectory,
    Deployed,
    HeldLease,
    check_not_drained,
    wait_for,
)
from dagster_unified.engine.streaming.cross_query import bound
from dagster_unified.engine.streaming.draining import End, tell_of_last_epoch
from dagster_unified.engine.streaming.iterations import FOLDER as ITERATIONS
from dagster_unified.engine.streaming.key_group_query import KeyGroupQuery
from dagster_unified.engine.streaming.native_query import NativeQuery
from dagster_unified.engine.streaming.query import GRACE, Deployment, Query
from dagster_unified.engine.streaming.savepoints.copy import check_whole, forget_interrupted, save
from dagster_unified.engine.streaming.savepoints.export import FrozenCheckpoint, without_tables
from dagster_unified.engine.streaming.savepoints.request import forget
from dagster_unified.engine.streaming.savepoints.schedule import SavepointSchedule
from dagster_unified.errors import SlowStartError, StateError, UnifiedError, UnsupportedError
from dagster_unified.graph.connectors import Boundedness
from dagster_unified.graph.nodes import IterationNode
from dagster_unified.graph.plan import Plan
from dagster_unified.graph.queries import (
    KeyGroupQueryPlan,
    NativeQueryPlan,
    QueryPlan,
    key_group_queries,
    plan_queries,
    segments,
)
from dagster_unified.graph.topology import (
    Lanes,
    malformed_lane,
)
from dagster_unified.graph.upgrade import deployed_code, deployment_fingerprint
from dagster_unified.operators.state.evolution import layout_of
from dagster_unified.spark_internals import bucket_files
from dagster_unified.storage.object_store import is_connect
from dagster_unified.storage.paths import is_local, remove_tree

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PROVIDERS = {
    "ROCKSDB": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    "HASHMAP": "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider",
}
FILES = "spark.sql.streaming.checkpointFileManagerClass"
"""Spark's setting for the class that writes the files of a checkpoint."""

LOCAL_FILES = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
"""The checkpoint file manager for a local disk.

Spark's own choice starts a process for every file that it renames: 29 ms for each instead of 7, several times a
micro-batch.
"""

_log = logging.getLogger(__name__)

PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 30.0)
"""Seconds before queries start again for which a Python process did not start in time, one after the other."""

_OURS = (LOCAL_FILES, bucket_files.CLASS)


@dataclass(frozen=True)
class Start:
    """How a job starts: as whom, and from which state.

    `fresh` starts without any state. `savepoint` takes a savepoint before new code starts. `loaded` says which loading
    of a code location asked for the job, if one did.
    """

    owner: str
    fresh: bool = False
    savepoint: bool = False
    patience: float = PATIENCE
    loaded: str = ""


class StreamingJob:
    """One pipeline's queries."""

    def __init__(self, plan: Plan, spark: SparkSession, start: Start, observe: Observer = ignore_events) -> None:
        if plan.execution.mode != "STREAMING":
            raise UnsupportedError(
                f"{plan.name}: this job runs in STREAMING, and the pipeline resolves to {plan.execution.mode}; launch"
                " with execution.runtime-mode=STREAMING"
            )
        by_group = [node.name for node in plan.graph.nodes if node.runs_by_key]
        if plan.execution.streaming.backend == "HASHMAP" and by_group:
            raise UnsupportedError(
                f"{plan.name}: operator '{by_group[0]}' keeps its state in Spark's transformWithState, which only has"
                " rocksdb; leave state.backend.type out (hashmap is for pipelines whose only keyed operators are"
                " native aggregates)"
            )
        remembering = [node for node in plan.graph.assigners if node.remembers]
        if remembering and is_connect(spark):
            names = ", ".join(f"self.{name}" for name in remembering[0].remembers)
            raise UnsupportedError(
                f"{plan.name}: the watermark generator of '{remembering[0].name}' keeps {names} from record to record,"
                " which through Spark Connect cannot go on to the next micro-batch; take what it has to know from the"
                " record"
            )
        if plan.execution.savepoint.interval is not None and (why := without_tables(plan)):
            raise UnsupportedError(
                f"{plan.name}: execution.savepoint.interval is set, and {why}, so that no savepoint can be taken while"
                " the job runs; remove one of the two options, or use reduce instead of the aggregate"
            )
        if plan.execution.savepoint.interval is not None or plan.execution.goes_on:
            check_positions(plan)
        self.plan, self.spark, self.start_as, self.observe = plan, spark, start, observe
        self.directory = CheckpointDirectory(plan.execution.streaming.directory, plan.name)
        self.deployed: Deployed | None = None
        self._lease: HeldLease | None = None
        self._queries: list[Query] = []
        self._segments: list[int] = []
        """The segment of the plan of each of them."""

        self._end: End | None = None
        self._lanes = Lanes()

        self._saving: SavepointSchedule | None = None
        self._phases: set[str] = set()
        """The phases that were announced."""

    def start(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Take the lease and start all queries; wait until a killed job's lease expires."""
        self._lease = self._lease or wait_for(self.directory, self.start_as.owner, self.start_as.patience, stopped)
        try:
            before = self.directory.deployed()
            finished = before is not None and before.finished
            fresh = self.start_as.fresh or finished  # a bounded input that has ended is begun anew
            previous = None if fresh else before
            lanes = Lanes(previous.lanes if previous else None)
            wanted = plan_queries(self.plan, lanes)
            staged = [query.name for query in wanted if isinstance(query, KeyGroupQueryPlan)]
            self._lanes = lanes
            malformed = {n.uid: lanes.of(malformed_lane(n.uid)) for n in self.plan.graph.sources}
            record = self._record(lanes, wanted)
            if not self.start_as.fresh:
                check_whole(self.directory)
                check_not_drained(self.directory, self.plan)
            if not fresh:
                self.directory.check(record)
                if self.start_as.savepoint and previous is not None and previous.fingerprint != record.fingerprint:
                    save(self.directory, "before new code", self._lease.check)
            self._configure()
            self._tell(self._restoring(record.start, staged, fresh))
            attached = None if fresh else self._left_running(previous, record, staged, [spec.name for spec in wanted])
            if attached is not None:
                self.spark = attached.spark
            elif (running_before := attaching.running(self.directory)) is not None:
                attaching.record(self.directory, attaching.Running(self._lease.token, self._lease.token))
                attaching.end(running_before, self.spark, self.directory.path)
            self.deployed = self.directory.deploy(record, fresh)
            if record.start and self.deployed.start != record.start:
                _log.warning(
                    "%s goes on from its own state, and does not start from the savepoint in %s"
                    " (execution.state-recovery.path): that is for a job without state, as after removing %s",
                    self.plan.name,
                    record.start,
                    self.directory.path,
                )
            forget_interrupted(self.directory)
            starting = [] if attached else self._without_epoch(staged)
            start = self._start_state(self.deployed) if starting else None
            self.plan = self._after_start(self.deployed)
            token = self._lease.token
            deployments = [
                Deployment(plan, self.spark, self.directory, self.deployed, self.observe, token)
                for plan in (bound(segment, self.directory.path / ITERATIONS) for segment in segments(self.plan))
            ]
            for spec in wanted:
                deployment = deployments[spec.segment]
                query: Query
                if isinstance(spec, KeyGroupQueryPlan):
                    begins = start if spec.name in starting else None
                    query = KeyGroupQuery(deployment, spec.name, spec.stages, malformed, begins)
                else:
                    assert isinstance(spec, NativeQueryPlan)
                    plan = deployment.plan
                    beside = [other for other in wanted if isinstance(other, KeyGroupQueryPlan)]
                    sinks = [sink for other in beside if other.segment == spec.segment for sink in other.sinks]
                    query = NativeQuery(deployment, spec.name, spec.sinks, spec.aggregate, plan.graph.upstream(*sinks))
                self._queries.append(query)
                self._segments.append(spec.segment)
            self._prepare_savepoints(self._lease, self.deployed)
            names = ", ".join(query.name for query in self._queries)
            self._tell(f"starting {'query' if len(self._queries) == 1 else 'queries'} {names}")
            with small_rows(self.spark) if self._has_small_rows(start) else contextlib.nullcontext():
                self._start_queries(attached)
            if is_connect(self.spark):
                self._record_running(attached, self.deployed)
        except BaseException:
            with contextlib.suppress(Exception):  # such as where the JVM is gone, which the error says
                self.stop()
            raise

    def _restoring(self, start: str, names: Iterable[str], fresh: bool) -> str:
        epochs = [epoch for name in names if (epoch := self.directory.last_epoch(name)) is not None]
        if not fresh and epochs:
            return f"restoring state: from epoch {max(epochs)} in {self.directory.path}"
        return f"restoring state: from the savepoint {start}" if start else "restoring state: there is none yet"

    def _tell(self, phase: str) -> None:
        if phase not in self._phases:
            self._phases.add(phase)
            self.observe(PhaseBegun(phase))

    def _tell_phases(self) -> None:
        """Say what the queries do until each has committed an epoch: the first may take minutes."""
        for query in self._queries:
            phase = query.phase() if not query.epochs else None
            if phase is not None:
                self._tell(phase)

    def _start_queries(self, attached: attaching.RunningQueries | None) -> None:
        for query in self._queries:
            if query.over:
                if attached is not None:
                    attached.queries[query.name].stop()
                    sources.forget(self.spark, self.directory.path, query.name, attached.running.started)
                continue
            try:
                if attached is None:
                    query.start()
                else:
                    query.attach(attached.queries[query.name], attached.running.started)
            except Exception as error:
                raise translated(error, self.plan, query.name, self.spark) from error

    def _has_small_rows(self, start: StartingState | None) -> bool:
        """Return whether workers get small rows: records without bytes in them, and no pages of state."""
        graph = self.plan.graph
        records = [graph.records_of(edge) for edge in graph.edges]
        paged = start is not None or any(isinstance(node, IterationNode) for node in graph.nodes)
        return not paged and not may_be_large(r.schema for r in records if r is not None)

    def _left_running(
        self, previous: Deployed | None, record: Deployed, staged: Iterable[str], names: Iterable[str]
    ) -> attaching.RunningQueries | None:
        """Return the previous job's queries, if they run on a server and are what this job would start."""
        if not is_connect(self.spark) or previous is None or previous.restored:
            return None
        if (previous.fingerprint, previous.event_time_unit) != (record.fingerprint, record.event_time_unit):
            return None
        if previous.start and self._without_epoch(staged):
            return None  # what they begin with is written anew
        return attaching.find(self.directory, self.spark, previous, list(names))

    def _record_running(self, attached: attaching.RunningQueries | None, deployed: Deployed) -> None:
        """Record the queries, for the next job and for themselves."""
        assert self._lease is not None
        token = self._lease.token
        if attached is not None:
            going_on = {query.name: attached.running.queries[query.name] for query in self._queries if not query.over}
            running = msgspec.structs.replace(attached.running, token=token, version=deployed.version, queries=going_on)
            attaching.record(self.directory, running)
            self.observe(QueriesTakenOver(tuple(running.queries), running.server[0], running.session))
            return
        ids = {query.name: (query.query.id, query.query.runId) for query in self._queries if query.query is not None}
        server, session = server_of(self.spark), self.spark.client._session_id
        settings = attaching.settings_of(self.spark)
        attaching.record(
            self.directory, attaching.Running(token, token, deployed.version, server, session, settings, ids)
        )

    def run(self, stopped: Callable[[], bool] = lambda: False, poll: float = 0.1) -> str:
        """Run until the input has ended ("finished") or `stopped` says so ("stopped").

        Raises what made a query fail.
        """
        with naming_store(self.plan.name, self.directory.path, "the job goes on from its checkpoint"):
            return self._run(stopped, poll)

    def _run(self, stopped: Callable[[], bool], poll: float) -> str:
        planned = self.plan
        attempt = 1
        while True:
            try:
                self.start(stopped)
                with watching(self.spark, self.observe):
                    return self._go_on(stopped, poll)
            except SlowStartError as error:
                attempt = 2 if any(query.epochs for query in self._queries) else attempt + 1
                if attempt > len(PAUSES) + 1:
                    raise
                delayed = StartDelayed(str(error), attempt, len(PAUSES) + 1, PAUSES[attempt - 2])
            finally:
                self.stop()
            self.plan = planned
            if self.deployed is not None:  # its state is this code's from now on, and may be there already
                self.start_as = replace(self.start_as, fresh=False, savepoint=False)
            if not self._pause(delayed, stopped, poll):
                return "stopped"

    def _pause(self, delayed: StartDelayed, stopped: Callable[[], bool], poll: float) -> bool:
        """Wait before the queries start again; False where the job is asked to stop meanwhile.

        The lease is held, so that others see that the job is alive.
        """
        self._lease = wait_for(self.directory, self.start_as.owner, self.start_as.patience, stopped)
        try:
            self.observe(delayed)
            end = time.monotonic() + delayed.pause
            while time.monotonic() < end and not stopped():
                time.sleep(poll)
            if not stopped():
                return True
        except BaseException:
            self.stop()
            raise
        self.stop()
        return False

    def _go_on(self, stopped: Callable[[], bool], poll: float) -> str:
        if self.plan.execution.boundedness is Boundedness.BOUNDED and self._end is None:
            self._end = End.DATA if self.plan.execution.goes_on else End.INPUT
        if any(query.ends for query in self._queries):
            self.drain()
        assert self._saving is not None
        while not stopped() and not self._told_to_stop(self._saving):
            self._tell_phases()
            alive = self._advance()
            if not alive and self._finish(self._saving):
                return "finished"
            time.sleep(poll)
        self._stop_with_savepoint(self._saving)
        return "stopped"

    def _advance(self) -> list[Query]:
        """Return the queries that go on. A query ends when those that hand something on to it have ended."""
        alive: list[Query] = []
        first: int | None = None
        """The first segment in which a query goes on."""

        for segment, query in zip(self._segments, self._queries, strict=True):
            end = self._end if first is None or first == segment else None
            if query.advance(end):
                alive.append(query)
                first = segment if first is None else first
        return alive

    def _told_to_stop(self, saving: SavepointSchedule) -> bool:
        """Return whether somebody asks for a savepoint with which the job stops; a drained one makes it drain."""
        wanted = saving.look()
        if any(request.drain for request in wanted):
            self.drain()
        return any(request.stop for request in wanted)

    def _finish(self, saving: SavepointSchedule) -> bool:
        """End the job, whose queries have nothing left to do; False where somebody asks for the end of its input."""
        drained = saving.at_end()
        if drained and self._end is not End.INPUT:
            self.drain()
            return False
        saving.give_up()
        self._stop_queries("no end was recorded; start the job again, and it ends")
        self._tell_of_last_epochs()
        path = self.plan.execution.savepoint.path
        if path is None and self.plan.execution.goes_on:
            return True  # the next job goes on from its checkpoint
        if path is not None or drained:
            self.observe(QueriesStopped())
        if path is not None:
            self._save_tables(path, "at the end of the data")
        self.directory.finish()
        if saving.take_drained(drained):  # else they are asked for again
            remove_tree(self.directory.path / ITERATIONS)
        return True

    def _save_tables(self, path: str, reason: str) -> None:
        """Write a savepoint of the state of the stopped queries."""
        assert self.deployed is not None
        assert self._saving is not None
        checkpoint = FrozenCheckpoint(self.directory.path, self.directory.sources, self._saving.last_epochs())
        self._saving.write_tables(self.deployed, checkpoint, path, reason)

    def _prepare_savepoints(self, lease: HeldLease, deployed: Deployed) -> None:
        forget(self.directory, lease.token)
        self.directory.settle(False)
        queries = key_group_queries(self.plan, self._lanes)
        names = {query.name for query in queries}
        running = [query for query in self._queries if query.name in names]
        self._saving = SavepointSchedule(self.plan, self.spark, self.directory, lease, queries, running, self.observe)
        self._saving.begin(deployed)

    def _stop_with_savepoint(self, saving: SavepointSchedule) -> None:
        """Take the requested savepoints with which the job stops: nothing is processed after them."""
        wanted = saving.at_stop()
        if not wanted:
            return
        for query in self._queries:
            query.halt()
        saving.give_up()
        while not all(query.halt() for query in self._queries):
            time.sleep(0.02)
        self._stop_queries("no savepoint was taken; resume the job, and suspend it with a savepoint again")
        self._tell_of_last_epochs()
        self.observe(QueriesStopped())
        saving.take_stopped(wanted)

    def _stop_queries(self, otherwise: str) -> None:
        """Stop all queries; raise where one has failed, or where its sinks are ahead of its state."""
        for query in self._queries:
            query.stop()
        for query in self._queries:
            if query.failure is not None:
                raise translated(query.failure, self.plan, query.name, self.spark) from query.failure
            if not query.settled():
                raise StateError(
                    f"{self.plan.name}: Spark did not log the last epoch of query '{query.name}' within {GRACE:.0f} s,"
                    f" so that {otherwise}"
                )

    def _tell_of_last_epochs(self) -> None:
        """Tell functions of each query's last epoch: where the job goes on, the next job tells them again."""
        for query in self._queries:
            epoch = self.directory.last_epoch(query.name)
            if epoch is None:
                continue
            try:
                tell_of_last_epoch(query.plan, query.plan.graph.upstream(*query.writer.tail.sinks), epoch, self.spark)
            except Exception as error:
                raise translated(error, self.plan, query.name, self.spark) from error

    def drain(self) -> None:
        """End the input here (Flink: `stop --drain`).

        What has arrived is processed, the watermark goes to its end, and the job finishes.
        """
        self._end = End.INPUT

    def stop(self) -> None:
        """Stop all queries, after the epochs that are being committed, and let others write."""
        if self._saving is not None:
            self._saving.give_up()
        try:
            with contextlib.ExitStack() as each:  # also those after one that cannot be stopped
                others = self._is_taken_over()
                for query in reversed(self._queries):
                    each.callback(query.leave if others else query.stop)
            written_ahead.end(self.directory.path)
            if self._queries and self._saving is not None:
                self._saving.wait()
                with contextlib.suppress(UnifiedError, OSError):
                    self.may_write()
                    self.directory.settle(all(query.settled() for query in self._queries))
            if self._queries and is_connect(self.spark):
                self._record_none_running()
            starting = [query.name for query in self._queries if isinstance(query, KeyGroupQuery)]
            if self._lease is not None and starting and not self._without_epoch(starting):
                remove_tree(self.directory.path / INITIAL)
        finally:  # no query runs any more, or its JVM or server is away, and it may not write without the lease
            self._queries.clear()
            self._segments.clear()
            if self._lease is not None:
                self._lease.release()
                self._lease = None

    def _is_taken_over(self) -> bool:
        """Return whether another job goes on with the queries, or is about to say so: this one was paused.

        Otherwise that job has queries of its own.
        """
        if self._lease is None or not self._queries or not is_connect(self.spark):
            return False
        with contextlib.suppress(OSError):
            if self.directory.greatest() > self._lease.token:
                running = attaching.running(self.directory)
                return running is None or running.token <= self._lease.token or running.started < running.token
        return False

    def _record_none_running(self) -> None:
        assert self._lease is not None
        token = self._lease.token
        with contextlib.suppress(UnifiedError, OSError):
            self.may_write()
            attaching.record(self.directory, attaching.Running(token, token))

    @property
    def token(self) -> int | None:
        """The fencing token of the lease, while it is held."""
        return self._lease.token if self._lease is not None else None

    def activity(self) -> tuple[int, bool]:
        """Return how many epochs have been committed, and whether one is being worked on."""
        return sum(query.epochs for query in self._queries), any(query.busy() for query in self._queries)

    def may_write(self) -> None:
        """Raise where another job has taken over."""
        if self._lease is not None:
            self._lease.check()

    def _start_state(self, deployed: Deployed) -> StartingState | None:
        """Return the savepoint to start from, for queries without a committed epoch."""
        remove_tree(self.directory.path / INITIAL)
        if not deployed.start:
            return None
        ignore = self.plan.execution.savepoint.ignore_unclaimed
        start = starting_state(self.plan, self.spark, deployed.start, ignore)
        self.directory.begin_after(start.manifest.positions)
        return start

    def _without_epoch(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if self.directory.last_epoch(name) is None]

    def _after_start(self, deployed: Deployed) -> Plan:
        """Return the plan whose sources read what comes after the savepoint that the deployment started from."""
        if not deployed.start:
            return self.plan
        return after(self.plan, self.directory.positions(), self.plan.execution.savepoint.ignore_unclaimed)

    def _record(self, lanes: Lanes, wanted: Sequence[QueryPlan]) -> Deployed:
        sources = {query.name: query.sources for query in wanted}
        staged = {query.name: query.stages for query in wanted if isinstance(query, KeyGroupQueryPlan)}
        keyed = [routed.program for stages in staged.values() for level in stages.levels for routed in level.values()]
        levels = {
            name: [sorted(routed.program.steps[0].uid for routed in level.values()) for level in stages.levels]
            for name, stages in staged.items()
        }
        for name, stages in staged.items():
            if stages.iterations:
                levels[name].append(sorted(stages.iterations.values()))
        options = self.plan.execution.streaming
        code = deployed_code(self.plan)
        return Deployed(
            version=0,
            id="",
            pipeline=self.plan.name,
            fingerprint=deployment_fingerprint(code),
            generation=0,
            max_parallelism=options.max_parallelism,
            tasks=self.plan.execution.parallelism or partitions(self.spark),
            backend=options.backend,
            lanes=lanes.numbers,
            levels=levels,
            code=code,
            loaded=self.start_as.loaded,
            reads={uid: name for name in staged for uid in sources[name]},
            sources=sources,
            keys={spec.steps[0].uid: layout_of(spec.keyed.python) for spec in keyed if spec.keyed is not None},
            event_time_unit=options.event_time_unit,
            start=self.plan.execution.starts_from or "",
            subtasks=self.plan.subtasks_of_state(self.plan.graph.nodes),
        )

    def _configure(self) -> None:
        options = self.plan.execution.streaming
        settings = {
            "spark.sql.streaming.stateStore.providerClass": PROVIDERS[options.backend],
            "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
            "spark.sql.streaming.minBatchesToRetain": str(options.retained),
            MAX_ROWS: "10000",
            # each micro-batch is planned anew, and what Spark infers of the columns of many lanes does not help it
            "spark.sql.constraintPropagation.enabled": "false",
        }
        manager = self._file_manager()
        if manager is not None:
            settings[FILES] = manager
        elif self.spark.conf.get(FILES, None) in _OURS:  # of a job before this one
            self.spark.conf.unset(FILES)
        if self.plan.execution.parallelism is not None:
            settings[PARTITIONS] = str(self.plan.execution.parallelism)
        for key, value in settings.items():
            self.spark.conf.set(key, value)

    def _file_manager(self) -> str | None:
        """Return the class that writes the files of Spark's checkpoint; None where Spark or a setting chooses it."""
        if is_local(self.directory.path):
            return LOCAL_FILES
        if is_connect(self.spark) or self.spark.conf.get(FILES, None) not in (None, *_OURS):
            return None
        return bucket_files.install(self.spark, self.directory.path)
