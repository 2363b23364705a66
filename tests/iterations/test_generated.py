"""Bodies that hypothesis makes up, against a model of FLIP-176: in the harness, and on Spark.

There runs are stopped, and a Python worker is killed in a round.
"""

import pyarrow.parquet as pq
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from dagster_unified.connectors import FileSink
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.engine.events import IterationEpochCommitted
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.errors import StageError
from dagster_unified.testing import run_pipeline
from tests.depth import examples
from tests.iterations.generated import Model, Spec, TooManyError, built, specs
from tests.iterations.victims import Trap
from tests.support import streaming


def modelled(spec: Spec):
    """What the model gives, and the model; an example whose records multiply is another one's."""
    model = Model(spec)
    try:
        return model.run(), model
    except TooManyError:
        assume(False)


@settings(suppress_health_check=list(HealthCheck))
@given(specs(), st.sampled_from(["BATCH", "STREAMING"]))
def test_a_body_gives_in_the_harness_what_flip_176_says(spec, mode):
    expected, _ = modelled(spec)
    pipeline, stream = built(spec)
    stream.print("out")
    assert sorted(run_pipeline(pipeline, mode, seed=3).sinks["out"]) == expected


def written(folder, spec, trap, options):
    """The plan of a pipeline that writes what its iteration gives to a folder."""
    pipeline, stream = built(spec, trap)
    stream.sink_to(FileSink(f"{folder}/out", name="out"))
    return pipeline.plan(options)


def read(folder):
    return sorted(tuple(row.values()) for row in pq.read_table(f"{folder}/out").to_pylist())


class Stopped(Exception):
    """Ends a run where it is."""


class Rounds:
    """Hears which rounds a run commits; the first worker is killed that feeds back in round `killed`."""

    def __init__(self, file, begun=0, killed=None):
        self.trap, self.committed, self._begun, self._killed = Trap(file), [], begun, killed
        self._set()

    def __call__(self, event):
        if isinstance(event, IterationEpochCommitted):
            self.committed.append(event.epoch.number)
            self._set()

    def _set(self):
        if self._begun + len(self.committed) == self._killed:
            self.trap.set()


FAULTS = st.sampled_from(["stop", "kill"])


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(5), phases=[Phase.generate])
@given(specs(st.integers(1, 2)), FAULTS, st.integers(0, 10))
def test_a_body_gives_the_same_on_spark_though_its_run_is_stopped_or_a_worker_killed(
    spark, tmp_path_factory, spec, fault, when
):
    expected, model = modelled(spec)
    folder = tmp_path_factory.mktemp("generated")
    kills = fault == "kill" and bool(model.fed)
    first = Rounds(folder / "trap", killed=model.fed[when % len(model.fed)] if kills else None)
    again = Rounds(folder / "trap")

    def run(rounds, check=lambda: None):
        plan = written(folder, spec, rounds.trap, {"execution.runtime-mode": "BATCH"})
        store = IntermediateStore(f"{folder}/store")
        run_all(Run(plan, spark, store, "run", "execution", observe=rounds, check=check), again=True)

    left = iter(range(when + 2))

    def stop():
        if next(left, None) is None:
            raise Stopped

    try:
        run(first, (lambda: None) if kills else stop)
    except (StageError, Stopped) as error:
        if "Stopped" not in repr(error) and not first.trap.has_killed:
            raise
        run(again)
    assert first.trap.has_killed == kills  # and another task may have carried out what the worker had
    assert first.committed + again.committed == list(range(model.rounds))
    assert read(folder) == expected


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(3), phases=[Phase.generate])
@given(specs(st.integers(1, 2)), st.lists(st.tuples(FAULTS, st.integers(1, 3)), min_size=1, max_size=2))
def test_a_body_gives_the_same_in_a_stream_that_is_stopped_or_whose_worker_is_killed(
    spark, tmp_path_factory, spec, faults
):
    expected, model = modelled(spec)
    folder = tmp_path_factory.mktemp("generated")
    options = streaming(folder, 4)
    committed: list[int] = []
    for fault, when in [*faults, (None, 0)]:
        still_fed = [epoch for epoch in model.fed if epoch >= len(committed)]
        killed = still_fed[when % len(still_fed)] if fault == "kill" and still_fed else None
        rounds = Rounds(folder / "trap", len(committed), killed)
        job = StreamingJob(written(folder, spec, rounds.trap, options), spark, Start("test", patience=0.5), rounds)

        def enough(rounds=rounds, when=when, stops=fault == "stop"):
            return stops and len(rounds.committed) >= when

        try:
            ended = job.run(enough)
        except StageError:
            if not rounds.trap.has_killed:
                raise
            ended = "killed"
        assert rounds.trap.has_killed == (killed is not None)
        committed += rounds.committed
        if ended == "finished":
            break
    assert ended == "finished"
    assert committed == list(range(model.rounds))
    assert read(folder) == expected
