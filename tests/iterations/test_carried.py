"""An unbounded iteration in BATCH leaves its state where the input goes on: to a savepoint, and to another run."""

from collections import Counter

from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.state import Savepoint
from tests.iterations.test_savepoints import EXPECTED, HOPS, Job, given, hopping, planned, taken, visited, written


def run_in_batch(spark, folder, name, parallelism, start=None, leaves=None):
    """What a BATCH run emits, and the rows of the counts that operators emit at the end."""
    options = {
        "execution.runtime-mode": "BATCH",
        "parallelism.default": parallelism,
        **({"execution.state-recovery.path": start} if start else {}),
        **({"execution.savepoint.path": leaves} if leaves else {}),
    }
    plan = hopping(folder, f"out {name}").plan(options)
    run_all(Run(plan, spark, IntermediateStore(str(folder / f"store {name}")), name, name))
    return [
        [tuple(row) for row in spark.read.parquet(f"{folder}/out {name}{what}").collect()] for what in ("", "-counts")
    ]


def test_a_loop_goes_on_from_batch_to_batch_to_a_stream(spark, tmp_path):
    given(tmp_path)
    later = [tmp_path / f"in/{number}.parquet" for number in (1, 2)]
    for file in later:
        file.rename(tmp_path / file.name)
    left, again = str(tmp_path / "left"), str(tmp_path / "again")
    first, ended = run_in_batch(spark, tmp_path, "first", 2, leaves=left)
    held = Savepoint.read(left)
    assert (ended, visited(held, "loop.visits")) == ([], Counter(first))
    assert [(one.uid, one.round, one.feedback) for one in held.iterations] == [("loop", HOPS, [])]
    assert sum(len(row["counts"]) for row in held.keyed_state("loop.counted").to_pylist()) == len(first)
    (tmp_path / later[0].name).rename(later[0])
    second, ended = run_in_batch(spark, tmp_path, "second", 3, start=left, leaves=again)
    held = Savepoint.read(again)
    assert (ended, visited(held, "loop.visits")) == ([], Counter(first + second))
    assert [one.round for one in held.iterations] == [2 * HOPS + 1]
    (tmp_path / later[1].name).rename(later[1])
    third = planned(tmp_path, "third", parallelism=1, start=again)
    assert StreamingJob(third, spark, Start("test")).run() == "finished"
    assert Counter(first + second + written(tmp_path, "third")) == EXPECTED
    assert sum(count for _, count in written(tmp_path, "third", "-counts")) == EXPECTED.total()


def test_batch_goes_on_with_what_was_fed_back_in_a_stream(spark, tmp_path, monkeypatch):
    monkeypatch.setattr("dagster_unified.engine.streaming.iterations.MOMENT", 0)  # so that each epoch has one round
    given(tmp_path)
    first, left = planned(tmp_path, "first", monitor=True), str(tmp_path / "left")
    with Job(first, spark) as job:
        job.until_enough()
        taken(first, tmp_path, "first", spark, left)
    held = Savepoint.read(left)
    assert len(held.feedback("loop.counted"))
    before = written(tmp_path, "first", until=held.epochs["main"])
    rest, counts = run_in_batch(spark, tmp_path, "second", 3, start=left)
    assert Counter(before + rest) == EXPECTED
    assert sum(count for _, count in counts) == EXPECTED.total()
