"""Operator state on Spark: over epochs, failures, modes, partitions and parallelisms."""

from collections.abc import Iterable
from typing import NamedTuple
from uuid import uuid4

import pytest

from dagster_unified.api import CheckpointedFunction, FlatMapFunction, ListStateDescriptor, MapFunction, Pipeline
from dagster_unified.connectors import CollectionSource, DeltaSink, ParquetSource
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.errors import ConfigurationError, StateError, UnifiedError
from dagster_unified.state import Savepoint
from tests.depth import rotated
from tests.support import arrive, table_rows


class Number(NamedTuple):
    value: int


class Out(NamedTuple):
    what: str
    value: int
    subtask: int
    known: str


class Buffered(FlatMapFunction, CheckpointedFunction):
    """Emits its subtask's numbers three at a time; those that wait are its state."""

    def initialize_state(self, context):
        store = context.get_operator_state_store()
        self.state = store.get_list_state(ListStateDescriptor("waiting", Number))
        self.waiting = self.state.get()

    def snapshot_state(self, context):
        self.state.update(self.waiting)

    def flat_map(self, value: Number) -> Iterable[Out]:
        self.waiting.append(value)
        if len(self.waiting) < 3:
            return []
        found, self.waiting = self.waiting, []
        return [Out("buffered", one.value, 0, "") for one in found]


class Known(MapFunction, CheckpointedFunction):
    """Emits with each number all that any subtask had seen in the run before; its own numbers are its state."""

    def initialize_state(self, context):
        store = context.get_operator_state_store()
        self.state = store.get_union_list_state(ListStateDescriptor("seen", int))
        self.known, self.mine = sorted(self.state.get()), []

    def open(self, runtime_context):
        self.subtask = runtime_context.get_index_of_this_subtask()

    def snapshot_state(self, context):
        self.state.update(self.mine)

    def map(self, value: Number) -> Out:
        self.mine.append(value.value)
        return Out("known", value.value, self.subtask, str(self.known))


def two(numbers, path):
    pipeline = Pipeline("two")
    rows = tuple(map(Number, numbers))
    stream = pipeline.from_source(CollectionSource(rows, Number, "numbers"))
    buffered = stream.flat_map(Buffered()).uid("buffered")
    buffered.union(stream.map(Known()).uid("known")).sink_to(DeltaSink(path, name="table", mode="append"))
    return pipeline


def run(spark, folder, pipeline, mode, **options):
    launched = {
        "execution.runtime-mode": mode,
        "execution.checkpointing.dir": f"{folder}/checkpoints {uuid4().hex}",
        "pipeline.max-parallelism": 4,
        **{name.replace("__", "-").replace("_", "."): value for name, value in options.items()},
    }
    plan = pipeline.plan(launched)
    if mode == "STREAMING":
        return StreamingJob(plan, spark, Start(uuid4().hex)).run()
    name = uuid4().hex
    return run_all(Run(plan, spark, IntermediateStore(f"{folder}/store {name}"), name, name))


@pytest.mark.parametrize(
    "modes",
    rotated([("BATCH", "STREAMING", "BATCH"), ("STREAMING", "BATCH", "STREAMING")], 1),
    ids=lambda modes: modes[0],
)
def test_lists_are_split_and_union_lists_given_whole_where_another_number_of_subtasks_goes_on(spark, tmp_path, modes):
    path, before = f"{tmp_path}/out", None
    for number, (mode, parallelism) in enumerate(zip(modes, (2, 3, 1), strict=True)):
        options = {"parallelism_default": parallelism, "execution_savepoint_path": f"{tmp_path}/savepoint {number}"}
        if before is not None:
            options["execution_state__recovery_path"] = before
        run(spark, tmp_path, two(range(4 * number + 4), path), mode, **options)
        before = options["execution_savepoint_path"]
        saved = Savepoint.read(before)
        assert saved.operator("buffered").key == ("subtask",)
        assert [(c.name, c.role) for c in saved.operator("known").states] == [("seen", "union")]
        rows = list(saved.rows("buffered"))
        assert {row["subtask"] for row in rows} <= set(range(parallelism))
        waiting = [one["value"] for row in rows for one in row.get("waiting", ())]
        emitted = [value for what, value, _, _ in table_rows(path) if what == "buffered"]
        assert sorted(emitted + waiting) == list(range(4 * number + 4))
        last = [row for row in table_rows(path) if row[0] == "known" and row[1] >= 4 * number]
        known = list(range(4 * number - 4, 4 * number)) if number else []
        assert {row[3] for row in last} == {str(known)}
        assert {row[2] for row in last} <= set(range(parallelism))


class Split(MapFunction, CheckpointedFunction):
    """Emits what its subtask saw before."""

    def initialize_state(self, context):
        self.seen = context.get_operator_state_store().get_list_state(ListStateDescriptor("seen", int))
        self.before = self.seen.get()

    def open(self, runtime_context):
        self.subtask = runtime_context.get_index_of_this_subtask()

    def snapshot_state(self, context):
        pass

    def map(self, value: Number) -> Out:
        self.seen.add(value.value)
        return Out("split", value.value, self.subtask, str(sorted(self.before)))


def parted(numbers, path):
    pipeline = Pipeline("parted")
    rows = tuple(map(Number, numbers))
    stream = pipeline.from_source(CollectionSource(rows, Number, "numbers"))
    chosen = stream.partition_custom(lambda key, count: key % count, "value")
    chosen.map(Split()).uid("split").set_parallelism(2).sink_to(DeltaSink(path, name="table"))
    return pipeline


@pytest.mark.a_day(1)
@pytest.mark.parametrize("modes", [("BATCH", "STREAMING"), ("STREAMING", "BATCH")], ids="-".join)
def test_state_stays_with_a_subtask_that_an_exchange_chooses(spark, tmp_path, modes):
    path, saved = f"{tmp_path}/out", f"{tmp_path}/savepoint"
    run(spark, tmp_path, parted(range(4), path), modes[0], execution_savepoint_path=saved)
    rows = {row["subtask"]: sorted(row["seen"]) for row in Savepoint.read(saved).rows("split")}
    assert rows == {0: [0, 2], 1: [1, 3]}
    run(spark, tmp_path, parted(range(6), path), modes[1], execution_state__recovery_path=saved)
    assert table_rows(path)[-2:] == [("split", 4, 0, "[0, 2]"), ("split", 5, 1, "[1, 3]")]


class Unlucky(MapFunction):
    def __init__(self, on):
        self.on = on

    def map(self, value: Number) -> Number:
        if value.value == self.on:
            raise ValueError("unlucky")
        return value


def files(tmp_path, count):
    return arrive(tmp_path / "in", *[[Number(2 * n), Number(2 * n + 1)] for n in range(count)])


def buffering(source, path, unlucky=-1):
    pipeline = Pipeline("buffering")
    numbers = pipeline.from_source(ParquetSource(source, Number, name="numbers", max_files_per_trigger=1))
    buffered = numbers.map(Unlucky(unlucky)).flat_map(Buffered()).uid("buffered")
    buffered.sink_to(DeltaSink(path, name="table"))
    return pipeline


def test_a_job_goes_on_with_its_operator_state_after_a_failure_and_not_with_other_subtasks(spark, tmp_path):
    source, path = files(tmp_path, 5), f"{tmp_path}/out"
    options = {"execution_checkpointing_dir": f"{tmp_path}/kept", "parallelism_default": 1}
    with pytest.raises(UnifiedError, match="unlucky"):
        run(spark, tmp_path, buffering(source, path, unlucky=6), "STREAMING", **options)
    assert [row[1] for row in table_rows(path)] == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ConfigurationError, match="'buffered' has 2 subtasks, and the checkpoint has"):
        run(spark, tmp_path, buffering(source, path), "STREAMING", **{**options, "parallelism_default": 2})
    saved = {"execution_savepoint_path": f"{tmp_path}/savepoint"}
    run(spark, tmp_path, buffering(source, path), "STREAMING", **options, **saved)
    assert [row[1] for row in table_rows(path)] == list(range(9))
    assert list(Savepoint.read(f"{tmp_path}/savepoint").rows("buffered")) == [{"subtask": 0, "waiting": [{"value": 9}]}]


def test_operator_state_that_no_operator_claims_is_an_error(spark, tmp_path):
    path, saved = f"{tmp_path}/out", f"{tmp_path}/savepoint"
    run(spark, tmp_path, parted(range(4), path), "BATCH", execution_savepoint_path=saved)
    with pytest.raises(StateError, match=r"state of operator 'Split' \(uid 'split'\), and no operator"):
        run(spark, tmp_path, two(range(6), path), "BATCH", execution_state__recovery_path=saved)
