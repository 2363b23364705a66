"""What is committed of an iteration of a stream, and what becomes of it where a job was killed or a file is damaged."""

import pytest
from upath import UPath

from dagster_unified.api import Pipeline, iterations
from dagster_unified.engine.iterations.feedback_log import Begun, FeedbackLog, StreamRound
from dagster_unified.engine.iterations.files import Block, StoredParcel
from dagster_unified.engine.iterations.journal import Epoch, Input
from dagster_unified.engine.iterations.savepoints import BEFORE
from dagster_unified.engine.streaming.relays import Relays
from dagster_unified.errors import StateError
from dagster_unified.graph.nodes import RelayNode
from dagster_unified.graph.segments import segments
from dagster_unified.operators.drivers.key_groups import ControlEvent
from tests.iterations.test_semantics import Body


def round_of(epoch, number, parallelism=2):
    return StreamRound(Epoch(number, 0, 0, [], [], [], "{}", 0.0), epoch, True, parallelism)


@pytest.fixture
def log(tmp_path):
    found = FeedbackLog(str(tmp_path), "p: iteration 'loop'")
    found.begin(Begun(2, False, [["step"]], ["n: int64"]))
    return found


def again(tmp_path):
    return FeedbackLog(str(tmp_path), "p: iteration 'loop'")


def test_a_job_that_was_killed_before_its_first_round_takes_its_first_epoch_again(log, tmp_path):
    log.start(round_of(BEFORE, 7), [])
    log.take(0, Input(2, [], [], "{}"))
    restarted = again(tmp_path)
    assert (restarted.has(0), restarted.last.round.number) == (True, 7)
    restarted.start(round_of(BEFORE, 7), [])  # no epoch was committed, so it starts from the savepoint again
    assert (restarted.has(0), again(tmp_path).has(0)) == (False, False)


def test_a_round_that_cannot_be_read_is_an_error_and_not_the_round_before(log, tmp_path):
    log.commit(round_of(0, 0), [])
    log.commit(round_of(1, 1), [])
    newest = max(tmp_path.glob("round-*.json"))
    newest.write_bytes(newest.read_bytes()[:10])
    with pytest.raises(StateError, match="iteration 'loop': what is committed of one of its rounds cannot be read"):
        again(tmp_path)


def test_the_end_of_an_iteration_knows_of_how_many_subtasks_its_state_is(log, tmp_path):
    log.commit(round_of(0, 0), [])
    assert log.left().parallelism == 2
    log.end([], 4)
    assert again(tmp_path).left().parallelism == 4


def test_a_stream_that_is_idle_says_so_in_the_epoch_after_its_last_records(tmp_path):
    pipeline = Pipeline("p")
    body = Body(lambda v, d: iterations.IterationBodyResult([v[0].filter(lambda n: False)], v))
    (out,) = iterations.iterate_unbounded_streams([pipeline.from_collection([1], int)], [], body)
    out.key_by(lambda v: v, key_type=int).reduce(max).print()
    first, _ = segments(pipeline.plan({"execution.runtime-mode": "STREAMING"}))
    (relay,) = (node for node in first.graph.nodes if isinstance(node, RelayNode))
    relays = Relays(first, (relay.id,), UPath(tmp_path), UPath(tmp_path))
    relays.begin(None)
    idle = ControlEvent(idle=[relay.uid])
    relays.commit(relay, 0, [StoredParcel(0, 0, Block("records", 0, 1), 1)], idle, False, (2,), lambda: None)
    assert (relays.owes_idleness, relays.read(relay, 0).idle) == (True, False)
    relays.owes_idleness = False  # the query has an epoch for it
    relays.commit(relay, 1, [], idle, False, (2,), lambda: None)
    assert (relays.owes_idleness, relays.read(relay, 1).idle) == (False, True)
