"""Runs that hand state to each other through savepoints in a bucket, where Spark has no connector for it.

`python -m tests.engine.savepoints.bucket_run FOLDER`; FOLDER/absent is where workers find packages that they must not
need.
"""

import sys

from dagster_unified.engine import session
from tests.engine.savepoints.test_handover import EVENTS, KILLED, Cut

BUCKET = "s3://lake/handed over"


if __name__ == "__main__":
    folder = sys.argv[1]
    config = {
        "spark.driver.memory": "1g",
        "spark.sql.shuffle.partitions": "2",
        "spark.executorEnv.PYTHONPATH": f"{folder}/absent",
    }
    cut, path = Cut(session.start("local[2]", config=config), folder), f"{folder}/table"
    cut.run(KILLED(EVENTS[:4], path), "BATCH", {"execution.savepoint.path": f"{BUCKET}/one"})
    between = {"execution.state-recovery.path": f"{BUCKET}/one", "execution.savepoint.path": f"{BUCKET}/two"}
    cut.run(KILLED(EVENTS[:8], path), "STREAMING", between)
    cut.run(KILLED(EVENTS, path), "BATCH", {"execution.state-recovery.path": f"{BUCKET}/two"})
    Cut(cut.spark, f"{folder}/whole").run(KILLED(EVENTS, f"{folder}/once"), "BATCH")
