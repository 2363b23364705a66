"""What state a partition cannot hand on to the next is an error that says what to do."""

import pytest

from dagster_unified.api import Pipeline, WatermarkGenerator, WatermarkStrategy
from dagster_unified.errors import UnsupportedError
from dagster_unified.graph.options import Configuration
from dagster_unified.graph.plan import plan


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
