"""A STREAMING job that kills itself, as `kill -9` would, while it is drained with a savepoint.

`python -m tests.engine.savepoints.killed_drain FOLDER POINT CALLS`; POINT is `unsent` before the end of the input is
sent, `sent` when it is, `committed` when the sinks have its epoch and Spark does not know, `logged` when Spark does,
`finished` when the end is recorded, `tables` when CALLS tables of the savepoint are written, `manifest` before its
manifest is, `saved` when it is, `recorded` when the deployment knows it and who asked does not.
"""

import sys
from pathlib import Path

from dagster_unified.engine import session
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.control import brings_end
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.engine.streaming.key_group_query import KeyGroupQuery
from dagster_unified.engine.streaming.savepoints import copy, export
from dagster_unified.state import manifest
from tests.engine.savepoints.killed_run import die, dies_after
from tests.engine.savepoints.test_draining import Shops

UNFINISHED = ("unsent", "sent", "committed", "logged")
"""The points from which a job that is started again goes on."""

FINISHED = ("finished", "tables", "manifest", "saved", "recorded")
"""The points at which a job has nothing left to do but to write the savepoint, which who asked writes then."""


def dies_at_end(commit):
    def call(query, run, epoch):
        commit(query, run, epoch)
        if brings_end(query.folder / "spark" / query.name / "offsets" / str(epoch)):
            die()

    return call


if __name__ == "__main__":
    folder, point, calls = sys.argv[1:]
    if point == "unsent":
        KeyGroupQuery.end = die
    elif point == "sent":
        KeyGroupQuery.end = dies_after(KeyGroupQuery.end)
    elif point == "committed":
        KeyGroupQuery._commit = dies_at_end(KeyGroupQuery._commit)
    elif point == "logged":
        CheckpointDirectory.finish = die
    elif point == "finished":
        CheckpointDirectory.finish = dies_after(CheckpointDirectory.finish)
    elif point == "tables":
        export.write_table = dies_after(export.write_table, int(calls))
    elif point == "manifest":
        manifest.commit = die
    elif point == "saved":
        manifest.commit = dies_after(manifest.commit)
    elif point == "recorded":
        copy._complete = dies_after(copy._complete)
    spark = session.start("local[2]", config={"spark.driver.memory": "1g", "spark.sql.shuffle.partitions": "2"})
    StreamingJob(Shops(spark, Path(folder)).plan("first"), spark, Start("job")).run()
