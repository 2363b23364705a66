"""Savepoints of a stream that goes round: tables of its state and of what is fed back, from which a job starts."""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from upath import UPath

from dagster_unified.api import (
    BroadcastProcessFunction,
    CheckpointedFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    OutputTag,
    Pipeline,
    ProcessFunction,
    iterations,
)
from dagster_unified.cli import main
from dagster_unified.connectors import FileSink, ParquetSource
from dagster_unified.engine.events import EpochCommitted, IterationEpochCommitted
from dagster_unified.engine.iterations.files import Block, StoredMessage
from dagster_unified.engine.iterations.levels import SparkLevels
from dagster_unified.engine.iterations.savepoints import _by_buffer, start_iteration
from dagster_unified.engine.state_tables.savepoints import StartingState, described, starting_state
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.engine.streaming.savepoints.request import take
from dagster_unified.errors import StateError
from dagster_unified.graph.loops import compile_loop
from dagster_unified.graph.nodes import IterationNode
from dagster_unified.state import Savepoint
from dagster_unified.state.diff import diff
from dagster_unified.state.manifest import Feedback, IterationState, commit
from tests.iterations.support import Body, Hop, Visits

HOPS = 3
FILES = [range(60), range(40, 100), range(5)]
EXPECTED = Counter((number, hop) for file in FILES for number in file for hop in range(HOPS + 1))
LIMITS = MapStateDescriptor("limits", str, int)
COUNTS = OutputTag("counts", Hop)


class Limited(BroadcastProcessFunction[Hop, Hop, Hop]):
    """Sends a hop on, as far as the broadcast state allows."""

    def process_element(self, value, ctx):
        most = ctx.get_broadcast_state(LIMITS).get("hops")
        return [value._replace(hops=value.hops + 1)] if value.hops < most else []

    def process_broadcast_element(self, value, ctx):
        ctx.get_broadcast_state(LIMITS).put("hops", value.hops)
        return []


class Counted(ProcessFunction[Hop, Hop], CheckpointedFunction, iterations.IterationListener[Hop]):
    """Counts the hops of a subtask, and says how many they were when the iteration has ended."""

    def initialize_state(self, context):
        self.counts = context.get_operator_state_store().get_list_state(ListStateDescriptor("counts", int))
        self.count = sum(self.counts.get())

    def snapshot_state(self, context):
        self.counts.update([1] * self.count)

    def process_element(self, value, ctx):
        self.count += 1
        return [value]

    def on_iteration_terminated(self, context, collector):
        context.output(COUNTS, Hop(-1, self.count))


def hopping(folder, out, uid="visits", monitor=False, behind=False, bounded=False):
    """Records that take so many hops; all kinds of state see each hop."""
    pipeline = Pipeline("hopping")
    given = pipeline.from_source(
        ParquetSource(f"{folder}/in", Hop, "numbers", monitor=monitor, max_files_per_trigger=1)
    )
    limits = pipeline.from_source(ParquetSource(f"{folder}/limits", Hop, "limits"))

    def build(variables, data):
        counted = variables[0].process(Counted(), Hop).uid("counted")
        seen = counted.key_by("number").process(Visits()).uid(uid)
        further = seen.connect(data[0].broadcast(LIMITS)).process(Limited()).uid("limited")
        return iterations.IterationBodyResult([further], [seen, counted.get_side_output(COUNTS)])

    config = iterations.IterationConfig(name="loop", uid="loop")
    if bounded:
        data = iterations.ReplayableDataStreams(replayed=[limits])
        seen, counts = iterations.iterate_bounded_streams_until_termination([given], data, Body(build), config)
    else:
        seen, counts = iterations.iterate_unbounded_streams([given], [limits], Body(build), config)
    if behind:
        seen = seen.key_by("number").process(Visits()).uid("behind")
    seen.sink_to(FileSink(f"{folder}/{out}", name="out"))
    counts.sink_to(FileSink(f"{folder}/{out}-counts", name="counts"))
    return pipeline


def given(folder):
    for number, file in enumerate(FILES):
        (folder / "in").mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist([{"number": n, "hops": 0} for n in file]), folder / f"in/{number}.parquet")
    (folder / "limits").mkdir()
    pq.write_table(pa.Table.from_pylist([{"number": 0, "hops": HOPS}]), folder / "limits/0.parquet")


def planned(folder, name, parallelism=2, groups=4, start=None, leaves=None, **changed):
    options = {
        "execution.runtime-mode": "STREAMING",
        "execution.checkpointing.dir": f"{folder}/checkpoints {name}",
        "pipeline.max-parallelism": groups,
        "parallelism.default": parallelism,
        **({"execution.state-recovery.path": start} if start else {}),
        **({"execution.savepoint.path": leaves} if leaves else {}),
    }
    return hopping(folder, f"out {name}", **changed).plan(options)


def taken(plan, folder, name, spark, path, then="running"):
    directory = CheckpointDirectory(f"{folder}/checkpoints {name}", "hopping")
    found = take(plan, directory, "asker", "by hand", lambda: spark, path, then)
    assert not found.error
    return found


class Job:
    """A job in another thread, which stops when it is told to."""

    def __init__(self, plan, spark, query="main", slow=0.0):
        self.query, self.slow = query, slow
        self.epochs, self.stopped, self._enough = 0, Event(), Event()
        self.job = StreamingJob(plan, spark, Start("test", patience=0.5), self.observe)

    def observe(self, event):
        self.epochs += isinstance(event, EpochCommitted) and event.query == self.query
        if self.epochs >= 2:
            self._enough.set()
            time.sleep(self.slow)

    def until_enough(self):
        while not (self._enough.wait(0.1) or self.outcome.done()):
            pass

    def __enter__(self):
        self.thread = ThreadPoolExecutor(1)
        self.outcome = self.thread.submit(self.job.run, self.stopped.is_set)
        return self

    def __exit__(self, *_):
        self.stopped.set()
        assert self.outcome.result() == "stopped"
        self.thread.shutdown()


def written(folder, name, what="", until=None):
    """The rows that a job has written, up to the end of an epoch."""
    files = sorted((folder / f"out {name}{what}").glob("epoch-*.parquet"))
    files = [f for f in files if until is None or int(f.name.split("-")[1]) <= until]
    return [tuple(row.values()) for file in files for row in pq.read_table(file).to_pylist()]


def visited(savepoint, uid):
    """The hops that an operator has counted."""
    visits = {row["number"]: dict(row["visits"]) for row in savepoint.keyed_state(uid).to_pylist()}
    return Counter({(n, hop): count for n, hops in visits.items() for hop, count in hops.items()})


@pytest.mark.rotates("stories")
def test_a_job_starts_from_the_tables_of_a_loop_that_another_has_left(spark, tmp_path, monkeypatch, capsys):
    """Each with other subtasks and key groups: one savepoint is of a job that runs, the next of one that is stopped."""
    monkeypatch.setattr("dagster_unified.engine.streaming.iterations.MOMENT", 0)  # so that each epoch has one round
    given(tmp_path)
    first, left, again = planned(tmp_path, "first", monitor=True), str(tmp_path / "left"), str(tmp_path / "again")
    with Job(first, spark) as job:
        job.until_enough()
        assert taken(first, tmp_path, "first", spark, left).tables == left
    held = Savepoint.read(left)
    (loop,) = held.iterations
    before = written(tmp_path, "first", until=held.epochs["main"])
    seen = Counter(before)
    assert (loop.uid, loop.round) == ("loop", held.epochs["main"])
    assert {one.uid for one in held.operators} == {"loop.counted", "loop.visits", "loop.limited"}
    assert visited(held, "loop.visits") == seen
    assert sum(len(row["counts"]) for row in held.keyed_state("loop.counted").to_pylist()) == seen.total()
    assert held.keyed_state("loop.limited").column("limits").to_pylist() == [[("hops", HOPS)]]
    sent = Counter({(n, hop + 1): count for (n, hop), count in seen.items() if hop < HOPS})
    assert Counter(tuple(row.values()) for row in held.feedback("loop.counted").to_pylist()) == sent - seen
    with pytest.raises(SystemExit, match="0"):
        main(["state", "ls", left])
    assert f"{len(held.feedback('loop.counted'))} to loop.counted" in capsys.readouterr().out
    copied = held.without("loop.limited").write(str(tmp_path / "copied"))
    assert copied.feedback("loop.counted") == held.feedback("loop.counted")

    with pytest.raises(StateError, match=r"has state of operator 'Visits' \(uid 'loop.visits'\), and no operator has"):
        StreamingJob(planned(tmp_path, "other", start=left, uid="others"), spark, Start("test")).run()

    second = planned(tmp_path, "second", parallelism=3, groups=7, start=left, monitor=True)
    with Job(second, spark) as job:
        job.until_enough()
    assert taken(second, tmp_path, "second", spark, again).tables == again
    until_stopped = written(tmp_path, "second")
    monkeypatch.undo()
    for name, start in (("second", left), ("third", again)):
        ended = planned(tmp_path, name, parallelism=1, groups=7, start=start)
        assert StreamingJob(ended, spark, Start("test", patience=0.5)).run() == "finished"
    assert Counter(before + written(tmp_path, "second")) == EXPECTED
    assert Counter(before + until_stopped + written(tmp_path, "third")) == EXPECTED
    for name in ("second", "third"):
        assert (name, sum(count for _, count in written(tmp_path, name, "-counts"))) == (name, EXPECTED.total())


@pytest.mark.rotates("stories")
def test_state_behind_a_loop_and_what_is_handed_on_to_it_are_in_the_tables(spark, tmp_path, capsys):
    """One savepoint is of a job whose queries both run, the other of one whose second query was behind the first."""
    given(tmp_path)
    first = planned(tmp_path, "first", monitor=True, behind=True)
    running, left = (str(tmp_path / name) for name in ("running", "left"))
    with Job(first, spark, "main-1") as job:
        job.until_enough()
        assert taken(first, tmp_path, "first", spark, running).tables == running
    query = tmp_path / "checkpoints first/hopping/spark/main-1"
    last = max(int(log.name) for log in (query / "commits").iterdir() if log.name.isdigit())
    for log in ("commits", "offsets"):  # as if it had been stopped before that epoch
        (query / log / str(last)).unlink()
    assert taken(first, tmp_path, "first", spark, left).tables == left
    for name in ("running", "left"):
        held = Savepoint.read(str(tmp_path / name))
        before = written(tmp_path, "first", until=held.epochs["main-1"])
        handed_on = sum(table.rows for table in held.manifest.handed_on)
        assert visited(held, "behind") == Counter(before)
        assert handed_on == visited(held, "loop.visits").total() - len(before)
        second = planned(tmp_path, name, parallelism=3, groups=7, start=str(tmp_path / name), behind=True)
        assert StreamingJob(second, spark, Start("test")).run() == "finished"
        assert Counter(before + written(tmp_path, name)) == EXPECTED
    assert handed_on > 0
    found = {one.uid: one for one in diff(Savepoint.read(str(tmp_path / "running")), held)}
    uid = held.manifest.handed_on[0].uid
    assert found[uid].same + found[uid].only_b == handed_on
    assert len(found[uid].first_only_b) == min(found[uid].only_b, 10)
    with pytest.raises(SystemExit, match="0"):
        main(["state", "ls", left])
    assert "handed on by" in capsys.readouterr().out


@pytest.mark.rotates("stories")
def test_a_loop_and_state_behind_it_are_left_at_the_end_of_the_data(spark, tmp_path):
    given(tmp_path)
    later, left = tmp_path / f"in/{len(FILES) - 1}.parquet", str(tmp_path / "left")
    later.rename(tmp_path / "later")
    first = planned(tmp_path, "first", behind=True, leaves=left)
    assert StreamingJob(first, spark, Start("test")).run() == "finished"
    (tmp_path / "later").rename(later)
    second = planned(tmp_path, "second", parallelism=3, groups=7, start=left, behind=True)
    assert StreamingJob(second, spark, Start("test")).run() == "finished"
    assert Counter(written(tmp_path, "first") + written(tmp_path, "second")) == EXPECTED
    assert not written(tmp_path, "first", "-counts")
    assert sum(count for _, count in written(tmp_path, "second", "-counts")) == EXPECTED.total()


@pytest.mark.rotates("stories")
def test_what_came_into_a_bounded_loop_is_in_the_tables(spark, tmp_path, capsys):
    given(tmp_path)
    first, left = planned(tmp_path, "first", bounded=True), str(tmp_path / "left")
    with Job(first, spark, slow=1) as job:
        job.until_enough()
    assert taken(first, tmp_path, "first", spark, left).tables == left
    held = Savepoint.read(left)
    (loop,) = held.iterations
    assert (loop.uid, loop.round, loop.bounded) == ("loop", -1, True)
    came = sum(map(len, FILES[: held.epochs["main"] + 1]))
    assert len(held.feedback("loop.counted")) == came < sum(map(len, FILES))
    assert held.feedback("loop.limited", broadcast=True, replayed=True).to_pylist() == [{"number": 0, "hops": HOPS}]
    with pytest.raises(SystemExit, match="0"):
        main(["state", "ls", left])
    shown = capsys.readouterr().out
    assert f"{came} to loop.counted" in shown
    assert "1 to loop.limited by" in shown
    again = held.write(str(tmp_path / "again"))
    assert again.feedback("loop.counted") == held.feedback("loop.counted")
    with pytest.raises(SystemExit, match="0"):
        main(["state", "diff", left, str(tmp_path / "again")])
    assert f"loop.counted: {came} records that wait are the same, 0 changed, 0 only in A" in capsys.readouterr().out

    with pytest.raises(
        StateError, match=r"records that wait in the bounded iteration 'loop' \(uid 'loop'\), and no bo"
    ):
        StreamingJob(planned(tmp_path, "other", start=left), spark, Start("test")).run()

    second = planned(tmp_path, "second", parallelism=3, groups=7, start=left, bounded=True)
    rounds = []

    def observe(event):
        rounds.extend([event] if isinstance(event, IterationEpochCommitted) else [])

    one = StreamingJob(second, spark, Start("test", patience=0.5), observe)
    assert one.run(lambda: bool(rounds)) == "stopped"
    rescaled = planned(tmp_path, "second", parallelism=1, groups=7, start=left, bounded=True)
    assert StreamingJob(rescaled, spark, Start("test", patience=0.5)).run() == "finished"
    assert Counter(written(tmp_path, "second")) == EXPECTED
    assert sum(count for _, count in written(tmp_path, "second", "-counts")) == EXPECTED.total()


@pytest.mark.parametrize(
    ("reader", "columns", "why"),
    [
        (
            "gone",
            {"number": pa.int64(), "hops": pa.int64()},
            "records that wait for operator 'loop.gone', and no input goes to",
        ),
        (
            "counted",
            {"number": pa.int64()},
            "'loop.counted' have the columns number: int64 in the savepoint, and number: int64, hops: int64 now",
        ),
    ],
)
def test_records_that_were_fed_back_need_their_operator_and_their_columns(tmp_path, reader, columns, why):
    plan = planned(tmp_path, "first")
    node = next(node for node in plan.graph.nodes if isinstance(node, IterationNode))
    table = described(f"loop.{reader}", reader, pa.schema(columns), "operators-1")
    table = msgspec.structs.replace(table, rows=3)
    held = Savepoint.new("hopping").manifest
    held = msgspec.structs.replace(held, iterations=[IterationState("loop", "loop", 2, [Feedback(table)])])
    levels = SparkLevels(None, compile_loop(plan, node, 2), str(tmp_path))
    start = StartingState(plan, None, UPath(tmp_path), held, {})
    with pytest.raises(StateError, match=why):
        start_iteration(start, node, levels)


def test_records_that_wait_in_an_iteration_are_an_error_in_batch_which_begins_it_anew(tmp_path):
    table = described("loop.counted", "counted", pa.schema({"number": pa.int64(), "hops": pa.int64()}), "operators-1")
    waits = Feedback(msgspec.structs.replace(table, rows=3))
    held = IterationState("loop", "loop", -1, [waits], bounded=True)
    manifest = msgspec.structs.replace(Savepoint.new("hopping").manifest, iterations=[held])
    commit(UPath(tmp_path), manifest)
    streaming, batch = (
        hopping(tmp_path, "out", bounded=True).plan({"execution.runtime-mode": mode, "parallelism.default": 2})
        for mode in ("STREAMING", "BATCH")
    )
    assert starting_state(streaming, None, str(tmp_path), False).manifest.iterations == [held]
    with pytest.raises(StateError, match="BATCH begins a bounded iteration anew; start from it in STREAMING, or drop"):
        starting_state(batch, None, str(tmp_path), False)


def test_records_that_came_in_several_ways_are_not_told_apart(tmp_path):
    pipeline = Pipeline("ways")
    given = pipeline.from_collection([Hop(1, 0)], name="given")
    more = pipeline.from_collection([Hop(2, 0)], name="more")

    def build(variables, data):
        seen = variables[0].broadcast().union(data[0].rebalance()).map(lambda hop: hop, Hop)
        return iterations.IterationBodyResult([seen.filter(lambda hop: False)], [seen])

    data = iterations.ReplayableDataStreams(not_replayed=[more])
    (out,) = iterations.iterate_bounded_streams_until_termination([given], data, Body(build))
    out.sink_to(FileSink(f"{tmp_path}/out"))
    plan = pipeline.plan({"execution.runtime-mode": "STREAMING", "parallelism.default": 2})
    loop = compile_loop(plan, next(node for node in plan.graph.nodes if isinstance(node, IterationNode)), 2)
    (buffer,) = {route.target for own in loop.inputs for route in own.routes}
    with pytest.raises(StateError, match="that come to it in several ways"):
        list(_by_buffer(loop, [StoredMessage(buffer, 0, Block("file", 0, 1), 1)]))
