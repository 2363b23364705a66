"""Spark as tests start it, in less time: the JVM starts from an archive of class data.

`make test` writes the archive once: `python -m tests.class_data` runs a small pipeline in both modes, and the JVM
archives at its end what it has loaded.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ARCHIVE = Path(sys.prefix) / "spark" / "classes.jsa"
SMALL = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=256m"
"""For tiny jobs in short-lived JVMs.

What the optimizing compiler and parallel collectors would save, they cost several times over. With one compiler a JVM
keeps 48 MB for code by itself, which a session of many tests fills; it then spends its time on throwing code away.
"""


def options() -> str:
    """What the JVMs of tests are started with. An archive that does not fit the JVM is ignored."""
    return f"{SMALL} -XX:SharedArchiveFile={ARCHIVE} -Xlog:disable" if ARCHIVE.exists() else SMALL


class Sale(NamedTuple):
    shop: str
    amount: int


def write() -> None:
    ARCHIVE.parent.mkdir(exist_ok=True)
    os.environ["SPARK_SUBMIT_OPTS"] = f"{SMALL} -XX:ArchiveClassesAtExit={ARCHIVE} -Xlog:disable"
    from pyspark import SparkContext

    from dagster_unified.api import Pipeline
    from dagster_unified.connectors import DeltaSink, ParquetSource
    from dagster_unified.engine import session
    from dagster_unified.engine.batch.intermediates import IntermediateStore
    from dagster_unified.engine.batch.run import Run
    from dagster_unified.engine.batch.savepoint import run_all
    from dagster_unified.engine.streaming.job import Start, StreamingJob

    spark = session.start("local[2]", config={"spark.sql.shuffle.partitions": "2"})
    with tempfile.TemporaryDirectory() as folder:
        spark.createDataFrame([("north", 1), ("south", 2)], "shop string, amount long").write.parquet(f"{folder}/sales")
        for mode in ("BATCH", "STREAMING"):
            pipeline = Pipeline("sales")
            sales = pipeline.from_source(ParquetSource(f"{folder}/sales", Sale, name="sales"))
            sales.where("amount > 0").key_by("shop").sum("amount").sink_to(
                DeltaSink(f"{folder}/{mode}", mode="upsert", key="shop")
            )
            plan = pipeline.plan(
                {"execution.runtime-mode": mode, "execution.checkpointing.dir": f"{folder}/checkpoints"}
                if mode == "STREAMING"
                else {}
            )
            if mode == "BATCH":
                run_all(Run(plan, spark, IntermediateStore(f"{folder}/store"), "run", "run"))
            else:
                StreamingJob(plan, spark, Start("one")).run()
        gateway = SparkContext._gateway
        spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()


if __name__ == "__main__":
    write()
