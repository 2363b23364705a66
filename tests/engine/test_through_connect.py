"""What the job's process and the server's say to each other, and what they do where the other one says nothing more."""

import contextlib
from threading import Thread
from types import SimpleNamespace

import pytest

from dagster_unified.engine.streaming import through_connect
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.epoch import Outcome, StoppedError
from dagster_unified.engine.streaming.packed import PackedQuery
from dagster_unified.engine.streaming.through_connect import Asked, Done, EpochsElsewhere, EpochsHere, Failed, Go
from dagster_unified.errors import LeaseLostError, MissingRequirementError, StageError
from dagster_unified.operators.metrics import Metrics

OUTCOME = Outcome({}, Metrics())


def test_a_query_whose_epochs_nobody_answers_to_fails_though_spark_runs_it():
    query = PackedQuery.__new__(PackedQuery)
    query.plan, query.name, query.spark, query.failure = SimpleNamespace(name="shops"), "main", None, None
    query.query = SimpleNamespace(isActive=True)
    query._elsewhere = SimpleNamespace(failure=ValueError("INTERNAL"))
    with pytest.raises(StageError, match="shops: stage 'main': ValueError: INTERNAL"):
        query.advance(None)


@pytest.fixture
def directory(tmp_path):
    return CheckpointDirectory(str(tmp_path), "shops")


@pytest.fixture
def job(directory):
    """The job's side, which keeps what came of each epoch in `ended`."""
    found = EpochsElsewhere(SimpleNamespace(name="shops"), "main", directory.path / "calls", directory, 7)
    found.running = SimpleNamespace(isActive=True, exception=lambda: None)
    found.ended = []

    def run_epoch(run, epoch):
        try:
            found.ended.append(run(False))
        except Exception as error:
            found.ended.append(error)
            raise

    found.serve(run_epoch)
    yield found
    found.close()


def asked(job):
    """The server's letters, with an epoch that may begin."""
    mine, theirs = through_connect._letters(job._folder)
    mine.send(Asked(3))
    while theirs.receive() != Go(False):
        pass
    return mine, theirs


def ended(job):
    while not job.ended:
        pass
    return job.ended[0]


def test_an_epoch_is_committed_there_and_closed_here(job):
    mine, _ = asked(job)
    mine.send(Done(OUTCOME))
    assert ended(job) == OUTCOME


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
    mine.send(Failed("MissingRequirementError", "no pandas"))
    with pytest.raises(MissingRequirementError, match="no pandas"):
        raise ended(job)


def test_a_server_without_what_the_epochs_need_says_so(job, directory):
    held = directory.take("a job", 60)
    here = EpochsHere(b"nothing", "main", job._folder, directory, held.token)

    def call():
        with contextlib.suppress(MissingRequirementError):
            here(None, 3)

    thread = Thread(target=call)
    thread.start()
    assert isinstance(ended(job), MissingRequirementError)
    assert "cannot load what commits the epochs of query 'main'" in str(ended(job))
    thread.join()
    held.release()


def test_a_server_whose_job_gives_no_sign_of_life_ends_the_query(directory, monkeypatch):
    monkeypatch.setattr(through_connect, "PATIENCE", 0.1)
    monkeypatch.setattr(through_connect, "_ALIVE", 0.05)
    held = directory.take("a job", 3600)  # its next sign of life is far away
    here = EpochsHere(b"", "main", directory.path / "calls", directory, held.token)
    with pytest.raises(LeaseLostError, match="no sign of life"):
        here(None, 0)
    held.release()
    with pytest.raises(LeaseLostError, match="has stopped"):
        here(None, 0)
