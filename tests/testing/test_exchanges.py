"""Exchanges that choose a record's subtask, in the harness."""

from collections import Counter

import pytest

from dagster_unified.api import PrintSink
from dagster_unified.testing import run_pipeline
from tests import exchanges


@pytest.mark.parametrize("mode", ["BATCH", "STREAMING"])
@pytest.mark.parametrize("micro_batch", [1, None])
def test_each_subtask_sees_the_records_that_an_exchange_sends_to_it(mode, micro_batch):
    found = run_pipeline(exchanges.pipeline(PrintSink), mode, micro_batch=micro_batch)
    assert {name: Counter(rows) for name, rows in found.sinks.items()} == exchanges.expected()
