"""A streaming job that receives numbers as lines from a socket: `python -m tests.connectors.received FOLDER PORT`."""

import sys

from dagster_unified.api import Pipeline
from dagster_unified.connectors import DeltaSink, SocketSource
from dagster_unified.engine import session
from dagster_unified.engine.streaming.job import Start, StreamingJob

if __name__ == "__main__":
    folder, port = sys.argv[1], int(sys.argv[2])
    pipeline = Pipeline("received")
    numbers = pipeline.from_source(SocketSource("127.0.0.1", port, name="lines")).map(int, int)
    numbers.key_by(lambda n: n % 3, key_type=int).map(lambda n: n, int).sink_to(
        DeltaSink(f"{folder}/numbers", mode="append")
    )
    options = {
        "execution.runtime-mode": "STREAMING",
        "execution.checkpointing.dir": f"{folder}/checkpoints",
        "execution.checkpointing.num-retained": 1000,  # the test reads the log from its beginning
        "pipeline.max-parallelism": 2,
    }
    spark = session.start("local[2]", config={"spark.driver.memory": "1g", "spark.sql.shuffle.partitions": "2"})
    StreamingJob(pipeline.plan(options), spark, Start("received", patience=0.5)).run()
