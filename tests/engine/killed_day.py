"""The run of a day that kills itself, as `kill -9` would, while it replaces the savepoint that the day before has left.

`python -m tests.engine.killed_day FOLDER POINT`; POINT is `tables` when the first table of the new savepoint is
written, `manifest` before its manifest is, or `replaced` when it is, and the tables of the day before are there still.
"""

import sys
from pathlib import Path

from dagster_unified.engine import session
from dagster_unified.engine.batch import savepoint
from dagster_unified.state import manifest
from tests.engine.savepoints.killed_run import die, dies_after
from tests.engine.test_carried_state import DAYS, run_day

if __name__ == "__main__":
    folder, point = sys.argv[1:]
    if point == "tables":
        savepoint.write_table = dies_after(savepoint.write_table)
    elif point == "manifest":
        manifest.commit = die
    elif point == "replaced":
        manifest.remove_tree = die
    spark = session.start("local[2]", config={"spark.driver.memory": "1g", "spark.sql.shuffle.partitions": "2"})
    run_day(spark, Path(folder), DAYS[1])
