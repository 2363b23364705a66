"""Which executor a subtask goes back to."""

import pytest

from dagster_unified.spark_internals.placing import within_share


@pytest.mark.parametrize(
    ("places", "executors", "kept"),
    [
        ("abab", 2, "abab"),
        ("aaab", 2, "aa-b"),  # a slow start: two of them are free to run elsewhere
        ("aaaa", 1, "aaaa"),
        ("aaaa", 4, "a---"),  # three executors came later
        ("aab", 2, "aab"),
        ("ab", 8, "ab"),
        ("", 2, ""),
        ("ab", 0, "ab"),  # all are lost, and Spark places tasks where others come
    ],
)
def test_no_executor_keeps_more_than_its_share(places, executors, kept):
    found = within_share(dict(enumerate(places)), executors)
    assert "".join(found.get(subtask, "-") for subtask in range(len(places))) == kept
