"""A STREAMING job that kills itself, as `kill -9` would, while it takes a savepoint that it is asked for.

`python -m tests.engine.savepoints.killed_savepoint FOLDER POINT`; POINT is `copy` when the first part of the
checkpoint is copied, `tables` when the first table is written, `manifest` before its manifest is, or `committed` when
the sinks have the second epoch and Spark does not know. `answer` is when the savepoint is whole and nobody has been
told.
"""

import sys
from pathlib import Path

from dagster_unified.engine import session
from dagster_unified.engine.streaming.epoch import EpochWriter
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.engine.streaming.savepoints import copy, export, schedule
from dagster_unified.state import manifest
from tests.engine.savepoints.killed_run import die, dies_after
from tests.engine.savepoints.test_taking import Shops

if __name__ == "__main__":
    folder, point = sys.argv[1:]
    if point == "copy":
        copy._copy = dies_after(copy._copy)
    elif point == "tables":
        export.write_table = dies_after(export.write_table)
    elif point == "manifest":
        manifest.commit = die
    elif point == "answer":
        schedule.answer = die
    elif point == "committed":
        EpochWriter.commit = dies_after(EpochWriter.commit, 2)
    spark = session.start("local[2]", config={"spark.driver.memory": "1g", "spark.sql.shuffle.partitions": "2"})
    StreamingJob(Shops(spark, Path(folder)).plan(), spark, Start("job")).run()
