"""Iterations in BATCH on Spark: as in the harness, committed round by round, and resumed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dagster_unified.api import BroadcastProcessFunction, MapStateDescriptor, Pipeline, iterations
from dagster_unified.connectors import FileSink
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.engine.events import IterationEpochCommitted, IterationResumed
from dagster_unified.errors import UserFunctionError
from tests.depth import chance
from tests.iterations.killed_job import run
from tests.iterations.programs import PROGRAMS, trajectories
from tests.iterations.support import Body, rows
from tests.object_store import client, served


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gives_on_spark_what_it_gives_in_the_harness(spark, tmp_path, name):
    build, expected = PROGRAMS[name]
    assert run(tmp_path, spark, *build()) == rows(expected)
    assert list((tmp_path / "store").rglob("iteration-*")) == []  # nothing is left of the rounds


class Failing:
    """A function that fails in a round until it is mended."""

    def __init__(self, flag, at):
        self.flag, self.at = flag, at

    def __call__(self, value: int) -> int:
        if value == self.at and not Path(self.flag).exists():
            raise ValueError("not yet")
        return value - 1


def counting_down(flag, at, function=Failing, **config):
    pipeline = Pipeline("counting")
    numbers = pipeline.from_collection([9, 8], int, name="numbers")
    return pipeline, counted_down(numbers, flag, at, function, **config)


def counted_down(numbers, flag, at, function=Failing, **config):
    def build(variables, data):
        fewer = variables[0].map(function(str(flag), at), int).filter(lambda n: n > 0)
        return iterations.IterationBodyResult([fewer], [fewer])

    config = iterations.IterationConfig(**config)
    return iterations.iterate_bounded_streams_until_termination([numbers], [], Body(build), config)[0]


def test_a_run_that_is_tried_again_goes_on_after_its_last_round(spark, tmp_path):
    events = []
    with pytest.raises(UserFunctionError, match="ValueError: not yet"):
        run(tmp_path, spark, *counting_down(tmp_path / "mended", 4), events.append, run_id="first")
    first = [event.epoch.number for event in events if isinstance(event, IterationEpochCommitted)]
    assert first == [0, 1, 2, 3]
    (tmp_path / "mended").touch()
    events.clear()
    found = run(tmp_path, spark, *counting_down(tmp_path / "mended", 4), events.append, run_id="second")
    assert found == rows(sorted([*range(1, 9), *range(1, 8)]))
    assert [event.epoch for event in events if isinstance(event, IterationResumed)] == [3]
    assert next(event.epoch.number for event in events if isinstance(event, IterationEpochCommitted)) == 4


def test_nothing_is_left_of_the_rounds_of_code_that_was_mended_since(spark, tmp_path):
    """Of a stage with two iterations, of which the second one fails."""

    def twice(at):
        pipeline, fewer = counting_down(tmp_path / "mended", 99)
        return pipeline, counted_down(fewer.filter(lambda n: n == 3), tmp_path / "mended", at)

    with pytest.raises(UserFunctionError, match="ValueError: not yet"):
        run(tmp_path, spark, *twice(1), run_id="first")
    assert len(list((tmp_path / "store").rglob("iteration-*"))) == 2
    assert run(tmp_path, spark, *twice(99), run_id="second") == [(1,), (1,), (2,), (2,)]
    assert list((tmp_path / "store").rglob("iteration-*")) == []


class Noting:
    """A function that says in a file what it was given."""

    def __init__(self, file):
        self.file = file

    def __call__(self, value: int) -> int:
        with open(self.file, "a") as file:
            file.write(f"{value}\n")
        return value


class WithRules(BroadcastProcessFunction):
    def process_element(self, value, ctx):
        yield value

    def process_broadcast_element(self, value, ctx):
        yield from ()


def test_what_an_iteration_has_taken_in_is_not_asked_for_again(spark, tmp_path):
    def pipeline():
        counting, start = Pipeline("counting"), MapStateDescriptor("rules", str, int)
        numbers = counting.from_collection([9, 8], int, name="numbers")
        rules = counting.from_collection([1], int, name="rules").map(Noting(f"{tmp_path}/noted"), int)
        ruled = numbers.connect(rules.broadcast(start)).process(WithRules(), int)
        return counting, counted_down(ruled, tmp_path / "mended", 4)

    one_stage = {"execution.batch-shuffle-mode": "ALL_EXCHANGES_PIPELINED"}
    with pytest.raises(UserFunctionError, match="ValueError: not yet"):
        run(tmp_path, spark, *pipeline(), run_id="first", **one_stage)
    noted = (tmp_path / "noted").read_text()
    (tmp_path / "mended").touch()
    found = run(tmp_path, spark, *pipeline(), run_id="second", **one_stage)
    assert found == rows(sorted([*range(1, 9), *range(1, 8)]))
    assert (tmp_path / "noted").read_text() == noted == "1\n"


def test_files_of_earlier_rounds_are_deleted(spark, tmp_path):
    held = []

    def count(event):
        if isinstance(event, IterationEpochCommitted):
            (folder,) = (tmp_path / "store").rglob("iteration-*")
            held.append(sum(1 for path in folder.iterdir() if path.suffix != ".json"))

    def build(variables, data):
        on = variables[0].map(lambda n: n + 1, int)
        ends = on.flat_map(iterations.TerminateOnMaxIter(12))
        return iterations.IterationBodyResult([on], [iterations.forward_inputs_of_last_round(on)], ends)

    pipeline = Pipeline("long")
    numbers = pipeline.from_collection([0], int, name="numbers")
    (out,) = iterations.iterate_bounded_streams_until_termination([numbers], [], Body(build))
    assert run(tmp_path, spark, pipeline, out, count) == [(12,)]
    assert held[-1] == held[3]


def test_iterations_of_two_partitions_do_not_share_rounds(spark, tmp_path):
    for partition in ("one", "two"):
        pipeline, out = PROGRAMS["collatz"][0]()
        out.sink_to(FileSink(f"{tmp_path}/{partition}", name="out"))
        plan = pipeline.plan({"execution.runtime-mode": "BATCH", "parallelism.default": 2})
        store = IntermediateStore(f"{tmp_path}/store")
        (manifest,) = run_all(Run(plan, spark, store, "run", "run", partition))
        assert manifest.rows == len(trajectories(1, 2, 3, 7))


def start(folder, program, point, epoch, store=None, environment=None):
    job = [sys.executable, "-m", "tests.iterations.killed_job"]
    command = [*job, str(folder), program, point, str(epoch), store or f"{folder}/store"]
    env = {**os.environ, **(environment or {})}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=env)


def killed_and_run_again(program, point, epoch, expected, *where):
    """A run that is killed in an epoch, and one that goes on; that gives what it would have given."""
    killed = start(where[0], program, point, epoch, *where[1:])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = start(where[0], program, "never", 0, *where[1:])
    assert again.returncode == 0, again.stderr
    last = epoch if point == "committed" else epoch - 1
    assert f"resumed {last}\n" in again.stdout
    lines = [line.partition(" ") for line in again.stdout.splitlines()]
    assert min(int(number) for what, _, number in lines if what == "computed") == last + 1
    (result,) = [text for what, _, text in lines if what == "result"]
    assert sorted(map(tuple, json.loads(result))) == rows(expected)


KILLS = [
    (program, point)
    for program in ("components", "growing", "descent", "nearest", "nearest of many", "stale")
    for point in ("level", "committed")
]


@pytest.mark.rotates("kills")
@pytest.mark.parametrize(("program", "point"), KILLS)
def test_a_run_that_is_killed_goes_on_and_gives_what_it_would_have_given(tmp_path, program, point):
    random, expected = chance(f"{program} {point}"), PROGRAMS[program][1]
    epoch = random.randrange(1, 3)
    killed_and_run_again(program, point, epoch, expected, tmp_path)


@pytest.mark.rotates("processes")
@pytest.mark.spark
def test_rounds_in_a_bucket_are_gone_on_after(tmp_path):
    with served("lake") as environment:
        where = (tmp_path, "s3://lake/store", environment)
        killed_and_run_again("growing", "level", 2, PROGRAMS["growing"][1], *where)
        left = client(environment["AWS_ENDPOINT_URL"]).list_objects_v2(Bucket="lake").get("Contents", [])
    assert [one["Key"] for one in left if "iteration-" in one["Key"]] == []


class Dying(Failing):
    """A function whose worker is killed in a round, once."""

    def __call__(self, value: int) -> int:
        if value == self.at and not Path(self.flag).exists():
            Path(self.flag).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return value - 1


def test_a_round_is_tried_again_whose_worker_is_killed(tmp_path):
    """Spark's own retry of a task: in a session of its own that allows it."""
    program = f"""
import sys
from dagster_unified.engine import session
from tests.iterations.killed_job import run
from tests.iterations.test_on_spark import Dying, counting_down
spark = session.start("local[2,3]", config={{"spark.sql.shuffle.partitions": "2"}})
events = []
print("result", run({str(tmp_path)!r}, spark, *counting_down({str(tmp_path / "died")!r}, 4, Dying), events.append))
print("resumed", sum("goes on" in event.describe() for event in events if hasattr(event, "describe")))
spark.stop()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert (tmp_path / "died").exists()
    assert f"result {rows(sorted([*range(1, 9), *range(1, 8)]))}\nresumed 0\n" in done.stdout
