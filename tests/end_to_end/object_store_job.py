"""Sales whose intermediates, tables and checkpoints are in a bucket.

`test_object_store.py` runs it in a process of its own. It prints what there is to be checked, as one line of JSON.
The store is unreliable meanwhile.
Arguments: the folder of the input, and the URL of the S3-compatible server.
"""

import json
import logging
import random
import sys
import time
import urllib.request
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from dagster import BackfillPolicy, DagsterInstance, Definitions, EnvVar, StaticPartitionsDefinition
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from upath import UPath

from dagster_unified.api import Pipeline, TumblingEventTimeWindows, WatermarkStrategy
from dagster_unified.connectors import CsvSource, DeltaSink, DeltaSource
from dagster_unified.engine.batch import intermediates
from dagster_unified.engine.batch.intermediates import Address, IntermediateStore
from dagster_unified.engine.events import EpochCommitted
from dagster_unified.engine.streaming.job import FILES, Start, StreamingJob
from dagster_unified.errors import ConfigurationError
from dagster_unified.operators.layout import PARTITION_INDEX
from dagster_unified.orchestration import (
    BatchDeployment,
    IntermediatesResource,
    ObjectStore,
    SparkResource,
    StreamingDeployment,
    unified_definitions,
)
from dagster_unified.spark_internals import bucket_files
from dagster_unified.spark_internals.java_class import JavaClass
from dagster_unified.storage.object_store import Store, in_use
from tests.object_store import (
    COMPLETE,
    CUT,
    DENIED,
    HALF_DONE,
    LATE,
    LOST,
    PART,
    SLOW_DOWN,
    Fault,
    client,
    disturb,
    requests,
    s3a,
)

FAULTS = [Fault(LATE, 90), Fault(SLOW_DOWN, 120), Fault(CUT, 60), Fault(LOST, 40, "PUT")]
"""What the store does while the batches and the stream run."""

UNRELIABLE_PARTS = [
    (Fault(CUT, method=f"{PART} 1"), Fault(LOST, method=f"{PART} 2"), Fault(HALF_DONE, method=COMPLETE)),
    (Fault(SLOW_DOWN, method=f"{PART} 1"), Fault(CUT, method=f"{PART} 2"), Fault(LOST, method=COMPLETE)),
]
REFUSED_PARTS = [(Fault(DENIED, method=f"{PART} 2"),), (Fault(DENIED, method=COMPLETE),)]
"""What the store does while a file is written in parts."""


class Sale(NamedTuple):
    shop: str
    amount: int


def spark(folder: Path) -> SparkResource:
    ui = {"spark.ui.enabled": "true", "spark.ui.port": "0"}
    parts = {"spark.hadoop.fs.s3a.multipart.size": "5M"}
    return SparkResource(master="local[2]", config={**s3a(folder), **ui, **parts})


def build(folder: Path, name: str, live: bool) -> Pipeline:
    pipeline = Pipeline(name)
    source = CsvSource(f"{folder}/live" if live else f"{folder}/{{key}}.csv", Sale, name="sales", monitor=live)
    mode = "upsert" if live else "overwrite"
    pipeline.from_source(source).key_by("shop").sum("amount").name("totals").sink_to(
        DeltaSink(f"s3://lake/tables/{name}", mode=mode, key="shop" if live else ())
    )
    return pipeline


def table(name: str) -> list[list[object]]:
    held = DeltaSink(f"s3://lake/tables/{name}").dataset().to_table()  # deltalake alone would not read again
    return sorted([row["shop"], row["amount"]] for row in held.to_pylist())


def batch(folder: Path, resources: dict[str, object]) -> dict[str, object]:
    """Two partitions in one run; again, when nothing is to be done; and again from an intermediate that was lost."""
    # as a branch deployment has it: the store is not known before a run
    own = unified_definitions(
        BatchDeployment(
            build(folder, "batch", live=False),
            partitions=StaticPartitionsDefinition(["one", "two"]),
            backfill_policy=BackfillPolicy.single_run(),
            reuse="fingerprint",
            retry_policy=None,
        ),
        resources={**resources, "object_store": None},
    )
    definitions = Definitions.merge(own, Definitions(resources={"object_store": resources["object_store"]}))
    job = definitions.resolve_job_def("batch_batch")
    with DagsterInstance.ephemeral() as instance:
        both = {"dagster/asset_partition_range_start": "one", "dagster/asset_partition_range_end": "two"}
        first = job.execute_in_process(instance=instance, tags=both)
        again = job.execute_in_process(instance=instance, tags=both)
        logs = repr([instance.all_logs(run.run_id) for run in (first, again)])
        reused = sum("reused from run" in e.materialization.metadata for e in again.get_asset_materialization_events())
    store = IntermediateStore("s3://lake/intermediates")
    manifest = store.find(Address("batch", "sales", first.run_id, "two"))
    files = 0 if manifest is None else len(store.files(store.data(manifest)))
    return {
        "logs": logs,
        "success": first.success and again.success,
        "reused": reused,
        "table": table("batch"),
        "rows": manifest.rows if manifest else None,
        "files": files,
    }


def streaming(folder: Path, resources: dict[str, object]) -> dict[str, object]:
    """A job that is stopped after its first file, and one that goes on from its state and is drained."""
    options = {
        "execution.checkpointing.dir": "s3://lake/checkpoints",
        "pipeline.max-parallelism": 2,
        "parallelism.default": 1,
    }
    pipeline = build(folder, "live", live=True)
    session = resources["spark"].spark_session  # type: ignore[attr-defined]
    rows = 0

    def observe(event: object) -> None:
        nonlocal rows
        if isinstance(event, EpochCommitted):
            rows += event.rows_in

    (folder / "live").mkdir()
    (folder / "live" / "1.csv").write_text("shop,amount\nnorth,1\nsouth,2\n")
    stopped = StreamingJob(pipeline.plan(options), session, Start("first"), observe).run(lambda: rows >= 2)
    before = table("live")
    (folder / "live" / "2.csv").write_text("shop,amount\nnorth,4\n")
    definitions = unified_definitions(pipeline, StreamingDeployment(pipeline, options=options), resources=resources)
    with DagsterInstance.ephemeral() as instance:
        drain = {"ops": {"live_action": {"config": {"action": "drain"}}}}
        drained = definitions.resolve_job_def("live_control").execute_in_process(drain, instance=instance)
        success = (
            drained.success
            and definitions.resolve_job_def("live_streaming").execute_in_process(instance=instance).success
        )
    return {"stopped": stopped, "before": before, "success": success, "table": table("live")}


def read_table(folder: Path, resources: dict[str, object]) -> dict[str, object]:
    """The table in the bucket that the batches wrote, read in both modes into another one."""
    session, found = resources["spark"].spark_session, {}  # type: ignore[attr-defined]
    for mode in ("BATCH", "STREAMING"):
        pipeline = Pipeline(f"read_{mode.lower()}")
        rows = pipeline.from_source(DeltaSource("s3://lake/tables/batch", Sale, name="totals"))
        turned = rows.map(lambda sale: Sale(sale.shop, -sale.amount), Sale)
        turned.sink_to(DeltaSink(f"s3://lake/tables/{pipeline.name}"))
        if mode == "BATCH":
            job = unified_definitions(pipeline, resources=resources).resolve_job_def("read_batch_batch")
            with DagsterInstance.ephemeral() as instance:
                assert job.execute_in_process(instance=instance).success
        else:
            options = {"execution.runtime-mode": mode, "execution.checkpointing.dir": "s3://lake/checkpoints"}
            assert StreamingJob(pipeline.plan(options), session, Start("reader")).run() == "finished"
        found[mode] = table(pipeline.name)
    return found


def without(folder: Path, session) -> list[str | None]:
    """What is used, and said, where the class that writes files of a checkpoint cannot be compiled."""
    said = Lines()
    logging.getLogger("dagster_unified").addHandler(said)
    broken, whole = JavaClass("dagster_unified.Broken", folder / "Broken.java"), bucket_files.CLASS
    broken.source.write_text("class {")
    bucket_files.CLASS = broken
    try:
        return [bucket_files.install(session, UPath("s3://lake/files")), *said.lines]
    finally:
        bucket_files.CLASS = whole


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def files(url: str, session) -> dict[str, object]:
    """What becomes of a checkpoint's files that are written twice, replaced, given up, or whose answers are lost."""
    path = session._jvm.org.apache.hadoop.fs.Path
    configuration = session._jsparkSession.sessionState().newHadoopConf()
    configuration.set(FILES, bucket_files.install(session, UPath("s3://lake/files")))
    kinds = session._jvm.org.apache.spark.sql.execution.streaming.checkpointing
    manager = kinds.CheckpointFileManager.create(path("s3a://lake/files"), configuration)

    def write(name: str, letter: str, replace: bool, cancel: bool = False) -> str | None:
        stream = manager.createAtomic(path(f"s3a://lake/files/{name}"), replace)
        try:
            stream.write(ord(letter))
            stream.cancel() if cancel else stream.close()
        except Py4JJavaError as error:
            stream.cancel()
            return error.java_exception.getClass().getName()
        return None

    errors = [write("once", "a", replace=False), write("once", "b", replace=False)]
    errors += [write("often", "a", replace=True), write("often", "b", replace=True)]
    errors += [write("never", "a", replace=False, cancel=True), write("once", "c", replace=True, cancel=True)]
    for kind in (SLOW_DOWN, CUT, LOST):
        disturb(url, Fault(kind, method="PUT"))
        errors += [write(kind, "a", replace=False), write(kind, "b", replace=False), write("often", "c", replace=True)]
    disturb(url)
    held = {file.name: file.read_text() for file in UPath("s3://lake/files").iterdir()}

    def read(name: str) -> str | None:
        file = path(f"s3a://lake/files/{name}")
        if not manager.exists(file):
            return None
        stream = manager.open(file)
        stream.seek(1)
        stream.seek(0)
        return bytes(session._jvm.org.apache.commons.io.IOUtils.toByteArray(stream)).decode()

    known = [read("last"), write("last", "a", replace=False), read("last"), write("last", "b", replace=False)]
    known += [read("last"), write("last", "c", replace=True), read("last")]
    requests(url)
    known += [write("new", "a", replace=False), read("new")]
    asked = [request.method for request in requests(url) if "/new" in request.key]
    manager.delete(path("s3a://lake/files/new"))
    return {
        "errors": [error for error in errors if error is not None],
        "held": held,
        "known": [*known, read("new")],
        "asked": asked,
    }


def shown(session, store: Store) -> str:
    """What Spark shows of its settings, with those of executors on other machines."""
    conf = session.sparkContext._jsc.sc().conf().clone()
    for name, value in store.executor_environment().items():
        conf.set(name, value)
    with urllib.request.urlopen(f"{session.sparkContext.uiWebUrl}/environment/", timeout=60) as page:
        return page.read().decode() + conf.toDebugString()


def refused(store: ObjectStore) -> str:
    """Why this process may not use a store."""
    try:
        store.use()
    except ConfigurationError as error:
        return str(error)
    return ""


class Tick(NamedTuple):
    shop: str
    at: int


def asked(folder: Path, url: str, session) -> dict[str, float]:
    """What the store is asked for a stream with timers, whose checkpoint alone is there.

    That is for an epoch, and in a second in which nothing arrives.
    """
    (folder / "ticks").mkdir()
    pipeline = Pipeline("asked")
    ticks = pipeline.from_source(CsvSource(f"{folder}/ticks", Tick, name="ticks", monitor=True))
    strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
    windows = ticks.assign_timestamps_and_watermarks(strategy).key_by("shop")
    late = windows.window(TumblingEventTimeWindows.of(timedelta(seconds=1))).reduce(lambda a, b: b)
    late.sink_to(DeltaSink(f"{folder}/windows", mode="append"))
    epochs = files = quiet = 0
    read, found, since = 0, {}, 0.0

    def observe(event: object) -> None:
        nonlocal epochs, read
        if isinstance(event, EpochCommitted):
            epochs, read = epochs + 1, read + event.rows_in

    def ended() -> bool:
        nonlocal epochs, files, since, quiet
        if read < files or job.activity()[1]:
            return False
        if files < 6:
            if files == 2:
                requests(url)
                epochs = 0
            (folder / f"ticks/.{files}").write_text(f"shop,at\nnorth,{files * 5000}\n")
            (folder / f"ticks/.{files}").rename(folder / f"ticks/{files}.csv")
            files += 1
        elif not found:
            found["epoch"] = len(requests(url)) / epochs
        elif epochs != quiet:  # one that fires timers, after the last file
            quiet, since = epochs, time.monotonic()
            requests(url)
        elif time.monotonic() - since > 4:
            found["idle second"] = len(requests(url)) / (time.monotonic() - since)
            return True
        return False

    options = {"execution.checkpointing.dir": "s3://lake/asked", "pipeline.max-parallelism": 2}
    job = StreamingJob(pipeline.plan({**options, "parallelism.default": 1}), session, Start("job"), observe)
    job.run(ended)
    return found


def intermediate(url: str, session) -> int:
    """What the store is asked so that two tasks write an intermediate."""
    store = IntermediateStore("s3://lake/asked")
    attempt = store.new_attempt(Address("asked", "numbers", "run"))
    requests(url)
    intermediates.write(session.range(1000).repartition(2), attempt)
    found = requests(url)
    assert len(store.files(attempt)) == 2
    return len(found)


def asked_for_intermediates(url: str, session) -> list[int]:
    """What the store is asked so that two tasks write the intermediates of two partitions, and the rows of each."""
    store = IntermediateStore("s3://lake/asked")
    attempts = [store.new_attempt(Address("asked", "numbers", "run", name)) for name in ("one", "two", "none")]
    rows = session.range(1000).selectExpr("id", f"int(id % 3 = 0) AS {PARTITION_INDEX}").repartition(2)
    requests(url)
    filled = intermediates.write_partitions(rows, attempts)
    found = requests(url)
    read = [session.read.parquet(str(one).replace("s3://", "s3a://")).count() for one in filled.values()]
    return [len(found), *filled, *read]


def parts(url: str, session) -> dict[str, list[object]]:
    """What becomes of an intermediate's file and of a checkpoint's that go to the store in several parts."""
    store, s3 = IntermediateStore("s3://lake/parts"), client(url)
    large = [(key, bytearray(random.Random(key).randbytes(1 << 19))) for key in range(12)]
    rows = session.createDataFrame(large, "key int, data binary").coalesce(1)
    path = session._jvm.org.apache.hadoop.fs.Path
    configuration = session._jsparkSession.sessionState().newHadoopConf()
    configuration.set(FILES, bucket_files.install(session, UPath("s3://lake/parts")))
    kinds = session._jvm.org.apache.spark.sql.execution.streaming.checkpointing
    manager = kinds.CheckpointFileManager.create(path("s3a://lake/parts"), configuration)

    def write(place: str) -> str | None:
        stream = manager.createAtomic(path(f"s3a://lake/parts/{place}"), False)
        try:
            for _, data in large:
                stream.write(data)
            stream.close()
        except Py4JJavaError as error:
            stream.cancel()
            return error.java_exception.getClass().getSimpleName()
        return None

    found: dict[str, list[object]] = {"intermediates": [], "checkpoints": []}
    for faults in (*UNRELIABLE_PARTS, *REFUSED_PARTS):
        attempt = store.new_attempt(Address("parts", "numbers", "run"))
        disturb(url, *faults)
        try:
            intermediates.write(rows, attempt)
            read = session.read.parquet(str(attempt).replace("s3://", "s3a://")).orderBy("key").collect()
            found["intermediates"].append([tuple(row) for row in read] == large)
        except (PySparkException, Py4JJavaError) as error:
            left = s3.list_objects_v2(Bucket="lake", Prefix=str(attempt).partition("lake/")[2]).get("Contents", [])
            seen = [entry["Key"] for entry in left if not entry["Key"].endswith("/")]
            found["intermediates"].append(["Access Denied" in str(error), seen])
        disturb(url, *faults)
        name = "-".join(f"{fault.kind} {fault.method}" for fault in faults)
        error = write(name)
        disturb(url)
        file = UPath(f"s3://lake/parts/{name}", use_listings_cache=False)
        whole = file.exists() and file.read_bytes() == b"".join(data for _, data in large)
        found["checkpoints"].append([error, whole, write(name)])
    found["unfinished"] = s3.list_multipart_uploads(Bucket="lake").get("Uploads", [])
    return found


if __name__ == "__main__":
    home, address = Path(sys.argv[1]), sys.argv[2]
    given = {
        "spark": spark(home),
        "intermediates": IntermediatesResource(path="s3://lake/intermediates"),
        "object_store": ObjectStore(
            endpoint=address, region="us-east-1", key=EnvVar("STORE_KEY"), secret=EnvVar("STORE_SECRET")
        ),
    }
    disturb(address, *FAULTS)
    told = {"batch": batch(home, given), "without": without(home, given["spark"].spark_session)}
    told["streaming"] = streaming(home, given)
    told["read"] = read_table(home, given)
    disturb(address)
    told["refused"] = [
        refused(ObjectStore(endpoint="http://elsewhere")),
        refused(ObjectStore(secret=EnvVar("NOWHERE"))),
    ]
    told["shown"] = shown(given["spark"].spark_session, in_use())
    told["files"] = files(address, given["spark"].spark_session)
    told["parts"] = parts(address, given["spark"].spark_session)
    told["asked"] = asked(home, address, given["spark"].spark_session)
    told["intermediate"] = intermediate(address, given["spark"].spark_session)
    told["intermediates"] = asked_for_intermediates(address, given["spark"].spark_session)
    print(json.dumps(told))
