"""A STREAMING job that keeps four checkpoints, in a bucket.

`python -m tests.engine.savepoints.copied_job FOLDER URL`.
"""

import sys
from pathlib import Path

from dagster_unified.engine import session
from dagster_unified.engine.streaming.job import Start, StreamingJob
from tests.engine.savepoints.test_taking import Shops
from tests.object_store import s3a

BUCKET = "s3://lake/copied"
KEPT = 4

if __name__ == "__main__":
    folder, url = sys.argv[1:]
    config = {"spark.driver.memory": "1g", "spark.sql.shuffle.partitions": "1", **s3a(Path(folder), url)}
    shops = Shops(session.start("local[2]", config=config), Path(folder), BUCKET)
    plan = shops.plan(**{"parallelism.default": 1, "execution.checkpointing.num-retained": KEPT})
    StreamingJob(plan, shops.spark, Start("job")).run()
