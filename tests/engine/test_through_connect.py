"""What the job's process and the server's say to each other, and what they do where the other one says nothing more.

A job that is killed is one that answers no more; the next one takes its lease, and goes on with the query or does not.
"""

import contextlib
import time
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace

import msgspec
import pytest
from pyspark import cloudpickle

from dagster_unified.engine.events import InputHeldBack, IterationEpochCommitted, IterationResumed
from dagster_unified.engine.iterations.epoch_log import Epoch
from dagster_unified.engine.iterations.files import Block, StoredMessage
from dagster_unified.engine.streaming import attaching, desired, through_connect
from dagster_unified.engine.streaming import job as jobs
from dagster_unified.engine.streaming.attaching import Running
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.epoch import Outcome, StoppedError
from dagster_unified.engine.streaming.iterations import Host
from dagster_unified.engine.streaming.key_group_query import KeyGroupQuery
from dagster_unified.engine.streaming.through_connect import (
    EpochDone,
    EpochFailed,
    EpochRejected,
    EpochRequested,
    EpochsElsewhere,
    EpochsHere,
    StartEpoch,
)
from dagster_unified.errors import LeaseLostError, MissingRequirementError, StageError
from dagster_unified.operators.metrics import Metrics

OUTCOME = Outcome({}, Metrics())


def test_a_query_whose_epochs_nobody_answers_to_fails_though_spark_runs_it():
    query = KeyGroupQuery.__new__(KeyGroupQuery)
    query.plan, query.name, query.spark, query.failure = SimpleNamespace(name="shops"), "main", None, None
    query.query, query._token = SimpleNamespace(isActive=True), 1
    query.directory = SimpleNamespace(check_lease=lambda token: None)
    query._elsewhere = SimpleNamespace(failure=ValueError("INTERNAL"))
    with pytest.raises(StageError, match="shops: stage 'main': ValueError: INTERNAL"):
        query.advance(None)


@pytest.fixture
def directory(tmp_path):
    return CheckpointDirectory(str(tmp_path), "shops")


def job_of(directory, token, started):
    """The job's side, which keeps what came of each epoch in `ended`."""
    observed, stopping = [], Event()
    host = Host(None, lambda: None, observed.append, stopping.is_set)
    plan, calls = SimpleNamespace(name="shops"), directory.path / "calls"
    found = EpochsElsewhere(plan, "main", calls, directory, token, started, host)
    found.observed, found.stopping = observed, stopping
    found.running = SimpleNamespace(isActive=True, exception=lambda: None, stop=lambda: None)
    found.ended, found.resumed = [], []

    def run_epoch(run, epoch):
        try:
            found.ended.append(run(False))
        except Exception as error:
            found.ended.append(error)
            raise

    def end_epoch(run, epoch):
        found.resumed.append((epoch, run and run(False)))

    found.run_epoch, found.end_epoch = run_epoch, end_epoch
    return found


@pytest.fixture
def held(directory):
    held = directory.take("a job", 60)
    yield held
    held.release()


@pytest.fixture
def job(directory, held):
    found = job_of(directory, held.token, held.token)
    found.serve(found.run_epoch)
    yield found
    found.close()


def asked(job):
    """The server's letters, with an epoch that may begin."""
    token = job._token
    mine, theirs = through_connect._of_server(job._folder, token), through_connect._of_job(job._folder, token)
    mine.send(EpochRequested(3))
    while theirs.receive() != StartEpoch(False):
        pass
    return mine, theirs


def until(look):
    end = time.monotonic() + 30
    while not (found := look()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def ended(job):
    return until(lambda: job.ended)[0]


def test_an_epoch_is_committed_there_and_closed_here(job):
    mine, _ = asked(job)
    mine.send(EpochDone(3, OUTCOME))
    assert ended(job) == OUTCOME


def test_what_iterations_say_in_an_epoch_is_heard_once_though_not_every_message_is_read(job):
    here = EpochsHere(b"", "main", job._folder, job._directory, job._token)
    asked(job)
    here._mine._number = 1  # it goes on where those messages are
    fed_back = [StoredMessage(0, 0, Block("records", 0, 1), 1)]
    done = Epoch(number=7, feedback=3, criteria=0, fed_back=fed_back, outputs=[], states=[], seconds=0.5)
    here._tell(IterationResumed("sinks", "loop", 6))
    until(lambda: job.observed)
    here._tell(IterationEpochCommitted("sinks", "loop", done))
    here._tell(InputHeldBack("loop", 3, 2))
    here._mine.send(EpochDone(3, OUTCOME, here._latest_events()))
    assert ended(job) == OUTCOME
    assert job.observed == [
        IterationResumed("sinks", "loop", 6),
        IterationEpochCommitted("sinks", "loop", msgspec.structs.replace(done, fed_back=[])),
        InputHeldBack("loop", 3, 2),
    ]


def test_an_epoch_hears_that_the_job_is_being_stopped_and_is_closed_all_the_same(job, monkeypatch):
    monkeypatch.setattr(through_connect, "_IDLE", 0.01)
    here = EpochsHere(cloudpickle.dumps(Runner()), "main", job._folder, job._directory, job._token)
    Runner.may_end.clear()
    Runner.ran = []
    thread = Thread(target=lambda: here(SimpleNamespace(sparkSession=None), 3))
    thread.start()
    until(lambda: Runner.ran)
    assert not here._is_stopping()
    job.stopping.set()
    until(here._is_stopping)
    Runner.may_end.set()
    thread.join(30)
    assert (ended(job), thread.is_alive()) == (OUTCOME, False)


def test_a_query_that_dies_in_an_epoch_is_a_failure(job):
    asked(job)
    job.running.isActive = False
    assert isinstance(ended(job), StageError)
    assert "ended on the Spark Connect server while it ran an epoch" in str(ended(job))


def test_a_job_that_stops_in_an_epoch_has_not_failed(job):
    asked(job)
    job.close()
    assert isinstance(ended(job), StoppedError)


def test_an_error_of_the_server_is_raised_here_with_its_class(job):
    mine, _ = asked(job)
    mine.send(EpochFailed("MissingRequirementError", "no pandas"))
    with pytest.raises(MissingRequirementError, match="no pandas"):
        raise ended(job)


def test_a_server_without_what_the_epochs_need_says_so(job, directory, held):
    here = EpochsHere(b"nothing", "main", job._folder, directory, held.token)

    def call():
        with contextlib.suppress(MissingRequirementError):
            here(None, 3)

    thread = Thread(target=call)
    thread.start()
    assert isinstance(ended(job), MissingRequirementError)
    assert "cannot load what commits the epochs of query 'main'" in str(ended(job))
    thread.join()


def test_a_server_whose_job_gives_no_sign_of_life_ends_the_query(directory, monkeypatch):
    monkeypatch.setattr(through_connect, "ORPHANED", 0.1)
    monkeypatch.setattr(through_connect, "_ALIVE", 0.05)
    held = directory.take("a job", 3600)  # its next sign of life is far away
    here = EpochsHere(b"", "main", directory.path / "calls", directory, held.token)
    with pytest.raises(LeaseLostError, match="no sign of life"):
        here(None, 0)
    held.release()
    with pytest.raises(LeaseLostError, match="has stopped"):
        here(None, 0)


# The next job


class Runner:
    """Runs an epoch once it may end."""

    may_end = Event()
    ran: list[int] = []

    def __init__(self):
        self.writer = SimpleNamespace(check=None, plan=SimpleNamespace(name="shops"))

    def begin(self, host):
        self.writer.check, self.host = host.check, host

    def run(self, frame, epoch, ends):
        Runner.ran.append(epoch)
        assert Runner.may_end.wait(30)
        self.writer.check()
        return OUTCOME

    def close(self):
        pass


class Server(Thread):
    """The server's side of one query, in an epoch; the job that has started it has the lease 1."""

    def __init__(self, directory, epoch):
        super().__init__(daemon=True)
        self.here = EpochsHere(cloudpickle.dumps(Runner()), "main", directory.path / "calls" / "1", directory, 1)
        self.epoch, self.error = epoch, None
        self.start()

    def run(self):
        try:
            self.here(SimpleNamespace(sparkSession=None), self.epoch)
        except Exception as error:
            self.error = error

    def ends(self):
        self.join(30)
        assert not self.is_alive()
        return self.error


@pytest.fixture
def epochs():
    """The epochs that the server runs, each until it may end."""
    Runner.may_end.clear()
    Runner.ran = []
    return Runner.ran


@pytest.fixture
def next_job(directory, epochs):
    """What makes the job that comes next, once it has the lease; it goes on with the query where it says so."""
    made = []

    def make(begun, goes_on=True):
        held = directory.take("the next job", 0)
        found = job_of(directory, held.token, 1)
        if begun is not None:
            found.go_on(found.run_epoch, found.end_epoch, begun)
        attaching.record(directory, Running(held.token, 1, queries={"main": ("id", "run")} if goes_on else {}))
        made.append((found, held))
        return found

    yield make
    for found, held in made:
        found.close()
        held.release()


@pytest.fixture
def killed(directory, epochs):
    """What a killed job has said, and what the server does: its letters."""
    held = directory.take("a job", 60)
    held._stopped.set()  # no sign of life comes from it
    attaching.record(directory, Running(1, 1, queries={"main": ("id", "run")}))
    return through_connect._of_job(directory.path / "calls" / "1", 1)


def logged(directory, epoch):
    """Spark logs an epoch."""
    commits = directory.path / "spark" / "main" / "commits"
    commits.mkdir(parents=True, exist_ok=True)
    (commits / str(epoch)).touch()


def test_the_next_job_answers_to_an_epoch_that_waits_for_one_that_was_killed(directory, killed, next_job, epochs):
    server = Server(directory, 3)
    Runner.may_end.set()
    job = next_job(begun=3)
    assert server.ends() is None
    assert (until(lambda: job.resumed), job.ended, epochs) == ([(3, OUTCOME)], [], [3])


@pytest.mark.parametrize("committed", [False, True])
def test_the_next_job_closes_an_epoch_that_runs_or_is_committed_and_not_logged(
    directory, killed, next_job, epochs, committed
):
    server = Server(directory, 3)
    if committed:
        Runner.may_end.set()
    killed.send(StartEpoch(False))
    if committed:
        until(lambda: isinstance(through_connect._of_server(directory.path / "calls" / "1", 1).receive(), EpochDone))
    until(lambda: epochs)
    job = next_job(begun=3)
    Runner.may_end.set()
    assert server.ends() is None
    assert (until(lambda: job.resumed), job.ended, epochs) == ([(3, OUTCOME)], [], [3])


def test_an_epoch_that_the_killed_job_has_closed_is_over(directory, killed, next_job, epochs):
    job = next_job(begun=3)
    logged(directory, 3)
    assert until(lambda: job.resumed) == [(3, None)]
    Runner.may_end.set()
    server = Server(directory, 4)
    assert server.ends() is None
    assert (until(lambda: job.ended), epochs) == ([OUTCOME], [4])


def test_the_epoch_after_one_that_was_closed_says_that_it_is(directory, killed, next_job, epochs):
    Runner.may_end.set()
    job = next_job(begun=3)
    server = Server(directory, 4)
    assert server.ends() is None
    assert (until(lambda: job.ended), job.resumed, epochs) == ([OUTCOME], [(3, None)], [4])


def test_what_a_job_says_that_wakes_up_too_late_is_not_heard(directory, killed, next_job, epochs):
    server = Server(directory, 3)
    held = directory.take("the next job", 0)  # which does not know yet whether it goes on with the query
    killed.send(EpochRejected("another job has taken over"))
    time.sleep(3 * through_connect._ALIVE)
    assert (server.is_alive(), epochs) == (True, [])
    Runner.may_end.set()
    killed.send(StartEpoch(False))
    job = job_of(directory, held.token, 1)
    job.go_on(job.run_epoch, job.end_epoch, 3)
    attaching.record(directory, Running(held.token, 1, queries={"main": ("id", "run")}))
    assert server.ends() is None
    assert (until(lambda: job.resumed), epochs) == ([(3, OUTCOME)], [3])
    job.close()
    held.release()


def test_an_epoch_of_which_nothing_can_be_learnt_any_more_is_let_go_of(directory, killed):
    class Gone:
        @property
        def isActive(self):
            raise ConnectionError("the server is gone")

        def stop(self):
            pass

    held = directory.take("the next job", 0)
    job = job_of(directory, held.token, 1)
    job.running = Gone()
    ends = []
    job.go_on(job.run_epoch, lambda run, epoch: ends.append((run, epoch)), 3)
    assert str(until(lambda: job.failure)) == "the server is gone"
    ((run, epoch),) = ends
    assert epoch == 3
    with pytest.raises(ConnectionError, match="the server is gone"):
        run(False)
    job.close()
    held.release()


def test_a_query_ends_where_the_next_job_does_not_go_on_with_it(directory, killed, next_job, epochs):
    server = Server(directory, 3)
    next_job(begun=None, goes_on=False)
    assert "another job has taken over the checkpoint directory, and runs a query of its own" in str(server.ends())
    assert epochs == []


def test_an_epoch_that_runs_is_not_committed_where_the_next_job_has_another_query(directory, killed, next_job, epochs):
    server = Server(directory, 3)
    killed.send(StartEpoch(False))
    until(lambda: epochs)
    next_job(begun=None, goes_on=False)
    Runner.may_end.set()
    assert isinstance(server.ends(), LeaseLostError)


def test_an_earlier_job_does_not_say_any_more_which_queries_run(directory, killed):
    attaching.record(directory, Running(2, 1))
    with pytest.raises(LeaseLostError, match="another job has taken over the checkpoint directory and its queries"):
        attaching.record(directory, Running(1, 1))


# Which queries the next job goes on with


def running_of(directory):
    ids = {"main": ("1", "first"), "sums": ("2", "second")}
    return Running(1, 1, 5, ("host:1", "me"), "session", "settings", ids)


@pytest.fixture
def server(monkeypatch):
    """The queries that a server runs in the session of the killed job, by their ids."""
    there = {id_: SimpleNamespace(id=id_, runId=run, isActive=True) for id_, run in (("1", "first"), ("2", "second"))}
    session = SimpleNamespace(
        streams=SimpleNamespace(get=there.get), catalog=SimpleNamespace(dropTempView=lambda view: False)
    )
    monkeypatch.setattr(attaching, "is_connect", lambda spark: True)
    monkeypatch.setattr(attaching, "server_of", lambda spark: ("host:1", "me"))
    monkeypatch.setattr(attaching, "settings_of", lambda spark: "settings")
    monkeypatch.setattr(attaching, "in_session", lambda spark, id_: session)
    return there


def find(directory, version=5, names=("main", "sums")):
    found = attaching.find(directory, None, SimpleNamespace(version=version), names)
    return found and set(found.queries)


def test_a_job_goes_on_with_the_queries_of_the_one_before_where_all_run(directory, server):
    directory.take("a job", 60)
    assert find(directory) is None  # no job has left any
    attaching.record(directory, running_of(directory))
    assert find(directory) == {"main", "sums"}


def lose(server):
    del server["2"]


def end(server):
    server["2"].isActive = False


def restart(server):
    server["2"].runId = "third"


@pytest.mark.parametrize("happens", [lose, end, restart])
def test_a_job_starts_all_queries_anew_where_one_is_gone(directory, server, happens):
    directory.take("a job", 60)
    attaching.record(directory, running_of(directory))
    happens(server)
    assert find(directory) is None


def test_a_job_starts_queries_anew_that_are_not_those_it_wants(directory, server, monkeypatch):
    directory.take("a job", 60)
    attaching.record(directory, running_of(directory))
    assert find(directory, names=("main",)) is None
    assert find(directory, version=6) is None  # a savepoint was restored meanwhile, or a job has begun to start
    for name, other in (("server_of", ("host:2", "me")), ("server_of", ("host:1", "you")), ("settings_of", "others")):
        with monkeypatch.context() as changed:
            changed.setattr(attaching, name, lambda spark, other=other: other)
            assert find(directory) is None
    assert find(directory) is not None
    desired.ask(directory, stop=1, reason="no progress")
    assert find(directory) is None


def test_a_job_stops_the_queries_that_it_does_not_go_on_with(server, caplog):
    stopped = []
    for id_, query in server.items():
        query.stop = lambda id_=id_: stopped.append(id_)
    held = running_of(None)
    attaching.end(msgspec.structs.replace(held, server=("host:2", "me")), None, Path("checkpoints"))
    assert "may still run on the Spark Connect server at host:2" in caplog.text
    assert stopped == []
    lose(server)
    attaching.end(held, None, Path("checkpoints"))
    assert stopped == ["1"]


def test_a_job_that_has_stopped_leaves_no_queries(directory, server):
    held = directory.take("a job", 60)
    attaching.record(directory, running_of(directory))
    held.release()
    assert find(directory) is None


@pytest.mark.parametrize(
    ("lease", "said", "leaves"),
    [
        (1, Running(1, 1), False),
        (2, Running(1, 1), True),  # it will say whether it goes on with the queries
        (2, Running(2, 1), True),
        (2, Running(2, 2), False),  # it has queries of its own
    ],
)
def test_a_job_that_wakes_up_leaves_the_queries_to_the_job_that_goes_on_with_them(
    directory, monkeypatch, lease, said, leaves
):
    happened = []
    monkeypatch.setattr(jobs, "is_connect", lambda spark: True)
    held = [directory.take("a job", 0) for _ in range(lease)]
    attaching.record(directory, said)
    woken = jobs.StreamingJob.__new__(jobs.StreamingJob)
    query = SimpleNamespace(name="main", leave=lambda: happened.append("left"), stop=lambda: happened.append("stopped"))
    woken.directory, woken.spark, woken._saving = directory, None, None
    woken._lease, woken._queries, woken._segments = held[0], [query], [0]
    woken.stop()
    assert happened == ["left" if leaves else "stopped"]
    for one in held[1:]:
        one.release()
