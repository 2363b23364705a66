"""A streaming job over a topic that kills itself at a point of an epoch.

`python -m tests.connectors.kafka.killed_source FOLDER EPOCH POINT ADDRESS TOPIC`; the points are those of
`tests.engine.killed_job`.
"""

import os
import sys
from pathlib import Path

from dagster_unified.api import Pipeline
from dagster_unified.connectors.kafka import KafkaOffsetsInitializer, KafkaSource
from dagster_unified.engine import session
from dagster_unified.engine.streaming.job import Start, StreamingJob
from tests.engine.killed_job import OPTIONS, KillingSink, Row, add


def build(folder: Path, address: str, topic: str) -> Pipeline:
    pipeline = Pipeline("killed")
    source = KafkaSource(
        topic, Row, address, bounded=KafkaOffsetsInitializer.latest(), max_records_per_trigger=50, name="rows"
    )
    rows = pipeline.from_source(source)
    rows.sink_to(KillingSink(str(folder / "all"), mode="append", name="all"))
    rows.key_by("key").reduce(add).uid("totals").sink_to(
        KillingSink(str(folder / "totals"), mode="upsert", key="key", name="totals")
    )
    return pipeline


if __name__ == "__main__":
    folder, address, topic = Path(sys.argv[1]), *sys.argv[4:]
    KillingSink.epoch, KillingSink.point = int(sys.argv[2]), sys.argv[3]
    spark = session.start("local[2]", config={"spark.driver.memory": "1g", "spark.sql.shuffle.partitions": "2"})
    options = {**OPTIONS, "execution.checkpointing.dir": str(folder / "checkpoints")}
    sys.stdout.write(
        StreamingJob(
            build(folder, address, topic).plan(options), spark, Start(f"job {os.getpid()}", patience=0.5)
        ).run()
    )
