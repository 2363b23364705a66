"""Where records without a key go."""

from collections import Counter

import pyarrow as pa
import pytest

from dagster_unified.operators.addresses import SPREAD, Anywhere
from dagster_unified.operators.lanes import Packer


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("buffers", [1, 3])
def test_small_batches_of_many_partitions_are_spread_over_all_subtasks(count, buffers):
    rows = pa.record_batch({"value": pa.array(range(buffers * SPREAD))})
    found = Counter(
        subtask for partition in range(24) for subtask, _ in Anywhere(count).split(rows, Packer(partition, 16))
    )
    assert found == dict.fromkeys(range(count), 24 * buffers // count)
