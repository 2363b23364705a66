"""The phase of a streaming run, from what happens in it."""

import pytest

from dagster_unified.engine.events import EpochCommitted, PhaseBegun, QueriesStopped, SavepointTaken, StartDelayed
from dagster_unified.operators.metrics import Metrics
from dagster_unified.orchestration.phases import DRAINING, SAVING, STARTING, STOPPING, is_starting, phase_after

EPOCH = EpochCommitted("main", 0, 1, 0.1, None, Metrics(), {})
SAVED = SavepointTaken("command line", "here", 1.0)


@pytest.mark.parametrize(
    ("begins", "happened", "phases"),
    [
        (
            STARTING,
            [
                PhaseBegun("restoring state: from epoch 41 in /checkpoints"),
                PhaseBegun("starting query main"),
                PhaseBegun("query main is working on epoch 42"),
                EPOCH,
                PhaseBegun("query other is reading its sources"),
                SAVED,
            ],
            ["restoring state", "starting query main", "query main is working on epoch 42", *["running"] * 3],
        ),
        (DRAINING, [EPOCH, QueriesStopped(), SAVED], [DRAINING, SAVING, STOPPING]),
        (STOPPING, [EPOCH, QueriesStopped()], [STOPPING, SAVING]),
        (
            "running",
            [StartDelayed("slow", 2, 8, 4.0), PhaseBegun("starting query main"), EPOCH],
            ["starting again in 4 s", "starting query main", "running"],
        ),
    ],
)
def test_a_phase_follows_from_what_happens(begins, happened, phases):
    reached, phase = [], begins
    for event in happened:
        phase = phase_after(event, phase)
        reached.append(phase)
    assert reached == phases


def test_what_comes_before_the_first_epoch_is_starting():
    assert is_starting("restoring state")
    assert not any(map(is_starting, ["", "running", DRAINING, SAVING, STOPPING]))
