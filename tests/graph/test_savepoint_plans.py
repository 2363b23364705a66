"""What a plan says of the state that partitions hand on, and of savepoints that a run starts from and leaves."""

import pytest

from dagster_unified.api import Pipeline, WatermarkGenerator, WatermarkStrategy
from dagster_unified.errors import UnsupportedError
from dagster_unified.graph.options import Configuration
from dagster_unified.graph.plan import plan


def test_the_keyed_stages_of_a_run_that_leaves_a_savepoint_hand_on_their_state():
    pipeline = Pipeline("shops")
    pipeline.from_collection([("a", 1)], tuple[str, int]).key_by("f0").reduce(lambda a, b: a).print()
    left = pipeline.plan({"execution.savepoint.path": "/data/savepoint"})
    assert [bool(region.carried) for region in left.regions] == [False, True]
    assert not any(region.carried for region in pipeline.plan().regions)
    assert left.regions[1].fingerprint != pipeline.plan().regions[1].fingerprint


def test_one_job_for_all_stages_hands_nothing_on():
    pipeline = Pipeline("p")
    pipeline.from_collection([1]).key_by(lambda n: n, key_type=int).sum().print()
    with pytest.raises(
        UnsupportedError, match=r"execution.batch-shuffle-mode=ALL_EXCHANGES_PIPELINED has no stages; remove the option"
    ):
        plan(
            pipeline.graph(),
            Configuration.of({"execution.batch-shuffle-mode": "ALL_EXCHANGES_PIPELINED"}),
            carry_state=True,
        )


class Complete(WatermarkGenerator[int]):
    def on_event(self, event, event_timestamp, output):
        output.emit_watermark(event_timestamp)


def test_a_partition_does_not_end_with_the_watermark_of_a_generator():
    pipeline = Pipeline("p")
    strategy = WatermarkStrategy.for_generator(Complete).with_timestamp_assigner(lambda n: n)
    timed = pipeline.from_collection([1]).assign_timestamps_and_watermarks(strategy)
    timed.key_by(lambda n: n, key_type=int).sum().print()
    with pytest.raises(UnsupportedError, match=r"hand on the watermark of 'timestamps', because BATCH asks no"):
        plan(pipeline.graph(), carry_state=True)
