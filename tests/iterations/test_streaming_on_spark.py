"""Iterations in STREAMING on Spark: the feedback edge is a log, and a killed job goes on after its last round."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from threading import Event

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from dagster_unified.api import Pipeline, iterations
from dagster_unified.connectors import DeltaSink, FileSink, ParquetSource
from dagster_unified.engine.events import (
    EpochCommitted,
    InputHeldBack,
    IterationEpochCommitted,
    IterationResumed,
    ignore_events,
)
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.engine.streaming.savepoints.copy import restore_stopped, save_stopped
from dagster_unified.errors import PipelineError, StateError
from tests.depth import chance, rotated
from tests.iterations.killed_stream import POINTS, hopping, options
from tests.iterations.programs import PROGRAMS
from tests.iterations.support import Body, Hop, rows
from tests.object_store import served
from tests.support import file_rows


@pytest.mark.parametrize("name", rotated(list(PROGRAMS), 3))
def test_a_bounded_program_gives_in_streaming_what_it_gives_in_batch(run_streaming, tmp_path, name):
    build, expected = PROGRAMS[name]
    pipeline, out = build()
    out.sink_to(FileSink(str(tmp_path / "out"), name="out"))
    assert run_streaming(pipeline, {"parallelism.default": 2}) == "finished"
    assert file_rows(tmp_path / "out") == rows(expected)


HOPS = 5
FILES = [range(60), range(40, 100), range(90, 130)]
EXPECTED = Counter((number, hop) for file in FILES for number in file for hop in range(HOPS + 1))


def given(folder):
    for number, file in enumerate(FILES):
        table = pa.Table.from_pylist([{"number": n, "hops": 0} for n in file])
        (folder / "in").mkdir(exist_ok=True)
        pq.write_table(table, folder / "in" / f"{number}.parquet")


def hops(folder):
    return Counter(file_rows(folder / "out"))


def job(spark, folder, observe=ignore_events, **changed):
    plan = hopping(folder, HOPS, behind=changed.pop("behind", False), **changed.pop("build", {})).plan(
        {**options(folder), **changed}
    )
    return StreamingJob(plan, spark, Start("test", patience=0.5), observe)


def test_a_stream_that_is_stopped_goes_on_and_back_to_a_savepoint(spark, tmp_path):
    given(tmp_path)
    epochs, enough = [], Event()

    def observe(event):
        if isinstance(event, EpochCommitted):
            epochs.append(event)
        if len(epochs) >= 2:
            enough.set()
            time.sleep(1)  # so that it is seen before the input has ended

    assert job(spark, tmp_path, observe, behind=True).run(enough.is_set) == "stopped"
    directory = CheckpointDirectory(str(tmp_path / "checkpoints"), "hopping")
    save_stopped(directory, "test", "by hand", patience=0.5)
    for changed, why in (
        ({"parallelism.default": 32}, "state of 2 subtasks, of which there can be up to 31, and is started with 32"),
        ({"build": {"more": lambda s: s.filter(lambda hop: True)}}, "operators of its body are others"),
        ({"build": {"kind": "bounded"}}, "it was unbounded, and is bounded now"),
        ({"build": {"uid": "another"}}, "another"),
    ):
        with pytest.raises(StateError, match=why):
            job(spark, tmp_path, behind=True, **changed).run()
    for subtasks in (3, 1):
        rescaled = job(spark, tmp_path, behind=True, **{"parallelism.default": subtasks})
        assert rescaled.run() == "finished"
        assert hops(tmp_path) == EXPECTED
        assert not (tmp_path / "checkpoints/hopping/iterations").exists()
        restore_stopped(directory, "test", None, patience=0.5)


def test_input_waits_while_too_much_circulates(spark, tmp_path, monkeypatch):
    monkeypatch.setattr("dagster_unified.engine.streaming.iterations.TELL_EVERY", 0)
    given(tmp_path)
    seen = []
    held = job(spark, tmp_path, seen.append, **{"iteration.max-feedback-records": 1})
    assert held.run() == "finished"
    assert hops(tmp_path) == EXPECTED
    rounds = [e for e in seen if isinstance(e, InputHeldBack)]
    assert len({e.epoch for e in seen if isinstance(e, EpochCommitted)}) <= len(FILES) + 1
    assert rounds
    assert all(e.feedback > e.most == 1 for e in rounds)


def test_a_loop_that_multiplies_its_records_ends_before_they_fill_the_disk(spark, tmp_path):
    given(tmp_path)
    pipeline = Pipeline("doubling")
    numbers = pipeline.from_source(ParquetSource(f"{tmp_path}/in", Hop, "numbers"))
    body = Body(lambda v, d: iterations.IterationBodyResult([v[0].flat_map(lambda hop: [hop, hop], Hop)], [v[0]]))
    (out,) = iterations.iterate_unbounded_streams([numbers], [], body)
    out.sink_to(FileSink(f"{tmp_path}/out", name="out"))
    plan = pipeline.plan({**options(tmp_path), "iteration.max-feedback-records": 100})
    with pytest.raises(PipelineError, match="iteration 'Body': its records multiply: each of its last 10 epochs"):
        StreamingJob(plan, spark, Start("test", patience=0.5)).run()


def test_a_bounded_iteration_is_stopped_within_a_round_and_goes_on(spark, tmp_path):
    given(tmp_path)
    plan = hopping(tmp_path, 100_000, "bounded").plan(options(tmp_path))
    for kind in (IterationEpochCommitted, IterationResumed):
        seen = []
        one = StreamingJob(plan, spark, Start("test", patience=0.5), seen.append)
        assert one.run(lambda seen=seen, kind=kind: any(isinstance(e, kind) for e in seen)) == "stopped"


def added(a: Hop, b: Hop) -> Hop:
    return Hop(a.number, a.hops + b.hops)


def test_operators_before_and_behind_a_loop_start_from_one_savepoint(run_on_spark, spark, tmp_path):
    def totals(loop, numbers, sink):
        pipeline = Pipeline("totals")
        given = pipeline.from_collection([Hop(number, 1) for number in numbers], Hop, name="numbers")
        before = given.key_by("number").reduce(added).name("before").uid("before")
        if loop:
            body = Body(lambda v, d: iterations.IterationBodyResult([v[0].filter(lambda hop: False)], [v[0]]))
            (before,) = iterations.iterate_bounded_streams_until_termination([before], [], body)
        behind = before.key_by("number").reduce(added).name("behind").uid("behind")
        behind.sink_to(DeltaSink(str(tmp_path / sink), mode="upsert", key="number"))
        return pipeline

    left = str(tmp_path / "left")
    run_on_spark(totals(False, [1, 2], "first"), {"execution.savepoint.path": left})
    given = {**options(tmp_path), "execution.runtime-mode": "STREAMING", "execution.state-recovery.path": left}
    StreamingJob(totals(True, [1, 2, 2, 3], "second").plan(given), spark, Start("test")).run()
    found = DeltaTable(str(tmp_path / "second")).to_pyarrow_table().to_pylist()
    assert sorted(tuple(row.values()) for row in found) == [(2, 3), (3, 1)]
    assert not (tmp_path / "checkpoints/totals/initial").exists()


def computed_again(folder):
    """How often a round was computed that had been begun before."""
    rounds = (folder / "rounds").read_text().split()
    return len(rounds) - len(set(rounds))


KILLS = [(kind, point) for kind, points in POINTS.items() for point in points]


def killed_and_run_again(folder, kind, point, counts, store=(), environment=None):
    given(folder)
    command = [sys.executable, "-m", "tests.iterations.killed_stream", str(folder), kind, str(HOPS)]
    env = {**os.environ, **(environment or {})}
    for count in counts:
        again = [*command, point, str(count), *store]
        killed = subprocess.run(again, capture_output=True, text=True, env=env, check=False)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    ended = subprocess.run([*command, "none", "0", *store], capture_output=True, text=True, env=env, check=False)
    assert ended.stdout.split()[-1:] == ["finished"], ended.stderr
    assert hops(folder) == EXPECTED
    if kind == "behind":  # whose loop may be in a round when the query behind it is killed
        assert computed_again(folder) <= len(counts)
    else:
        assert computed_again(folder) == len(counts) * (point == "level")


@pytest.mark.rotates("kills")
@pytest.mark.parametrize(("kind", "point"), KILLS)
def test_a_stream_that_is_killed_goes_on_after_its_last_round(tmp_path, kind, point):
    random = chance(f"killed stream {kind} {point}")
    most = 2 if point == "sinks" else 3  # of so many there are enough left for the second kill
    counts = [1] if (kind, point) == ("bounded", "sinks") else [random.randint(1, most), random.randint(1, most)]
    if kind == "behind":
        counts = [1 if point == "taken" else random.randint(1, 2), 1]
    killed_and_run_again(tmp_path, kind, point, counts)


@pytest.mark.rotates("kills")
@pytest.mark.spark
@pytest.mark.parametrize("kind", ["unbounded", "bounded"])
@pytest.mark.parametrize("victim", ["worker", "jvm"])
def test_a_stream_whose_processes_are_killed_in_a_round_goes_on(tmp_path, kind, victim):
    given(tmp_path)
    count = chance(f"{kind} {victim}").randint(1, HOPS)
    command = [
        sys.executable,
        "-m",
        "tests.iterations.killed_stream",
        str(tmp_path),
        kind,
        str(HOPS),
        victim,
        str(count),
    ]
    first = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (tmp_path / "died").exists()
    if victim == "jvm":
        assert first.returncode == 1, first.stderr
        first = subprocess.run(command, capture_output=True, text=True, check=False)
    assert first.stdout.split()[-1:] == ["finished"], first.stderr
    assert hops(tmp_path) == EXPECTED
    assert computed_again(tmp_path) == (victim == "jvm")  # a task is tried again by Spark


@pytest.mark.rotates("kills")
@pytest.mark.spark
@pytest.mark.parametrize(("kind", "point"), [("unbounded", "round"), ("behind", "handed"), ("behind", "taken")])
def test_rounds_of_a_stream_in_a_bucket_are_gone_on_after(tmp_path, kind, point):
    with served("lake") as environment:
        killed_and_run_again(tmp_path, kind, point, [2], [environment["AWS_ENDPOINT_URL"]], environment)
