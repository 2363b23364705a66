"""Tasks that stay for many orders: which one takes what, and what happens to them."""

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from dagster_unified.engine.iterations import jobs
from dagster_unified.engine.iterations.jobs import ResidentTasks, SeparateJobs, can_stay
from tests.iterations.killed_job import run
from tests.iterations.programs import PROGRAMS
from tests.iterations.support import rows


def by(order, attempt):
    """The order, and the process that has carried it out."""
    time.sleep(0.1)
    return b"%s by %d" % (order, os.getpid())


def by_which(answers):
    return [answer.split()[2] for answer in answers]


def all_of(tasks, *orders):
    for number, order in enumerate(orders):
        tasks.give(number, order)
    return [answer for _, answer in sorted(tasks.answered() for _ in orders)]


@pytest.fixture
def closing():
    opened = []
    yield lambda tasks: opened.append(tasks) or tasks
    for tasks in opened:
        tasks.close(failed=True)


def test_an_order_goes_to_the_task_that_had_the_last_one_of_its_number(spark, closing):
    tasks = closing(ResidentTasks(spark, 2, by))
    for _ in range(100):
        first = by_which(all_of(tasks, b"1", b"2"))
        if len(set(first)) == 2:
            break  # the second task has come
    assert [by_which(all_of(tasks, b"1", b"2")) for _ in range(5)] == [first] * 5
    assert len(all_of(tasks, *map(b"%d".__mod__, range(9)))) == 9  # more than there are tasks


def test_a_job_makes_room_for_others_after_a_while(spark, closing, monkeypatch):
    begun, job = [], jobs._Job
    monkeypatch.setattr(jobs, "_Job", lambda *given: begun.append(job(*given)) or begun[-1])
    monkeypatch.setattr(jobs, "LONGEST", 0.0)
    tasks = closing(ResidentTasks(spark, 2, by))
    for _ in range(3):
        assert len(all_of(tasks, b"1", b"2", b"3")) == 3
    assert len(begun) >= 3


def test_one_task_is_enough(spark, closing, tmp_path):
    """Where another job has the other cores, also when all is done."""

    def works(_):
        (tmp_path / "begun").touch()
        time.sleep(8)

    busy = threading.Thread(target=spark.range(0, 1, 1, 1).rdd.map(works).collect)
    busy.start()
    while not (tmp_path / "begun").exists():
        time.sleep(0.05)
    tasks = closing(ResidentTasks(spark, 2, by))
    assert len(set(by_which(all_of(tasks, b"1", b"2", b"3")))) == 1
    tasks.close()
    assert busy.is_alive()
    busy.join()


def failing(order, attempt):
    if order == b"fail":
        raise ValueError("no such order")
    return order


def test_what_fails_in_a_task_is_raised_and_others_follow(spark, closing):
    tasks = closing(ResidentTasks(spark, 2, failing))
    with pytest.raises(Exception, match="ValueError: no such order"):
        all_of(tasks, b"1", b"fail")
    tasks.close(failed=True)
    tasks = closing(ResidentTasks(spark, 2, failing))
    assert all_of(tasks, b"1", b"2") == [b"1", b"2"]


def with_a_timeout(order, attempt):
    socket.setdefaulttimeout(5 if order == b"5" else None)
    return order


def test_a_default_timeout_of_a_function_is_not_that_of_the_next_job(spark, closing, monkeypatch):
    monkeypatch.setattr(jobs, "LONGEST", 0.0)
    tasks = closing(ResidentTasks(spark, 2, with_a_timeout))
    for seconds in (b"5", b"5", b"5", b"none", b"none", b"none"):  # for other tests' sake the last ones take it back
        assert all_of(tasks, seconds, seconds) == [seconds, seconds]


def test_tasks_do_not_stay_where_the_path_of_a_socket_would_be_too_long(spark, monkeypatch):
    assert can_stay(spark)
    monkeypatch.setattr("tempfile.tempdir", "/" + 60 * "ü")
    assert not can_stay(spark)


def slow(order, attempt):
    Path(order.decode()).touch()
    time.sleep(60)
    return order


@pytest.mark.parametrize("kind", [ResidentTasks, SeparateJobs])
def test_a_job_that_is_cancelled_ends_at_once(spark, closing, tmp_path, kind):
    def in_a_job(order):
        return spark.range(1).rdd.map(lambda _: slow(order, 0)).collect()

    tasks = closing(ResidentTasks(spark, 2, slow) if kind is ResidentTasks else SeparateJobs(spark, in_a_job))
    works = tmp_path / "works"

    def cancel():
        while not works.exists():
            time.sleep(0.05)
        spark.sparkContext.cancelAllJobs()

    threading.Thread(target=cancel).start()
    begun = time.monotonic()
    with pytest.raises(Exception, match="cancelled"):
        all_of(tasks, bytes(works))
    tasks.close(failed=True)
    assert time.monotonic() - begun < 50


def until_it_is_there(order, attempt):
    begun = time.monotonic()
    while not Path(order.decode()).exists():
        if time.monotonic() - begun > 60:
            return b"missing"
        time.sleep(0.05)
    return b"there"


def test_a_job_that_is_old_gives_cores_back_while_one_order_takes_long(spark, closing, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "LONGEST", 0.5)
    tasks = closing(ResidentTasks(spark, 2, until_it_is_there))
    all_of(tasks, bytes(tmp_path), bytes(tmp_path))
    ran = tmp_path / "ran"
    tasks.give(0, bytes(ran))
    other = threading.Thread(target=spark.range(0, 2, 1, 2).rdd.map(lambda _: ran.touch()).collect)
    other.start()
    assert tasks.answered() == (0, b"there")
    other.join()


@pytest.mark.parametrize("wait", [0, 1])
def test_where_something_else_has_failed_tasks_are_not_waited_for(spark, closing, tmp_path, wait):
    tasks = closing(ResidentTasks(spark, 2, slow))
    tasks.give(0, bytes(tmp_path / "works"))
    time.sleep(wait)  # also where the job has not been submitted yet
    begun = time.monotonic()
    tasks.close(failed=True)
    assert time.monotonic() - begun < 50


@pytest.mark.parametrize("name", ["stale", "nearest", "components"])
def test_where_tasks_cannot_stay_the_result_is_the_same(spark, tmp_path, name, monkeypatch):
    monkeypatch.setattr("dagster_unified.engine.iterations.levels.can_stay", lambda spark: False)
    build, expected = PROGRAMS[name]
    assert run(tmp_path, spark, *build()) == rows(expected)
