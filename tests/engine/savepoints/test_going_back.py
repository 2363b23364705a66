"""Savepoints: new code that goes wrong, and going back to the state before it, with every kind of table right again."""

import os
from datetime import timedelta
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from dagster_unified.api import Pipeline, TumblingEventTimeWindows, WatermarkStrategy
from dagster_unified.api import functions as F
from dagster_unified.connectors import DeltaSink, FileSink, ParquetSource
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory, Deployed
from dagster_unified.engine.streaming.control import ControlFile
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.engine.streaming.savepoints import copy
from dagster_unified.engine.streaming.savepoints.copy import restore_stopped, save_stopped, savepoints
from dagster_unified.errors import LeaseLostError, StateError, UnsupportedError
from dagster_unified.operators.drivers.key_groups import ControlEvent
from dagster_unified.storage.paths import remove_tree
from tests.support import committed, file_rows, table_rows


class Sale(NamedTuple):
    shop: str
    at: int
    amount: int


class Revenue(NamedTuple):
    shop: str
    window_start: int
    amount: int


PARTS = [
    [Sale("a", 0, 1), Sale("b", 5, 2)],
    [Sale("a", 10, 3)],
    [Sale("b", 20, 4), Sale("c", 25, 5)],
    [Sale("a", 30, 6)],
]


@pytest.fixture
def arrive(tmp_path):
    (tmp_path / "in").mkdir()

    def write(number):
        pq.write_table(pa.Table.from_pylist([r._asdict() for r in PARTS[number]]), tmp_path / f"in/.{number}")
        os.rename(tmp_path / f"in/.{number}", tmp_path / f"in/{number}.parquet")

    return write


def build(tmp_path, wrong: bool = False):
    pipeline = Pipeline("shops")
    sales = pipeline.from_source(
        ParquetSource(str(tmp_path / "in"), Sale, name="sales", monitor=True, max_files_per_trigger=1)
    )
    factor = 1000 if wrong else 1
    sums = (
        sales.map(lambda s: s._replace(amount=s.amount * factor), Sale)
        .name("amounts")
        .key_by("shop")
        .reduce(lambda a, b: Sale(a.shop, b.at, a.amount + b.amount))
        .uid("sums")
    )
    sums.sink_to(DeltaSink(str(tmp_path / "upserted"), mode="upsert", key="shop", name="upserted"))
    sums.sink_to(DeltaSink(str(tmp_path / "appended"), mode="append", name="appended"))
    sums.sink_to(DeltaSink(str(tmp_path / "overwritten"), mode="overwrite", name="overwritten"))
    sums.sink_to(FileSink(str(tmp_path / "files"), name="files"))
    in_time = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(0)).with_timestamp_assigner("at")
    windows = (
        sales.assign_timestamps_and_watermarks(in_time)
        .key_by("shop")
        .window(TumblingEventTimeWindows.of(timedelta(milliseconds=10)))
    )
    native = windows.agg((F.sum("amount") * factor).alias("amount"), output_type=Revenue).uid("windows")
    native.sink_to(DeltaSink(str(tmp_path / "windows"), mode="append", name="windows"))
    return pipeline


def run(pipeline, spark, tmp_path, rows, drain=False, **start):
    """Runs until so many records have come in to each query."""
    epochs = []
    options = {"execution.checkpointing.dir": str(tmp_path / "checkpoints"), "pipeline.max-parallelism": 3}
    job = StreamingJob(
        pipeline.plan(options),
        spark,
        Start("job", **start),
        committed(epochs),
    )

    def enough():
        if drain:
            job.drain()
        main = sum(e.rows_in for e in epochs if e.query == "main")
        windows = sum(e.query == "windows" for e in epochs)
        return not drain and main >= rows and windows >= 2

    return job.run(enough)


def tables(tmp_path):
    found = {
        n: DeltaTable(str(tmp_path / n)).to_pyarrow_table().to_pylist()
        for n in ("upserted", "appended", "overwritten", "windows")
    }
    found["files"] = pq.read_table(tmp_path / "files").to_pylist()
    return {name: sorted(tuple(r.values()) for r in rows) for name, rows in found.items()}


UPDATES = [("a", 0, 1), ("a", 10, 4), ("a", 30, 10), ("b", 5, 2), ("b", 20, 6), ("c", 25, 5)]
WINDOWS = [("a", 0, 1), ("a", 10, 3), ("a", 30, 6), ("b", 0, 2), ("b", 20, 4), ("c", 20, 5)]


def test_going_back_after_new_code_went_wrong(spark, tmp_path, arrive):
    directory = CheckpointDirectory(str(tmp_path / "checkpoints"), "shops")
    arrive(0)
    assert run(build(tmp_path), spark, tmp_path, 2) == "stopped"
    before = directory.deployed()
    arrive(1)
    arrive(2)
    assert run(build(tmp_path, wrong=True), spark, tmp_path, 3, savepoint=True) == "stopped"
    assert max(amount for _, _, amount in tables(tmp_path)["appended"]) > 1000
    (made,) = savepoints(directory)
    assert (made.reason, made.deployed.generation, made.epochs["main"]) == ("before new code", 1, 0)
    assert "generation 1, epoch 0 of main" in made.describe()

    assert restore_stopped(directory, "test", None) == made
    after = directory.deployed()
    assert (after.id, after.fingerprint, after.timeline, after.restored) == (before.id, before.fingerprint, 1, True)
    arrive(3)
    assert run(build(tmp_path), spark, tmp_path, 0, drain=True, savepoint=True) == "finished"
    found = tables(tmp_path)
    assert found["appended"] == found["overwritten"] == found["files"] == UPDATES
    assert found["windows"] == WINDOWS
    assert found["upserted"] == [("a", 30, 10), ("b", 20, 6), ("c", 25, 5)]
    assert savepoints(directory) == [made]  # the same code again is no upgrade


def test_a_savepoint_by_name_and_what_may_not_be(spark, tmp_path, arrive, monkeypatch):
    directory = CheckpointDirectory(str(tmp_path / "checkpoints"), "shops")
    with pytest.raises(StateError, match="there is no state to save"):
        save_stopped(directory, "test", "by hand")
    arrive(0)
    run(build(tmp_path), spark, tmp_path, 2)
    first = save_stopped(directory, "test", "by hand")
    second = save_stopped(directory, "test", "by hand")
    assert [s.name for s in savepoints(directory)] == [first.name, second.name]
    with pytest.raises(StateError, match=rf"no savepoint '\.\./x'.*there are {first.name}, {second.name}"):
        restore_stopped(directory, "test", "../x")

    lease = directory.take("a job", 20)
    with pytest.raises(LeaseLostError, match="another job, a job, is writing"):
        save_stopped(directory, "test", "by hand")
    with pytest.raises(LeaseLostError, match="another job, a job, is writing"):
        restore_stopped(directory, "test", None)
    lease.release()

    def broken(source, target):
        raise OSError("no space left on device")

    monkeypatch.setattr(copy, "_copy", broken)
    with pytest.raises(OSError, match="no space"):
        save_stopped(directory, "test", "by hand")
    assert [s.name for s in savepoints(directory)] == [first.name, second.name]  # half of one is none
    with pytest.raises(OSError, match="no space"):
        restore_stopped(directory, "test", first.name)
    monkeypatch.undo()
    for refused in (
        lambda: run(build(tmp_path), spark, tmp_path, 0),
        lambda: save_stopped(directory, "test", "by hand"),
    ):
        with pytest.raises(StateError, match=f"going back to savepoint '{first.name}' was interrupted"):
            refused()
    assert restore_stopped(directory, "test", first.name) == first
    assert run(build(tmp_path), spark, tmp_path, 0, drain=True) == "finished"
    assert tables(tmp_path)["upserted"] == [("a", 0, 1), ("b", 5, 2)]
    assert msgspec.json.decode(msgspec.json.encode(first), type=copy.Savepoint) == first


def test_a_first_epoch_without_output_takes_back_what_was_undone(spark, tmp_path, arrive):
    """The staged way: several sinks, and nothing for them in the first epoch after going back."""
    directory = CheckpointDirectory(str(tmp_path / "checkpoints"), "shops")

    def built(silent):
        pipeline = Pipeline("shops")
        sales = pipeline.from_source(
            ParquetSource(str(tmp_path / "in"), Sale, name="sales", monitor=True, max_files_per_trigger=1)
        )
        sums = (
            sales.key_by("shop")
            .reduce(lambda a, b: Sale(a.shop, b.at, a.amount + b.amount))
            .uid("sums")
            .filter(lambda s: s.at not in silent)
        )
        sums.sink_to(DeltaSink(str(tmp_path / "appended"), mode="append", name="appended"))
        sums.sink_to(FileSink(str(tmp_path / "files"), name="files"))
        return pipeline

    def ran(silent, rows):
        epochs = []
        options = {"execution.checkpointing.dir": str(tmp_path / "checkpoints"), "pipeline.max-parallelism": 3}
        job = StreamingJob(
            built(silent).plan(options),
            spark,
            Start("job"),
            committed(epochs),
        )
        assert job.run(lambda: sum(e.rows_in for e in epochs) >= rows) == "stopped"

    arrive(0)
    ran((), 2)
    save_stopped(directory, "test", "by hand")
    arrive(1)
    ran((), 1)
    restore_stopped(directory, "test", None)
    ran((10,), 1)
    appended = table_rows(tmp_path / "appended")
    files = file_rows(tmp_path / "files")
    assert appended == files == [("a", 0, 1), ("b", 5, 2)]


def deployed(directory, fresh=False, **recorded):
    made = directory.deploy(Deployed(0, "", "shops", "f", 0, 3, 4, "ROCKSDB", {}, {}, **recorded), fresh)
    (directory.path / "spark/main/commits").mkdir(parents=True, exist_ok=True)
    return made


def test_only_the_history_of_what_runs_can_be_gone_back_to(tmp_path):
    directory = CheckpointDirectory(str(tmp_path), "shops")
    deployed(directory)
    first = save_stopped(directory, "test", "first")
    second = save_stopped(directory, "test", "second")
    restore_stopped(directory, "test", first.name)
    with pytest.raises(StateError, match=f"savepoint '{second.name}' is not of the history of what runs now"):
        restore_stopped(directory, "test", second.name)
    third = save_stopped(directory, "test", "third")
    assert restore_stopped(directory, "test", None) == third
    timeline = directory.deployed().timeline
    assert deployed(directory, fresh=True).timeline == timeline  # never a number twice: sinks would skip its epochs
    with pytest.raises(StateError, match="is not of the history of what runs now"):
        restore_stopped(directory, "test", None)


@pytest.mark.parametrize("damage", ["spark", "spark/main/commits/1", "part", "files.json"])
def test_a_savepoint_that_is_not_whole_is_not_gone_back_to(tmp_path, damage):
    directory = CheckpointDirectory(str(tmp_path), "shops")
    deployed(directory)
    commit = directory.path / "spark/main/commits/1"
    commit.write_text("version 1")
    made = save_stopped(directory, "test", "by hand")
    copy = directory.path / "savepoints" / made.name
    if damage == "part":
        (copy / "spark/main/commits/1").unlink()  # it is the file of the checkpoint itself
        (copy / "spark/main/commits/1").write_text("v")
    else:
        remove_tree(copy / damage)
    named = "files.json" if damage == "files.json" else "spark/main/commits/1"
    with pytest.raises(StateError, match=rf"savepoint '{made.name}' is not whole: .*/{named} is gone, or a part of it"):
        restore_stopped(directory, "test", None)
    assert commit.read_text() == "version 1"
    assert not (directory.path / "restoring.json").exists()


def test_code_that_cannot_go_on_from_the_state_leaves_no_savepoints(spark, tmp_path, arrive):
    directory = CheckpointDirectory(str(tmp_path / "checkpoints"), "shops")
    arrive(0)
    run(build(tmp_path), spark, tmp_path, 2)
    other = Pipeline("shops")
    sales = other.from_source(ParquetSource(str(tmp_path / "in"), Sale, name="sales", monitor=True))
    sales.key_by("shop").reduce(lambda a, b: b).uid("other").sink_to(FileSink(str(tmp_path / "files")))
    with pytest.raises(StateError, match="the stateful operators are"):
        run(other, spark, tmp_path, 2, savepoint=True)
    assert savepoints(directory) == []


def test_starting_without_state_also_ends_an_interrupted_way_back(spark, tmp_path, arrive):
    directory = CheckpointDirectory(str(tmp_path / "checkpoints"), "shops")
    arrive(0)
    run(build(tmp_path), spark, tmp_path, 2)
    (directory.path / "restoring.json").write_text('{"savepoint": "gone"}')
    directory.finish()  # also one that had ended is not begun anew by itself
    with pytest.raises(StateError, match="was interrupted"):
        run(build(tmp_path), spark, tmp_path, 2)
    assert run(build(tmp_path), spark, tmp_path, 0, drain=True, fresh=True) == "finished"
    assert tables(tmp_path)["files"] == [("a", 0, 1), ("b", 5, 2)]
    assert not (directory.path / "restoring.json").exists()


def test_what_has_come_to_its_end_has_no_savepoint(tmp_path):
    directory = CheckpointDirectory(str(tmp_path), "shops")
    deployed(directory)
    ControlFile(str(directory.path / "control/main")).write(ControlEvent(1, end=True))
    with pytest.raises(StateError, match=r"its input has come to its end, .* take savepoints before draining"):
        save_stopped(directory, "test", "by hand")
    ControlFile(str(directory.path / "control/main")).write(ControlEvent(2))
    directory.finish()
    with pytest.raises(StateError, match="its input has come to its end"):
        save_stopped(directory, "test", "by hand")


def test_diverted_rows_since_a_savepoint_go_with_what_is_undone(tmp_path):
    directory = CheckpointDirectory(str(tmp_path), "shops")
    deployed(directory)
    (directory.path / "spark/main/commits/2").write_text("v1")
    save_stopped(directory, "test", "by hand")
    for epoch in (1, 2, 3):
        (directory.path / f"malformed/sales/epoch={epoch}").mkdir(parents=True)
    restore_stopped(directory, "test", None)
    assert sorted(p.name for p in (directory.path / "malformed/sales").iterdir()) == ["epoch=1", "epoch=2"]
    with pytest.raises(
        StateError,
        match=(
            r"the stateful operators are .*; this is the state that was gone back to: start the code that it is of"
            r" first"
        ),
    ):
        directory.check(Deployed(0, "", "shops", "g", 0, 3, 4, "ROCKSDB", {}, {"main": [["other"]]}))


def test_diverted_rows_of_a_source_behind_a_loop_are_of_the_epochs_of_its_own_query(tmp_path):
    directory = CheckpointDirectory(str(tmp_path), "shops")
    deployed(directory, reads={"sales": "main", "returns": "main-1"})
    for query, epoch in (("main", 2), ("main-1", 1)):
        (directory.path / f"spark/{query}/commits").mkdir(parents=True, exist_ok=True)
        (directory.path / f"spark/{query}/commits/{epoch}").write_text("v1")
    save_stopped(directory, "test", "by hand")
    for source in ("sales", "returns"):
        for epoch in (1, 2, 3):
            (directory.path / f"malformed/{source}/epoch={epoch}").mkdir(parents=True)
    restore_stopped(directory, "test", None)
    left = {source: len(list((directory.path / "malformed" / source).iterdir())) for source in ("sales", "returns")}
    assert left == {"sales": 2, "returns": 1}


def taken(directory, whole=True, **how):
    lease = directory.take("test", 20)
    made = copy.begin(directory, "test", lease.check, directory.settled(), **how).complete()
    lease.release()
    if whole:
        (directory.path / "savepoints" / made.name / "manifest.json").write_text("{}")
    return made.name


def names(directory):
    return [one.name for one in savepoints(directory)]


def test_of_what_an_interval_made_the_last_are_kept_and_what_the_job_started_from(tmp_path):
    directory = CheckpointDirectory(str(tmp_path), "shops")
    deployed(directory)
    start, asked, *others = [taken(directory, periodic=number != 1) for number in range(5)]
    copy.retain(directory, 2, [f"{tmp_path}/elsewhere", f"{directory.path}/savepoints/../savepoints/{start}/"])
    assert names(directory) == [start, asked, *others[1:]]
    copy.retain(directory, 1, [])
    assert names(directory) == [asked, others[-1]]
    assert not (directory.path / "savepoints" / start).exists()


def test_halves_that_a_killed_job_has_left_are_removed(tmp_path):
    directory = CheckpointDirectory(str(tmp_path), "shops")
    deployed(directory)
    whole, asked, half = (
        taken(directory, periodic=True),
        taken(directory, whole=False),
        taken(directory, whole=False, periodic=True),
    )
    (directory.path / "savepoints/g1-20260101T000000-000/spark").mkdir(parents=True)
    (directory.path / "savepoints/of a person").mkdir()
    copy.remove_halves(directory, [])
    assert sorted(path.name for path in (directory.path / "savepoints").iterdir()) == [whole, asked, "of a person"]
    assert half not in names(directory)


def test_an_interval_needs_state_that_can_be_read_while_the_job_runs(tmp_path, spark):
    plan = build(tmp_path).plan({"execution.savepoint.interval": "1 h", "state.native-aggregates": "SPARK"})
    with pytest.raises(UnsupportedError, match=r"execution.savepoint.interval is set, and only Spark can read"):
        StreamingJob(plan, spark, Start("job"))
