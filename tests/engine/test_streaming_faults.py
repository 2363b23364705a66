"""What a STREAMING job survives: `kill -9` anywhere, torn metadata, another job, an unwritable disk.

Nothing is lost, nothing counted twice.
"""

import contextlib
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from botocore.exceptions import EndpointConnectionError
from deltalake import DeltaTable

from dagster_unified.api import KeyedProcessFunction, Pipeline, ValueStateDescriptor, WatermarkStrategy
from dagster_unified.connectors import DeltaSink, ParquetSource
from dagster_unified.engine.events import EpochCommitted
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.control import ControlFile
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.engine.streaming.key_group_query import KeyGroupQuery
from dagster_unified.errors import ConfigurationError, LeaseLostError, StateError, UnifiedError
from dagster_unified.operators.drivers.key_groups import ControlEvent
from tests.depth import NIGHTLY, SEED, chance, rotated
from tests.engine.killed_job import OPTIONS, Row, add, build
from tests.support import streaming

ROOT = Path(__file__).parents[2]
POINTS = ("before", "staged", "committed")
KILLS, FILES = (20, 60) if NIGHTLY else (2, 4)
"""A kill takes as long as Spark takes to start, and a file as long as a micro-batch."""


def table(path):
    return DeltaTable(str(path)).to_pyarrow_table()


@pytest.mark.rotates("kills")
def test_a_job_that_is_killed_again_and_again_loses_nothing_and_doubles_nothing(spark, tmp_path):
    epochs = chance("kills")
    rows = inputs(tmp_path / "in", FILES)
    for killed in range(KILLS):
        point = POINTS[(SEED + killed) % 3]
        command = [
            sys.executable,
            "-m",
            "tests.engine.killed_job",
            str(tmp_path),
            str(epochs.choice((1, 2, 2, 3) if NIGHTLY else (1, 2))),
            point,
        ]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
        assert done.returncode == -9, done.stderr[-2000:]
    plan = build(tmp_path, tmp_path).plan({**OPTIONS, "execution.checkpointing.dir": str(tmp_path / "checkpoints")})
    assert StreamingJob(plan, spark, Start("last", patience=0.5)).run() == "finished"
    assert_exactly_once(tmp_path, rows)


def inputs(folder, files):
    """So many files of fifty rows; gives all rows."""
    values = random.Random(files)
    folder.mkdir()
    rows = [{"key": values.choice("abcdef"), "at": i, "value": values.randrange(100)} for i in range(50 * files)]
    for number in range(files):
        pq.write_table(pa.Table.from_pylist(rows[number * 50 : number * 50 + 50]), folder / f"{number:02d}.parquet")
        os.utime(folder / f"{number:02d}.parquet", (1_700_000_000 + number, 1_700_000_000 + number))
    return rows


def assert_exactly_once(folder, rows):
    assert sorted(table(folder / "all").to_pylist(), key=lambda r: r["at"]) == rows
    totals = {r["key"]: r["value"] for r in table(folder / "totals").to_pylist()}
    assert totals == {key: sum(r["value"] for r in rows if r["key"] == key) for key in "abcdef"}


@pytest.fixture
def small_disk(tmp_path):
    """A disk of its own, of a few megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a tmpfs can only be mounted by root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder):
    with contextlib.suppress(OSError), (folder / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize("epochs", rotated([1, 3], 1))
def test_a_full_disk_fails_the_job_and_once_there_is_room_it_goes_on(spark, tmp_path, small_disk, epochs):
    rows = inputs(tmp_path / "in", 5)
    plan = build(tmp_path, small_disk).plan({**OPTIONS, "execution.checkpointing.dir": str(small_disk / "checkpoints")})
    committed = []

    def observe(event):
        if isinstance(event, EpochCommitted):
            committed.append(event)
            if len(committed) == epochs:
                fill(small_disk)

    with pytest.raises(UnifiedError, match="No space left on device"):
        StreamingJob(plan, spark, Start("one"), observe).run()
    (small_disk / "ballast").unlink()
    assert StreamingJob(plan, spark, Start("two", patience=0.5)).run() == "finished"
    assert_exactly_once(small_disk, rows)


# One writer


def test_a_second_job_waits_for_the_first_or_fails_with_a_sentence(tmp_path):
    directory = CheckpointDirectory(str(tmp_path), "p")
    first = directory.take("one", patience=2)
    with pytest.raises(
        LeaseLostError, match="another job, one, is writing and gave a sign of life 0 s ago; stop it first"
    ):
        directory.take("two", patience=2)
    first.release()
    second = directory.take("two", patience=2)
    with pytest.raises(LeaseLostError, match="another job has taken over"):
        first.check()
    second.check()
    second.release()


def test_a_holder_that_is_silent_is_given_up_and_may_not_write_any_more(tmp_path):
    directory = CheckpointDirectory(str(tmp_path), "p")
    dead = directory.take("dead", patience=0.4)
    dead._stopped.set()  # as if its process were stopped: it beats no more
    end = time.monotonic() + 10
    while True:
        try:
            alive = directory.take("alive", patience=0.4)
            break
        except LeaseLostError:
            assert time.monotonic() < end
            time.sleep(0.05)
    with pytest.raises(LeaseLostError):
        dead.check()
    alive.check()
    assert directory.holder().owner == "alive"
    alive.release()


def counting(tmp_path, **options):
    pipeline = Pipeline("p")
    pairs = pipeline.from_collection([("a", 1), ("b", 2), ("a", 3)], tuple[str, int])
    pairs.key_by(options.pop("by", "f0")).sum("f1").uid(options.pop("uid", "sums")).sink_to(
        DeltaSink(str(tmp_path / "out"), mode="upsert", key="f0", name="out")
    )
    return pipeline.plan({**streaming(tmp_path, 2), **options})


def test_a_job_that_was_overtaken_writes_nothing(spark, tmp_path):
    class Overtaken(DeltaSink):
        def stage(self, frame, attempts, ship):
            CheckpointDirectory(str(tmp_path / "checkpoints"), "p").take("another", patience=0)
            return super().stage(frame, attempts, ship)

    pipeline = Pipeline("p")
    pipeline.from_collection([("a", 1)], tuple[str, int]).key_by("f0").sum("f1").sink_to(
        Overtaken(str(tmp_path / "out"), mode="upsert", key="f0", name="out")
    )
    plan = pipeline.plan(streaming(tmp_path, 2))
    with pytest.raises(
        LeaseLostError,
        match="another job has taken over the checkpoint directory; this one stops and writes nothing more",
    ):
        StreamingJob(plan, spark, Start("one")).run()
    assert table(tmp_path / "out").num_rows == 0


# What is kept


def stopped_after_an_epoch(job):
    deadline = time.monotonic() + 600
    job.start()
    while not job.activity()[0]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job.stop()


def test_a_bounded_input_has_not_ended_because_its_job_was_stopped(spark, tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(4):
        pq.write_table(pa.table({"f0": ["a"], "f1": [number]}), tmp_path / f"in/{number:02}.parquet")
    pipeline = Pipeline("p")
    source = pipeline.from_source(
        ParquetSource(str(tmp_path / "in"), tuple[str, int], name="in", max_files_per_trigger=1)
    )
    source.assign_timestamps_and_watermarks(
        WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("f1")
    ).key_by("f0").process(Silence()).sink_to(DeltaSink(str(tmp_path / "out"), mode="upsert", key="f0", name="out"))
    plan = pipeline.plan(streaming(tmp_path, 2))
    epochs, asked = [], Event()

    def observe(event):
        if isinstance(event, EpochCommitted):
            epochs.append(event)
            asked.wait()  # so that the job is stopped here, however slow this machine is

    def stopped():
        if epochs:
            asked.set()
        return bool(epochs)

    assert StreamingJob(plan, spark, Start("one"), observe).run(stopped) == "stopped"
    assert len(epochs) < 4
    assert not ControlFile(str(tmp_path / "checkpoints/p/control/main")).read().end
    assert table(tmp_path / "out").num_rows == 0
    assert StreamingJob(plan, spark, Start("two")).run() == "finished"
    assert table(tmp_path / "out").to_pylist() == [{"f0": "a", "f1": 4}]


class Silence(KeyedProcessFunction):
    """How many came, once nothing more does."""

    def open(self, context):
        self.count = context.get_state(ValueStateDescriptor("count", int))

    def process_element(self, value: tuple[str, int], ctx) -> Iterable[tuple[str, int]]:
        self.count.update((self.count.value() or 0) + 1)
        ctx.timer_service().register_event_time_timer(100)
        return []

    def on_timer(self, timestamp, ctx) -> Iterable[tuple[str, int]]:
        yield ctx.get_current_key(), self.count.value()


def test_what_must_not_change_under_kept_state_is_an_error_that_says_what_to_do(spark, tmp_path):
    stopped_after_an_epoch(StreamingJob(counting(tmp_path), spark, Start("one")))
    with pytest.raises(
        ConfigurationError,
        match=(
            r"pipeline.max-parallelism is 3, and the checkpoint has 2 key groups; set it back, or start without state"
        ),
    ):
        StreamingJob(counting(tmp_path, **{"pipeline.max-parallelism": 3}), spark, Start("two")).run()
    with pytest.raises(
        StateError, match="the stateful operators are other, and the checkpoint has sums; keep their uids"
    ):
        StreamingJob(counting(tmp_path, uid="other"), spark, Start("three")).run()
    with pytest.raises(
        StateError, match="'sums': the type of the key has changed: the checkpoint has str, and int is declared"
    ):
        StreamingJob(counting(tmp_path, by="f1"), spark, Start("three")).run()
    assert StreamingJob(counting(tmp_path, uid="other"), spark, Start("four", fresh=True)).run() == "finished"
    assert sorted(tuple(r.values()) for r in table(tmp_path / "out").to_pylist()) == [("a", 4), ("b", 2)]


def test_torn_metadata_leaves_the_record_before_it(tmp_path):
    control = ControlFile(str(tmp_path / "control"))
    control.write(ControlEvent(1, {"op": 5}))
    control.write(ControlEvent(2, {"op": 9}))
    assert control.read().watermarks == {"op": 9}
    (tmp_path / "control/0.json").write_bytes((tmp_path / "control/0.json").read_bytes()[:20])
    assert control.read().watermarks == {"op": 5}


def test_a_control_event_that_is_written_late_replaces_none_that_came_after_it(tmp_path):
    control = ControlFile(str(tmp_path / "control"))
    for number in (1, 3, 4):
        control.write(ControlEvent(number, end=number == 4))
    control.write(ControlEvent(2))  # of another thread, which was slow
    assert control.read() == ControlEvent(4, end=True)


def test_a_lease_is_kept_alive_though_its_store_could_not_be_reached_once(tmp_path, monkeypatch):
    directory, greatest = CheckpointDirectory(str(tmp_path), "p"), CheckpointDirectory.greatest
    held, failed = directory.take("one", patience=0.2), Event()

    def unreachable(directory):
        if not failed.is_set():
            failed.set()
            raise EndpointConnectionError(endpoint_url="https://storage")  # which is no OSError
        return greatest(directory)

    monkeypatch.setattr(CheckpointDirectory, "greatest", unreachable)
    failed.wait()
    before, stops = directory.holder().beat, time.monotonic() + 60
    while directory.holder().beat == before:
        assert time.monotonic() < stops
    held.release()


def test_a_deployment_record_that_is_wholly_damaged_is_an_error(tmp_path):
    directory = CheckpointDirectory(str(tmp_path), "p")
    (tmp_path / "p/deployment").mkdir(parents=True)
    (tmp_path / "p/deployment/0.json").write_text("{")
    with pytest.raises(StateError, match=r"the deployment record in .* is damaged; restore it from a copy, or remove"):
        directory.deployed()


def test_a_deployment_record_of_another_format_is_an_error_that_says_so(tmp_path):
    directory = CheckpointDirectory(str(tmp_path), "p")
    (tmp_path / "p/deployment").mkdir(parents=True)
    (tmp_path / "p/deployment/0.json").write_text('{"version": 1, "id": "a", "format": 1}')
    with pytest.raises(StateError, match=r"was written in format 1, and this version reads \d; use the version that"):
        directory.deployed()


def test_a_query_that_cannot_be_stopped_keeps_no_other_running(tmp_path):
    pipeline = Pipeline("p")
    pipeline.from_collection([1]).print("out")
    plan = pipeline.plan(
        {"execution.runtime-mode": "STREAMING", "execution.checkpointing.dir": str(tmp_path / "checkpoints")}
    )
    job, stopped = StreamingJob(plan, None, Start("one")), []

    def fail():
        raise StateError("the store is away")

    job._queries = [SimpleNamespace(stop=fail), SimpleNamespace(stop=lambda: stopped.append(True))]
    with pytest.raises(StateError, match="the store is away"):
        job.stop()
    assert stopped


def test_a_lease_that_was_torn_is_nobodys(tmp_path):
    directory = CheckpointDirectory(str(tmp_path), "p")
    (tmp_path / "p/lease").mkdir(parents=True)
    (tmp_path / "p/lease/7.json").write_text("")
    held = directory.take("one", patience=1)
    assert held.token == 8
    held.release()


def test_a_job_that_is_stopped_leaves_no_epoch_to_be_run_again(spark, tmp_path):
    """The job is stopped as soon as the sinks have an epoch, before Spark has logged it.

    Other code must not run the epoch again.
    """
    inputs(tmp_path / "in", 6)
    plan = build(tmp_path, tmp_path).plan({**OPTIONS, "execution.checkpointing.dir": str(tmp_path / "checkpoints")})
    for number in range(3):
        epochs: list[EpochCommitted] = []
        observe = lambda e, seen=epochs: seen.append(e) if isinstance(e, EpochCommitted) else None  # noqa: E731
        job = StreamingJob(plan, spark, Start(f"job {number}"), observe)
        job.start()
        deadline = time.monotonic() + 600
        while not epochs:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        job.stop()
        logged, committed = (
            sorted(int(f.name) for f in (tmp_path / "checkpoints/killed/spark/main" / log).glob("[0-9]*"))
            for log in ("offsets", "commits")
        )
        assert epochs[-1].epoch in committed
        assert len(logged) - len(committed) <= 1


def test_a_checkpoint_directory_that_is_deleted_under_a_job_ends_it_and_no_part_of_one_is_gone_on_with(spark, tmp_path):
    pipeline = Pipeline("deleted")
    rows = pipeline.from_source(ParquetSource(str(tmp_path / "in"), Row, name="rows", monitor=True))
    rows.key_by("key").reduce(add).sink_to(DeltaSink(str(tmp_path / "totals"), mode="upsert", key="key"))
    plan = pipeline.plan({**OPTIONS, "execution.checkpointing.dir": str(tmp_path / "checkpoints")})
    inputs(tmp_path / "in", 1)
    directory = tmp_path / "checkpoints/deleted"

    def observe(event):
        if isinstance(event, EpochCommitted) and directory.exists():
            shutil.rmtree(directory)
            pq.write_table(pa.Table.from_pylist([Row("a", 50, 1)._asdict()]), tmp_path / "in/50.parquet")

    with pytest.raises(StateError, match=f"the checkpoint directory {directory} was deleted while the job ran"):
        StreamingJob(plan, spark, Start("job", patience=0.5), observe).run()
    (directory / "spark/main/offsets").mkdir(parents=True, exist_ok=True)
    shutil.rmtree(directory / "deployment", ignore_errors=True)
    with pytest.raises(
        StateError, match=f"{directory} has spark/, and no record of the deployment .* or remove {directory}"
    ):
        StreamingJob(plan, spark, Start("job", patience=0.5)).run()
    epochs = []
    again = StreamingJob(plan, spark, Start("job", fresh=True, patience=0.5), epochs.append)
    assert again.run(lambda: any(isinstance(e, EpochCommitted) and e.rows_in for e in epochs)) == "stopped"
    assert sum(e.rows_in for e in epochs if isinstance(e, EpochCommitted)) == 51


def test_why_a_job_could_not_start_is_what_is_said_though_it_cannot_clean_up_either(spark, tmp_path, monkeypatch):
    def away(*_):
        raise ConnectionRefusedError("[Errno 111] Connection refused")

    def dies(*_):
        raise UnifiedError("the JVM was killed")

    pipeline = Pipeline("started")
    pipeline.from_source(ParquetSource(str(tmp_path), Row, name="rows", monitor=True)).key_by("key").reduce(add).print()
    plan = pipeline.plan({**OPTIONS, "execution.checkpointing.dir": str(tmp_path / "checkpoints")})
    with monkeypatch.context() as patched:
        patched.setattr(KeyGroupQuery, "start", dies)
        patched.setattr(KeyGroupQuery, "stop", away)
        with pytest.raises(UnifiedError, match="the JVM was killed"):
            StreamingJob(plan, spark, Start("job", patience=0.5)).run()
    assert CheckpointDirectory(str(tmp_path / "checkpoints"), "started").holder().released
