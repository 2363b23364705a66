"""A STREAMING job with its checkpoints in a bucket, and the runs that start from the savepoints that it leaves there.

`python -m tests.engine.savepoints.bucket_job FOLDER URL`; files come into FOLDER/in. It runs until somebody drains it;
the other runs begin when FOLDER/in has the last file, 3.parquet.
"""

import sys
import time
from pathlib import Path

from dagster_unified.engine import session
from dagster_unified.engine.streaming.job import Start, StreamingJob
from tests.engine.savepoints.shops import shops
from tests.engine.savepoints.test_handover import Cut
from tests.object_store import s3a

BUCKET = "s3://lake/live"
OPTIONS = {
    "execution.checkpointing.dir": f"{BUCKET}/checkpoints",
    "execution.savepoint.interval": "1 s",
    "pipeline.max-parallelism": 2,
    "parallelism.default": 1,
}


if __name__ == "__main__":
    folder, url = sys.argv[1:]
    config = {"spark.driver.memory": "1g", "spark.sql.shuffle.partitions": "1", **s3a(Path(folder), url)}
    cut = Cut(session.start("local[2]", config=config), folder)
    plan = shops(folder).plan({"execution.runtime-mode": "STREAMING", **OPTIONS})
    StreamingJob(plan, cut.spark, Start("job"), lambda event: print(event, flush=True)).run()
    while not Path(folder, "in/3.parquet").exists():
        time.sleep(0.1)
    for savepoint in ("asked", "drained"):
        for mode in ("BATCH", "STREAMING"):
            options = {"execution.state-recovery.path": f"{BUCKET}/{savepoint}"}
            cut.run(shops(folder, f"{savepoint} {mode}", monitor=False), mode, options)
