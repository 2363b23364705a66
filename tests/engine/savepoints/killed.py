"""A job or run that kills itself, as `kill -9` would, at a point of a savepoint.

`python -m tests.engine.savepoints.killed WHAT FOLDER POINT CALLS`; WHAT is a job that is `drained`, one that is asked
to `take` a savepoint, a BATCH run that reads half of the events and `leaves` one, a STREAMING run that `starts` from
it, or the run of a `day` that replaces what the day before has left. `tables` is when CALLS tables are written.
"""

import os
import signal
import sys
from pathlib import Path

from dagster_unified.engine import session
from dagster_unified.engine.batch import savepoint
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.control import brings_end
from dagster_unified.engine.streaming.epoch import EpochWriter
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.engine.streaming.key_group_query import KeyGroupQuery
from dagster_unified.engine.streaming.savepoints import copy, export, schedule
from dagster_unified.state import manifest


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def before(function, calls):
    return die


def after(function, calls):
    left = [calls]

    def call(*arguments):
        result = function(*arguments)
        left[0] -= 1
        if not left[0]:
            die()
        return result

    return call


def after_the_end(commit, calls):
    def call(query, run, epoch):
        commit(query, run, epoch)
        if brings_end(query.folder / "spark" / query.name / "offsets" / str(epoch)):
            die()

    return call


UNFINISHED = {
    "unsent": (KeyGroupQuery, "end", before),
    "sent": (KeyGroupQuery, "end", after),
    "committed": (KeyGroupQuery, "_commit", after_the_end),  # the sinks have its epoch, and Spark does not know
    "logged": (CheckpointDirectory, "finish", before),
}
"""From where a job that is drained, and is started again, goes on."""

FINISHED = {
    "finished": (CheckpointDirectory, "finish", after),
    "tables": (export, "write_table", after),
    "manifest": (manifest, "commit", before),
    "saved": (manifest, "commit", after),
    "recorded": (copy.UnfinishedSavepoint, "commit", after),  # the deployment knows it, and who asked does not
}
"""Where it has nothing left to do but to write the savepoint, which who asked writes then."""

POINTS = {
    "drained": UNFINISHED | FINISHED,
    "take": {
        "copy": (copy, "_copy", after),
        "tables": (export, "write_table", after),
        "manifest": (manifest, "commit", before),
        "answer": (schedule, "answer", before),
        "committed": (EpochWriter, "commit", after),  # the sinks have the epoch, and Spark does not know
    },
    "leaves": {"tables": (savepoint, "write_table", after), "manifest": (manifest, "commit", before)},
    "starts": {"restored": (EpochWriter, "commit", before), "committed": (EpochWriter, "commit", after)},
    "day": {
        "tables": (savepoint, "write_table", after),
        "manifest": (manifest, "commit", before),
        "replaced": (manifest, "remove_tree", before),  # the tables of the day before are there still
    },
}


def run(spark, what, folder):
    if what in ("leaves", "starts"):
        from tests.engine.savepoints.test_handover import leave_state, start_from_state

        (leave_state if what == "leaves" else start_from_state)(spark, folder)
    elif what == "day":
        from tests.engine.test_carried_state import DAYS, run_day

        run_day(spark, folder, DAYS[1])
    else:
        from tests.engine.savepoints import test_draining, test_taking

        drained = what == "drained"
        shops = (test_draining if drained else test_taking).Shops(spark, folder)
        StreamingJob(shops.plan("first") if drained else shops.plan(), spark, Start("job")).run()


def command(what, folder, point, calls=1):
    """Starts it."""
    return [sys.executable, "-m", "tests.engine.savepoints.killed", what, str(folder), point, str(calls)]


if __name__ == "__main__":
    what, folder, point, calls = sys.argv[1:]
    owner, name, dies = POINTS[what][point]
    setattr(owner, name, dies(getattr(owner, name), int(calls)))
    spark = session.start("local[2]", config={"spark.driver.memory": "1g", "spark.sql.shuffle.partitions": "2"})
    run(spark, what, Path(folder))
