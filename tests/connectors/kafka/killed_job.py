"""A job that writes rows of files to a topic, once as they are and once summed, for the tests that kill it.

`python -m tests.connectors.kafka.killed_job MODE FOLDER ADDRESS TOPIC`: FOLDER/in has the files; rows go to TOPIC, sums
to TOPIC-totals.
"""

import sys
from pathlib import Path
from typing import NamedTuple

from dagster_unified.api import Pipeline
from dagster_unified.connectors import KafkaSink, ParquetSource
from dagster_unified.engine import session
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.engine.streaming.job import Start, StreamingJob


class Row(NamedTuple):
    key: str
    number: int


def add(a: Row, b: Row) -> Row:
    return Row(a.key, a.number + b.number)


def build(folder: Path, address: str, topic: str) -> Pipeline:
    pipeline = Pipeline("killed")
    rows = pipeline.from_source(ParquetSource(str(folder / "in"), Row, name="rows", max_files_per_trigger=1))
    rows.sink_to(KafkaSink(topic, address, key="key", name="rows"))
    rows.key_by("key").reduce(add).uid("totals").sink_to(
        KafkaSink(f"{topic}-totals", address, key="key", mode="upsert", name="totals")
    )
    return pipeline


if __name__ == "__main__":
    mode, folder, address, topic = sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]
    spark = session.start("local[2]", config={"spark.driver.memory": "1g", "spark.sql.shuffle.partitions": "2"})
    options = {"execution.runtime-mode": mode, "pipeline.max-parallelism": 4}
    if mode == "STREAMING":
        options["execution.checkpointing.dir"] = str(folder / "checkpoints")
    plan = build(folder, address, topic).plan(options)
    sys.stdout.write("STARTED\n")
    sys.stdout.flush()
    if mode == "STREAMING":
        StreamingJob(plan, spark, Start("job", patience=0.5)).run()
    else:
        run_all(Run(plan, spark, IntermediateStore(str(folder / "store")), "run", "run"))
