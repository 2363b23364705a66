"""The sink where the server crashes, where jobs are killed or stopped in the middle, and where several write at once.

The tasks run in this process and its children, so that a fault costs no Spark; `test_kit.py` has Spark.
"""

import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
import time
from contextlib import closing
from typing import NamedTuple
from uuid import uuid4

import pytest

from dagster_unified.connectors.protocol.commits import Commit, CommitUncertainError, WriteAttempt
from dagster_unified.connectors.sql.postgres import PostgresSink, committer
from dagster_unified.connectors.sql.postgres.committer import PostgresWrite
from dagster_unified.engine.commit import WriteContext
from dagster_unified.errors import UnavailableError
from tests.connectors.sql.support import execute, rows, staging_tables
from tests.connectors.support import LocalCommits, identity, stage, write
from tests.depth import SEED, chance, examples
from tests.servers.postgres import PostgresServer
from tests.small_disk import NEEDS_ROOT, small_disk

FORK = multiprocessing.get_context("fork")


class Sale(NamedTuple):
    id: int
    shop: str


FEW = [Sale(n, "few") for n in range(50)]
MANY = [Sale(n, f"shop {n}") for n in range(20_000)]


def staged(commits, tasks, **who):
    """A begun write: the committer, and the commit that is due."""
    attempt = WriteAttempt(identity(**who), uuid4().hex, "stage")
    made = commits._open(None)
    made.begin([attempt])
    return made, Commit(attempt, stage(commits.sink, tasks, attempt))


def ids(url, table="sales"):
    return sorted(row[0] for row in rows(url, f"SELECT id FROM {table}"))


def test_rows_that_a_crash_of_the_server_takes_are_missed(postgres, postgres_server):
    sink = PostgresSink("sales", postgres)
    with closing(LocalCommits(sink, Sale)) as commits:
        made, commit = staged(commits, [MANY, FEW], epoch=0)
        postgres_server.restart(signal.SIGKILL)
        with pytest.raises((UnavailableError, CommitUncertainError)):
            made.commit([commit])  # the connection is dead
        with pytest.raises(UnavailableError, match=r"staged rows are gone.*another attempt stages them again"):
            made.commit([commit])
        assert ids(postgres) == []
        commits.write([MANY, FEW], [WriteContext(identity(epoch=0), "stage")])
    assert ids(postgres) == sorted(sale.id for sale in MANY + FEW)
    assert staging_tables(postgres) == []


@pytest.mark.parametrize("state", ["25P03", "25P04"])
def test_a_commit_that_the_server_ends_is_asked_about(postgres, state):
    execute(
        postgres,
        "CREATE TABLE sales (id int8, shop text)",
        "CREATE FUNCTION ends() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN RAISE EXCEPTION 'terminating connection' USING ERRCODE = '{state}'; END $$",
        "CREATE TRIGGER ends BEFORE INSERT ON sales EXECUTE FUNCTION ends()",
    )
    with closing(LocalCommits(PostgresSink("sales", postgres), Sale)) as commits:
        made, commit = staged(commits, [FEW], epoch=0)
        with pytest.raises(CommitUncertainError):
            made.commit([commit])
        execute(postgres, "DROP TRIGGER ends ON sales")
        made.commit([commit])
    assert len(ids(postgres)) == len(FEW)


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_a_server_that_is_killed_in_mid_commit_has_all_or_nothing(postgres, postgres_server, mode):
    given = {"mode": "upsert", "key": "id"} if mode == "upsert" else {}
    random = chance(f"postgres killed in mid-commit {mode}")
    count = 0
    with closing(LocalCommits(PostgresSink("sales", postgres, **given), Sale)) as commits:
        for epoch in range(examples(2)):
            records = [Sale(epoch * 100_000 + n, "x") for n in range(random.choice((30, 30_000)))]
            how = random.choice((signal.SIGKILL, signal.SIGQUIT))
            killer = threading.Timer(random.uniform(0, 0.4), postgres_server.restart, [how])
            killer.start()
            deadline = time.monotonic() + 60
            while True:
                try:
                    commits.write([records], [WriteContext(identity(epoch=epoch), "stage")])
                    break
                except (UnavailableError, CommitUncertainError):
                    assert time.monotonic() < deadline
                    time.sleep(0.3)
            killer.join()
            count += len(records)
            assert rows(postgres, "SELECT count(*), count(DISTINCT id) FROM sales") == [(count, count)], f"seed {SEED}"
    write(PostgresSink("after", postgres), FEW)
    assert staging_tables(postgres) == []


def _write_and_fall(url, moment, how, pipe):
    """A job that is killed, or stops, at a moment of its write."""

    def fall():
        pipe.send("fell")
        os.kill(os.getpid(), how)

    committer._IDLE_SECONDS = 2
    sink = PostgresSink("sales", url)
    with closing(LocalCommits(sink, Sale)) as commits:
        made = commits._open(None)
        owner = made if hasattr(made, moment) else PostgresWrite
        original = getattr(owner, moment, None)
        if moment == "staged":
            fall_at = fall
        else:
            fall_at = lambda: None  # noqa: E731

            def falls(*arguments):
                found = original(*arguments)
                fall()
                return found

            setattr(owner, moment, falls)
        try:
            commits.write([MANY, FEW], [WriteContext(identity(epoch=0), "stage", fall_at)])
            pipe.send("committed")
        except BaseException as error:
            pipe.send(type(error).__name__)


MOMENTS = ["begin", "staged", "_copy_inline", "_mark", "_clear", "_insert", "write", "commit", "clean_up"]


def _fallen(url, moment, how):
    here, there = FORK.Pipe()
    process = FORK.Process(target=_write_and_fall, args=(url, moment, how, there), daemon=True)
    process.start()
    assert here.poll(60)
    assert here.recv() == "fell"
    return process, here


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_job_that_is_killed_leaves_nothing_that_the_next_does_not_clear(postgres, moment):
    process, _ = _fallen(postgres, moment, signal.SIGKILL)
    process.join()
    write(PostgresSink("sales", postgres), MANY, FEW, epoch=0)
    assert ids(postgres) == sorted(sale.id for sale in MANY + FEW)
    write(PostgresSink("after", postgres), FEW)
    assert staging_tables(postgres) == []


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_job_that_stops_does_not_hold_up_its_successor_and_finds_itself_succeeded(postgres, moment):
    process, said = _fallen(postgres, moment, signal.SIGSTOP)
    try:
        write(PostgresSink("sales", postgres), MANY, FEW, epoch=0)
        write(PostgresSink("sales", postgres), [Sale(-1, "next")], epoch=1)
        os.kill(process.pid, signal.SIGCONT)
        assert said.poll(60)
        process.join()
    finally:
        process.kill()
    assert ids(postgres) == sorted([-1, *(sale.id for sale in MANY + FEW)])
    write(PostgresSink("after", postgres), FEW)
    assert staging_tables(postgres) == []


def _write_epochs(url, given, last):
    """A job that goes on where the table's own marks say it ended, as a stream does from its checkpoint."""
    sink = PostgresSink("sales", url, **given)
    with closing(LocalCommits(sink, Sale)) as commits:
        done = commits._open(None).last_version(identity(epoch=0).writer)
        for epoch in range(max(0, (-1 if done is None else done)), last + 1):  # the last one comes again
            commits.write(_epoch(epoch), [WriteContext(identity(epoch=epoch), "stage")])


def _epoch(epoch):
    few = [Sale(epoch * 10_000 + n, f"epoch {epoch}") for n in range(epoch % 5 * 10)]
    many = [Sale(epoch * 10_000 + 1000 + n, f"epoch {epoch}") for n in range(9_000 if epoch % 3 == 0 else 0)]
    return [few, many]


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_jobs_that_are_killed_at_any_moment_lose_nothing_and_write_nothing_twice(postgres, postgres_server, mode):
    given = {"mode": "upsert", "key": "id"} if mode == "upsert" else {}
    random, kills, last = chance(f"postgres killed at any moment {mode}"), 0, 0
    while kills < examples(5):
        last += random.randrange(1, 4)
        process = FORK.Process(target=_write_epochs, args=(postgres, given, last), daemon=True)
        process.start()
        process.join(random.uniform(0, 0.6))
        if process.is_alive():
            process.kill()
            kills += 1
        process.join()
        if random.random() < 0.05:
            postgres_server.restart(signal.SIGKILL)
    _write_epochs(postgres, given, last)
    expected = sorted(sale for epoch in range(last + 1) for task in _epoch(epoch) for sale in task)
    assert sorted(rows(postgres, "SELECT id, shop FROM sales")) == expected, f"seed {SEED}, {kills} kills"
    write(PostgresSink("after", postgres), FEW)
    assert staging_tables(postgres) == []


def test_what_a_task_that_ran_twice_has_staged_is_dropped(postgres):
    with closing(LocalCommits(PostgresSink("sales", postgres), Sale)) as commits:
        made, commit = staged(commits, [MANY], epoch=0)
        stage(commits.sink, [MANY], commit.attempt, retry=1)
        made.commit([commit])
        assert len(staging_tables(postgres)) == 1
        made.clean_up([commit.attempt], True)
    assert len(ids(postgres)) == len(MANY)
    assert staging_tables(postgres) == []


def test_what_another_living_job_has_staged_stays(postgres):
    with closing(LocalCommits(PostgresSink("sales", postgres), Sale)) as commits:
        made, commit = staged(commits, [MANY], execution="one")
        write(PostgresSink("sales", postgres), MANY, execution="two")
        made.commit([commit])
        assert len(ids(postgres)) == 2 * len(MANY)
        _, dead = staged(commits, [MANY], execution="three")
        assert dead.committables[0].table in staging_tables(postgres)
    write(PostgresSink("sales", postgres), FEW, execution="four")
    assert staging_tables(postgres) == []


@pytest.mark.parametrize("mode", ["append", "overwrite"])
def test_of_two_runs_of_a_partition_at_once_one_is_left(postgres, mode):
    sink = PostgresSink("sales", postgres, mode=mode, partition_column="of")
    write(sink, [Sale(-1, "other")], execution="other", partition="tue")
    for number in range(examples(3)):
        sizes = (FEW, MANY)
        jobs = [
            threading.Thread(
                target=write, args=(sink, sizes[n]), kwargs={"execution": f"{number}-{n}", "partition": "mon"}
            )
            for n in range(2)
        ]
        [job.start() for job in jobs]
        [job.join() for job in jobs]
        left = [row for (row,) in rows(postgres, "SELECT id FROM sales WHERE of = 'mon' ORDER BY id")]
        assert left in [[sale.id for sale in size] for size in sizes]
    assert rows(postgres, "SELECT id FROM sales WHERE of = 'tue'") == [(-1,)]
    assert staging_tables(postgres) == []


@pytest.mark.parametrize("key", [None, "id"])
def test_two_deployments_write_to_one_table_at_once(postgres, key):
    given = {"mode": "upsert", "key": key} if key else {}

    def deployed(name, records):
        with closing(LocalCommits(PostgresSink("sales", postgres, **given), Sale)) as commits:
            for epoch in range(10):
                commits.write([records[epoch::10]], [WriteContext(identity(execution=name, epoch=epoch), "stage")])

    jobs = [threading.Thread(target=deployed, args=(name, FEW + MANY[:2000])) for name in ("one", "two")]
    [job.start() for job in jobs]
    [job.join() for job in jobs]
    assert len(ids(postgres)) == (2000 if key else 2 * 2050)


@NEEDS_ROOT
@pytest.mark.parametrize("what", ["table", "staged"])
def test_a_full_disk_at_the_server_is_transient_and_nothing_of_the_write_is_visible(postgres, postgres_server, what):
    small = postgres_server.folder / f"small-{what}"
    on_small = " TABLESPACE small" if what == "table" else ""
    with small_disk(small, megabytes=3) as resize:
        try:
            subprocess.run(["chown", "postgres", str(small)], check=True)
            execute(
                postgres,
                f"CREATE TABLESPACE small LOCATION '{small}'",
                f"CREATE TABLE sales (id int8, shop text){on_small}",
            )
            if what == "staged":
                execute(postgres, "ALTER ROLE postgres SET default_tablespace = small")
            sink = PostgresSink("sales", postgres)
            write(sink, FEW, epoch=0)
            with pytest.raises(UnavailableError, match=r"No space left on device.*; make room on its disk; then anot"):
                write(sink, *[MANY] * 5, epoch=1)
            assert len(ids(postgres)) == len(FEW)
            resize(60)
            write(sink, *[MANY] * 5, epoch=1)
            assert len(ids(postgres)) == len(FEW) + 5 * len(MANY)
            assert staging_tables(postgres) == []
        finally:
            execute(
                postgres,
                "ALTER ROLE postgres RESET default_tablespace",
                "DROP TABLE IF EXISTS sales",
                "DROP SCHEMA IF EXISTS dagster_unified CASCADE",
                "DROP TABLESPACE IF EXISTS small",
            )


@NEEDS_ROOT
def test_a_server_that_its_full_disk_ends_has_nothing_of_the_write_and_takes_it_when_there_is_room(postgres_programs):
    """PostgreSQL stops where it cannot write its log, and starts again once it can."""
    server = PostgresServer(postgres_programs, initdb=["--wal-segsize=1"])
    small, log = server.folder / "small", server.folder / "data" / "pg_wal"
    try:
        with small_disk(small, megabytes=8) as resize:
            try:
                shutil.copytree(log, small / "wal")
                shutil.rmtree(log)
                log.symlink_to(small / "wal")
                subprocess.run(["chown", "-R", "postgres", str(small)], check=True)
                server.start()
                sink = PostgresSink("sales", server.url())
                write(sink, FEW, epoch=0)
                with pytest.raises(
                    UnavailableError, match=r"sink 'sales': postgresql://.* (does not answer|cannot do)"
                ):
                    write(sink, *[MANY] * 6, epoch=1)
                server.stop(signal.SIGQUIT)
                resize(100)
                server.start()
                assert len(ids(server.url())) == len(FEW)
                write(sink, *[MANY] * 6, epoch=1)
                write(sink, *[MANY] * 6, epoch=1)
                assert len(ids(server.url())) == len(FEW) + 6 * len(MANY)
                assert staging_tables(server.url()) == []
            finally:
                server.stop(signal.SIGQUIT)
    finally:
        server.remove()
