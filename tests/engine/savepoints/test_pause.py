"""Queries are held until all are between two epochs; then something is done once, and all go on."""

from threading import Event, Thread

import pytest

from dagster_unified.api import Pipeline
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.savepoints.request import Pause, Request
from dagster_unified.engine.streaming.savepoints.schedule import SavepointSchedule
from dagster_unified.graph.queries import MAIN


def held(pause, name, epoch):
    """A query's thread, which ends when the query goes on."""

    def run():
        going_on = Event()
        pause.hold(name, epoch, going_on.set)
        going_on.wait()

    thread = Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_the_last_query_to_be_held_lets_all_go_on_behind_what_is_done():
    done = []
    pause = Pause(["main", "main-1"], done.append)
    first = held(pause, "main", 7)
    first.join(0.1)
    assert first.is_alive()
    assert not done
    second = held(pause, "main-1", None)
    first.join(10)
    second.join(10)
    assert not first.is_alive()
    assert not second.is_alive()
    assert done == [{"main": 7, "main-1": None}]
    held(pause, "main", 8).join(10)  # who comes late goes on
    assert len(done) == 1


def test_what_fails_holds_nobody():
    def failing(epochs):
        raise OSError("no space left")

    pause, went_on = Pause(["main"], failing), Event()
    with pytest.raises(OSError, match="no space left"):
        pause.hold("main", 1, went_on.set)
    assert went_on.is_set()


def test_giving_up_lets_those_go_on_that_wait_but_not_before_what_is_being_done_has_ended():
    pause = Pause(["main", "main-1"], lambda epochs: pytest.fail("not all were held"))
    waiting = held(pause, "main", 1)
    pause.give_up()
    waiting.join(10)
    assert not waiting.is_alive()
    held(pause, "main-1", 1).join(10)

    begun, may_end, order = Event(), Event(), []

    def slow(epochs):
        begun.set()
        may_end.wait(10)
        order.append("done")

    pause = Pause(["main"], slow)
    last = Thread(target=pause.hold, args=("main", 1, lambda: order.append("went on")))
    last.start()
    begun.wait(10)
    stopping = Thread(target=pause.give_up)
    stopping.start()
    stopping.join(0.1)
    assert stopping.is_alive()
    may_end.set()
    stopping.join(10)
    last.join(10)
    assert order == ["done", "went on"]


class Running:
    name, held = MAIN, False

    def pause(self, pause):
        self.held = True


def test_no_query_is_held_before_there_is_anything_to_save(tmp_path, monkeypatch):
    """Those behind one that waits for its first record would wait as long."""
    asked = Request("one", 1, 0, "test")
    monkeypatch.setattr("dagster_unified.engine.streaming.savepoints.schedule.pending", lambda *_: [asked])
    monkeypatch.setattr("dagster_unified.engine.streaming.savepoints.schedule.LOOK", 0)
    pipeline = Pipeline("p")
    pipeline.from_collection([1]).print()
    plan, query, directory = pipeline.plan(), Running(), CheckpointDirectory(str(tmp_path), "p")
    lease = directory.take("test", patience=1)
    saving = SavepointSchedule(plan, None, directory, lease, [], [query], lambda event: None)
    assert saving.look() == []
    assert not query.held
    (directory.path / "spark/main/commits").mkdir(parents=True)
    (directory.path / "spark/main/commits/0").write_text("v1")
    assert saving.look() == []
    assert query.held
    lease.release()
