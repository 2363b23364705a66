"""What a sink promises follows from what its target is able to do."""

import pytest

from dagster_unified.graph.connectors import Capabilities


@pytest.mark.parametrize(
    ("capabilities", "promised"),
    [
        (Capabilities(), "at-least-once"),
        (Capabilities(transactional=True, replaces_partition=True, undoes=True), "exactly-once"),
        (
            Capabilities(transactional=True, undoes=True),
            "exactly-once, but running a partition again writes rows again",
        ),
        (
            Capabilities(transactional=True),
            "exactly-once, but running a partition again or going back to a savepoint writes rows again",
        ),
        (Capabilities(transactional=True, upsert=True), "upsert"),
        (Capabilities(upsert=True), "upsert"),
    ],
)
def test_the_guarantee_follows_from_the_capabilities(capabilities, promised):
    assert capabilities.describe() == promised
