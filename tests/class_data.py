"""Spark as tests start it, in half the time.

The JVM starts from an archive of class data, and Python workers import pyspark from the environment. `make test` writes
the archive once: `python -m tests.class_data` runs a small pipeline in both modes, and the JVM archives at its end what
it has loaded.
"""

import importlib.util
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

HOME = Path(sys.prefix) / "spark"
"""Spark's home without `python/lib/pyspark.zip`, which Spark has its Python processes import before all else.

Python caches nothing of what it compiles from there, and that takes each of them a second.
"""

ARCHIVE = HOME / "classes.jsa"
SMALL = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=256m"
"""For tiny jobs in short-lived JVMs.

What the optimizing compiler and parallel collectors would save, they cost several times over. With one compiler a JVM
keeps 48 MB for code by itself, which a session of many tests fills; it then spends its time on throwing code away.
"""


def home() -> str:
    """Spark's home, made of links into the installed package."""
    (package,) = importlib.util.find_spec("pyspark").submodule_search_locations
    HOME.mkdir(exist_ok=True)
    for name in ("bin", "sbin", "jars"):
        with suppress(FileExistsError):
            (HOME / name).symlink_to(Path(package) / name)
    return str(HOME)


def options() -> str:
    """What the JVMs of tests are started with. An archive that does not fit the JVM is ignored."""
    return f"{SMALL} -XX:SharedArchiveFile={ARCHIVE} -Xlog:disable" if ARCHIVE.exists() else SMALL


class Sale(NamedTuple):
    shop: str
    amount: int


def write() -> None:
    os.environ["SPARK_HOME"] = home()
    os.environ["SPARK_SUBMIT_OPTS"] = f"{SMALL} -XX:ArchiveClassesAtExit={ARCHIVE} -Xlog:disable"
    from pyspark import SparkContext

    from dagster_unified.api import DeltaSink, ParquetSource, Pipeline
    from dagster_unified.engine import session
    from dagster_unified.engine.batch.intermediates.store import IntermediateStore
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
