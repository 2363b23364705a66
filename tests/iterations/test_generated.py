"""Bodies that hypothesis makes up, against a model of FLIP-176: in the harness, and on Spark in stopped runs."""

import pyarrow.parquet as pq
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from dagster_unified.api import FileSink
from dagster_unified.engine.batch.intermediates.store import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.engine.events import RoundCommitted
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.errors import StageError
from dagster_unified.testing import run_pipeline
from tests.depth import examples
from tests.iterations.generated import Model, Spec, TooManyError, built, specs


def modelled(spec: Spec):
    """What the model gives, and in how many rounds; an example whose records multiply is another one's."""
    model = Model(spec)
    try:
        found = model.run()
    except TooManyError:
        assume(False)
    return found, model.rounds


@settings(suppress_health_check=list(HealthCheck))
@given(specs(), st.sampled_from(["BATCH", "STREAMING"]))
def test_a_body_gives_in_the_harness_what_flip_176_says(spec, mode):
    expected, _ = modelled(spec)
    pipeline, stream = built(spec)
    stream.print("out")
    assert sorted(run_pipeline(pipeline, mode, seed=3).sinks["out"]) == expected


class Stopped(Exception):
    """Ends a run where it is."""


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(5), phases=[Phase.generate])
@given(specs(st.integers(1, 2)), st.integers(2, 12))
def test_a_body_gives_the_same_on_spark_though_its_run_is_stopped(spark, tmp_path_factory, spec, steps):
    expected, rounds = modelled(spec)
    folder = tmp_path_factory.mktemp("generated")
    first: list[int] = []
    again: list[int] = []

    def run(committed, check):
        pipeline, stream = built(spec)
        stream.sink_to(FileSink(f"{folder}/out", name="out"))
        plan = pipeline.plan({"execution.runtime-mode": "BATCH"})

        def observe(event):
            if isinstance(event, RoundCommitted):
                committed.append(event.epoch.number)

        store = IntermediateStore(f"{folder}/store")
        run_all(Run(plan, spark, store, "run", "execution", observe=observe, check=check), again=True)

    left = iter(range(steps))

    def stop():
        if next(left, None) is None:
            raise Stopped

    stopped = False
    try:
        run(first, stop)
    except (StageError, Stopped) as error:
        if "Stopped" not in repr(error):
            raise
        stopped = True
        run(again, lambda: None)
    assert first == list(range(len(first)))
    if stopped:
        assert again == list(range(len(first), rounds))
    else:
        assert len(first) == rounds
    rows = pq.read_table(f"{folder}/out").to_pylist()
    assert sorted(tuple(row.values()) for row in rows) == expected


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(3), phases=[Phase.generate])
@given(specs(st.integers(1, 2)), st.lists(st.integers(1, 3), max_size=2))
def test_a_body_gives_the_same_in_a_stream_that_is_stopped(spark, tmp_path_factory, spec, rounds_until_stops):
    expected, _ = modelled(spec)
    folder = tmp_path_factory.mktemp("generated")
    pipeline, stream = built(spec)
    stream.sink_to(FileSink(f"{folder}/out", name="out"))
    plan = pipeline.plan(
        {
            "execution.runtime-mode": "STREAMING",
            "execution.checkpointing.dir": f"{folder}/checkpoints",
            "pipeline.max-parallelism": 4,
        }
    )
    for enough in [*rounds_until_stops, None]:
        committed: list[RoundCommitted] = []

        def observe(event, committed=committed):
            if isinstance(event, RoundCommitted):
                committed.append(event)

        ended = StreamingJob(plan, spark, Start("test", patience=0.5), observe).run(
            lambda committed=committed, enough=enough: enough is not None and len(committed) >= enough
        )
        if ended == "finished":
            break
    assert ended == "finished"
    rows = pq.read_table(f"{folder}/out").to_pylist()
    assert sorted(tuple(row.values()) for row in rows) == expected
