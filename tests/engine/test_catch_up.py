"""What had arrived when a job began to drain, by the offsets that Spark reports."""

import pytest

from dagster_unified.engine.streaming.draining import covers


@pytest.mark.parametrize(
    ("read", "wanted", "covered"),
    [
        ({}, {}, True),
        ({"0": 5}, {}, True),
        ({"0": 5, "1": 2}, {"0": 5}, True),
        ({"0": 6}, {"0": 5}, True),
        ({"0": 4}, {"0": 5}, False),
        ({"0": 5}, {"0": 5, "1": 0}, False),
        ({"sales": {"0": 5}}, {"sales": {"0": 5}}, True),
        ({"sales": {"0": 4}}, {"sales": {"0": 5}}, False),
        ({"sales": 5}, {"sales": {"0": 5}}, False),
        ({"sales": {"0": 5}}, {"sales": 5}, False),
    ],
)
def test_offsets_cover_others_that_are_behind_them_in_each_part(read, wanted, covered):
    assert covers(read, wanted) is covered
