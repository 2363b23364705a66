"""Requests for savepoints: each is to one job, has an answer of its own, and does not outlive who asks or is asked."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from dagster_unified.api import Pipeline
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.desired import read_desired
from dagster_unified.engine.streaming.savepoints.request import answer, await_answer, forget, pending, request, take
from dagster_unified.errors import StateError


@pytest.fixture
def directory(tmp_path):
    return CheckpointDirectory(str(tmp_path), "shops")


@pytest.fixture
def lease(directory):
    held = directory.take("a job", 20)
    yield held
    held.release()


def plan():
    pipeline = Pipeline("shops")
    pipeline.from_collection([1, 2], int).print()
    return pipeline.plan({"execution.runtime-mode": "STREAMING"})


def asking(directory, thread, token, **how):
    """Another process that asks for a savepoint, once its request is there."""
    asked = thread.submit(take, plan(), directory, "asker", "test", lambda: None, **how)
    while not pending(directory, token):
        assert not asked.done(), asked.result()
    return asked


def left(directory):
    return [path.name for folder in ("requests", "answers") for path in (directory.path / folder).rglob("*.json")]


def test_two_who_ask_at_once_have_an_answer_each(directory, lease):
    first = request(directory, lease.token, "first", path="here")
    second = request(directory, lease.token, "second")
    assert {one.reason for one in pending(directory, lease.token)} == {"first", "second"}
    answer(directory, second, "there")
    answer(directory, first, error="it failed")
    assert pending(directory, lease.token) == []
    assert await_answer(directory, second).location == "there"
    assert await_answer(directory, first).error == "it failed"
    assert left(directory) == []


def test_an_answer_counts_also_when_the_job_has_ended_since(directory, lease):
    wanted = request(directory, lease.token, "test", stop=True)
    answer(directory, wanted, "there")
    lease.release()
    assert await_answer(directory, wanted).location == "there"


def test_who_asked_a_job_that_was_replaced_is_told_so_and_the_new_job_takes_nothing(directory, lease):
    with ThreadPoolExecutor(1) as thread:
        asked = asking(directory, thread, lease.token)
        new = directory.take("a job", 20)
        with pytest.raises(StateError, match="shops: the job was killed or replaced before it had taken the savepoint"):
            asked.result()
    assert pending(directory, new.token) == left(directory) == []
    new.release()


def test_what_is_left_of_a_request_whose_asker_was_killed_is_removed_at_the_next_start(directory, lease):
    old = request(directory, lease.token, "before the restart")
    new = directory.take("a job", 20)
    wanted = request(directory, new.token, "after it")
    assert pending(directory, new.token) == [wanted]
    forget(directory, new.token)
    assert left(directory) == [f"{wanted.id}.json"]
    assert old.id != wanted.id
    new.release()


def test_a_job_that_ended_meanwhile_has_its_savepoint_taken_where_it_has_stopped(directory, lease):
    with ThreadPoolExecutor(1) as thread:
        asked = asking(directory, thread, lease.token)
        lease.release()
        with pytest.raises(StateError, match="there is no state to save"):
            asked.result()


def test_suspending_with_a_savepoint_asks_for_both(directory, lease):
    with ThreadPoolExecutor(1) as thread:
        asked = asking(directory, thread, lease.token, then="suspended")
        (wanted,) = pending(directory, lease.token)
        assert wanted.stop
        answer(directory, wanted, error="no space left on device")
        with pytest.raises(StateError, match=r"^no space left on device$"):
            asked.result()
    assert read_desired(directory).state == "suspended"


def test_nothing_is_suspended_where_there_is_a_savepoint_in_the_path_already(directory, lease, tmp_path):
    (tmp_path / "held").mkdir()
    (tmp_path / "held/manifest.json").write_text("{}")
    with pytest.raises(StateError, match="held"):
        take(plan(), directory, "asker", "test", lambda: None, path=f"{tmp_path}/held", then="suspended")
    assert read_desired(directory).state is None
    assert pending(directory, lease.token) == []
