"""Where records without a key go."""

from collections import Counter

import pyarrow as pa
import pytest

from dagster_unified.api import Pipeline
from dagster_unified.errors import PipelineError
from dagster_unified.operators.routing import SPREAD, Rebalance, Sender
from dagster_unified.testing import run_pipeline


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("buffers", [1, 3])
def test_small_batches_of_many_partitions_are_spread_over_all_subtasks(count, buffers):
    rows = pa.record_batch({"value": pa.array(range(buffers * SPREAD))})
    found = Counter(
        subtask for partition in range(24) for subtask, _ in Rebalance(count).split(rows, Sender(partition))
    )
    assert found == dict.fromkeys(range(count), 24 * buffers // count)


@pytest.mark.parametrize("given", [1.9, 1.0, True, None, "1", -1, 2])
def test_what_is_no_subtask_is_an_error_that_names_the_key(given):
    pipeline = Pipeline("p")
    stream = pipeline.from_collection(["a"]).partition_custom(
        lambda key, count: given, lambda value: value, key_type=str
    )
    stream.map(lambda value: value, str).set_parallelism(2).print()
    for mode in ("BATCH", "STREAMING"):
        with pytest.raises(
            PipelineError, match=f"the partitioner gave {given!r} for key 'a'; it must be a whole number"
        ):
            run_pipeline(pipeline, mode)
