"""A run that kills itself, as `kill -9` would, while it leaves a savepoint or starts from one.

`python -m tests.engine.savepoints.killed_run FOLDER MODE POINT`; MODE is BATCH, which reads half of the events and
leaves the savepoint, or STREAMING, which starts from it. POINT is `tables` when the first table of the savepoint is
written, `manifest` before its manifest is, `restored` before the first epoch after it is written, `committed` when it
is and Spark does not know, or `second` when that is so of the second.
"""

import os
import signal
import sys

from dagster_unified.engine import session
from dagster_unified.engine.batch import savepoint
from dagster_unified.engine.streaming.epoch import EpochWriter
from dagster_unified.state import manifest
from tests.engine.savepoints.test_handover import leave_state, start_from_state


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def dies_after(function, calls=1):
    left = [calls]

    def call(*arguments):
        result = function(*arguments)
        left[0] -= 1
        if not left[0]:
            die()
        return result

    return call


if __name__ == "__main__":
    folder, mode, point = sys.argv[1:]
    if point == "tables":
        savepoint.write_table = dies_after(savepoint.write_table)
    elif point == "manifest":
        manifest.commit = die
    elif point == "restored":
        EpochWriter.commit = die
    elif point == "committed":
        EpochWriter.commit = dies_after(EpochWriter.commit)
    elif point == "second":
        EpochWriter.commit = dies_after(EpochWriter.commit, 2)
    spark = session.start("local[2]", config={"spark.driver.memory": "1g", "spark.sql.shuffle.partitions": "2"})
    (leave_state if mode == "BATCH" else start_from_state)(spark, folder)
