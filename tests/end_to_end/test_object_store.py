"""Intermediates, tables and checkpoints in a bucket of an S3-compatible server.

They are written by s3fs, by deltalake and by Hadoop's s3a.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.object_store import served

ROOT = Path(__file__).parents[2]
SECRET = "nobody-is-to-see-this"

pytestmark = [pytest.mark.spark, pytest.mark.rotates("stories", together=True)]


@pytest.fixture(scope="module")
def bucket():
    """The environment of a process that reaches the bucket `lake`."""
    with served("lake") as environment:
        yield environment


@pytest.fixture(scope="module")
def found(bucket, tmp_path_factory):
    """What `object_store_job` says of its runs."""
    folder = tmp_path_factory.mktemp("bucket")
    (folder / "one.csv").write_text("shop,amount\nnorth,1\nnorth,2\n")
    (folder / "two.csv").write_text("shop,amount\nsouth,4\n")
    command = [sys.executable, "-m", "tests.end_to_end.object_store_job", str(folder), bucket["AWS_ENDPOINT_URL"]]
    environment = {**os.environ, "STORE_KEY": "key", "STORE_SECRET": SECRET, "DAGSTER_HOME": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-5000:]
    return {"printed": done.stdout + done.stderr, **json.loads(done.stdout.splitlines()[-1])}


def test_intermediates_and_tables_of_a_range_of_partitions_are_in_the_bucket(found):
    assert found["batch"]["success"]
    assert found["batch"]["table"] == [["north", 3], ["south", 4]]
    assert (found["batch"]["rows"], found["batch"]["files"] > 0) == (1, True)


def test_the_secret_of_the_store_is_in_no_log_no_metadata_and_not_in_sparks_settings(found):
    assert SECRET not in found["printed"]
    assert "spark.executorEnv.AWS_SECRET_ACCESS_KEY" in found["shown"]
    assert "fs.s3a.endpoint" in found["shown"]


def test_a_process_uses_one_store_whose_secret_has_to_be_there(found):
    other, without = found["refused"]
    assert "this process uses the object store at http://127.0.0.1" in other
    assert "at http://elsewhere; give one ObjectStore to all definitions" in other
    assert without.startswith("ObjectStore's secret: environment variable NOWHERE has no value")


def test_what_is_there_of_the_same_input_does_not_run_again(found):
    assert found["batch"]["reused"] == 4


def test_a_job_goes_on_from_its_checkpoint_in_the_bucket(found):
    assert (found["streaming"]["stopped"], found["streaming"]["before"]) == ("stopped", [["north", 1], ["south", 2]])
    assert found["streaming"]["success"]
    assert found["streaming"]["table"] == [["north", 5], ["south", 2]]


def test_a_table_in_the_bucket_is_a_source_in_both_modes(found):
    assert found["read"] == {mode: [["north", -3], ["south", -4]] for mode in ("BATCH", "STREAMING")}


def test_a_stream_asks_the_store_little(found):
    """Amazon charges for each request; with 5 ms each, they are what an epoch in a bucket takes longer."""
    assert found["asked"]["epoch"] <= 75  # with what is asked beside it, once a second and more
    assert found["asked"]["idle second"] <= 10


def test_an_intermediate_asks_the_store_little(found):
    """A file is moved once, by its task; Spark's default moves it again, and takes over 90 requests for two files."""
    assert found["intermediate"] <= 60


def test_the_intermediates_of_a_range_ask_the_store_little(found):
    """A file is moved once, where Spark would move it twice, and then the driver."""
    asked, *of_partitions = found["intermediates"]
    assert of_partitions == [0, 1, 666, 334]
    assert asked <= 30


IN_PLACE = """
import json
import sys
from pathlib import Path

from dagster_unified.connectors import DeltaSink
from dagster_unified.spark_internals import in_place
from dagster_unified.connectors.protocol.commits import WriteAttempt, WriteIdentity
from dagster_unified.spark_internals.java_class import JavaClass
from dagster_unified.engine import session
from tests.object_store import client, requests, s3a

folder, url = sys.argv[1:]
small = {"spark.sql.execution.arrow.maxRecordsPerBatch": "100"}
spark = session.start("local[2,2]", config={**s3a(Path(folder), url), **small})
broken = Path(folder, "broken")
PROTOCOL = ("spark.sql.sources.commitProtocolClass", "org.apache.spark.internal.io.HadoopMapReduceCommitProtocol")


def once(batches):
    for batch in batches:
        yield batch
        if batch["id"][0].as_py() >= 1500 and broken.exists():
            broken.unlink()
            raise OSError("the first attempt of a task fails behind its first rows")


def written(name, **how):
    broken.touch()
    rows = spark.range(0, 2000, 1, 2).selectExpr("id", "id % 2 AS half").repartitionByRange(2, "id")
    sink = DeltaSink(f"s3://lake/in-place/{name}", name=name, **how)
    requests(url)
    attempt = WriteAttempt(WriteIdentity("pipeline", name, "run"), "attempt", "stage")
    (found,) = sink.stage(rows.mapInArrow(once, "id long, half long"), [attempt], None)
    asked = requests(url)
    assert not broken.exists()
    held = client(url).list_objects_v2(Bucket="lake", Prefix=f"in-place/{name}/").get("Contents", [])
    left = {one["Key"] for one in held if not one["Key"].endswith("/")}
    are_all = left == {f"in-place/{name}/{one.path}" for one in found}
    return [sum(one.rows for one in found), are_all, len(found), len(asked)]


told = {"append": written("append"), "upsert": written("upsert", mode="upsert", key="id")}
spark.conf.set("spark.sql.sources.partitionOverwriteMode", "dynamic")
told["parts"] = written("parts", partition_by="half")
spark.conf.set(*PROTOCOL)
told["chosen"] = written("chosen", partition_by="half")
spark.conf.unset(PROTOCOL[0])
Path(folder, "Broken.java").write_text("no class")
in_place.CLASS = JavaClass("dagster_unified.Broken", Path(folder, "Broken.java"))
print(json.dumps({**told, "renamed": written("renamed")}))
"""


def test_files_of_a_table_stay_where_tasks_write_them_and_those_of_a_failed_attempt_do_not_count(bucket, tmp_path):
    command = [sys.executable, "-c", IN_PLACE, str(tmp_path), bucket["AWS_ENDPOINT_URL"]]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **bucket}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-5000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert {name: one[:3] for name, one in told.items()} == {
        "append": [2000, True, 2],
        "upsert": [2000, True, 1],
        "parts": [2000, True, 4],
        "chosen": [2000, True, 4],
        "renamed": [2000, True, 2],
    }
    assert told["append"][3] <= 30
    assert told["renamed"][3] > 60
    assert "s3://lake/in-place/renamed" in done.stderr
    assert "each file is copied twice" in done.stderr


def test_a_file_of_a_checkpoint_is_whole_or_not_there_and_nobody_writes_it_anew(found):
    refused = "org.apache.hadoop.fs.FileAlreadyExistsException"
    assert found["files"]["errors"] == [refused] * 4
    assert found["files"]["held"] == {"once": "a", "often": "c", "slow down": "a", "cut": "a", "lost": "a"}


def test_a_file_that_goes_there_in_parts_is_whole_or_cannot_be_seen(found):
    """As an intermediate and as a checkpoint's: the store breaks off parts and their end, twice, and then refuses them.

    The second one who writes a checkpoint's file is refused where the first one has.
    """
    assert found["parts"]["intermediates"] == [True, True, [True, []], [True, []]]
    written, refused = [None, True, "FileAlreadyExistsException"], ["AccessDeniedException", False, None]
    assert found["parts"]["checkpoints"] == [written, written, refused, refused]
    assert found["parts"]["unfinished"] == []


def test_what_was_written_last_is_not_read_again_and_never_older_than_it_is(found):
    refused = "org.apache.hadoop.fs.FileAlreadyExistsException"
    assert found["files"]["known"] == [None, None, "a", refused, "a", None, "c", None, "a", None]
    assert found["files"]["asked"] == ["PUT"]


def test_where_the_class_that_writes_them_cannot_be_compiled_spark_renames_and_it_is_said(found):
    used, line = found["without"]
    assert used is None
    assert line.startswith("s3://lake/files: each file of the checkpoint takes a dozen requests instead of one")


BEFORE = """
import os
import sys
from pathlib import Path

import pyarrow as pa

from dagster_unified.storage import object_store
from dagster_unified.engine import session
from tests.object_store import s3a

folder, url = sys.argv[1:]
spark = session.start("local[1]", config=s3a(Path(folder), url))
try:
    spark.range(3).write.parquet("s3a://lake/before")
except Exception as error:
    print("no credentials" if "No AWS Credentials" in str(error) else error)
hadoop = spark.sparkContext._jsc.hadoopConfiguration()
hadoop.set("fs.s3a.session.token", "of the machine")  # as from its environment
object_store.use(object_store.Store(url, "us-east-1", "key", "secret"))
spark = session.start("local[1]", config=s3a(Path(folder), url))
spark.range(3).write.parquet("s3a://lake/before")
print(spark.read.parquet("s3a://lake/before").count())


def known(batches):
    for _ in batches:
        yield pa.RecordBatch.from_pydict({"key": [os.environ["AWS_ACCESS_KEY_ID"]]})


print(spark.range(1).mapInArrow(known, "key string").first().key)
print(hadoop.get("fs.s3a.session.token"))
print("secret" in str(spark.conf.getAll) + spark.sparkContext._jsc.sc().conf().toDebugString())
"""


def test_a_session_that_was_started_before_the_store_was_known_can_use_it(bucket, tmp_path):
    environment = {**os.environ, "AWS_EC2_METADATA_DISABLED": "true"}
    command = [sys.executable, "-c", BEFORE, str(tmp_path), bucket["AWS_ENDPOINT_URL"]]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    said = ["no credentials", "3", "key", "None", "False"]  # after what fetches the jars
    assert (done.stdout.splitlines()[-5:], done.returncode) == (said, 0), done.stderr


BRANCH = """
from typing import NamedTuple

from dagster import Definitions

from dagster_unified.api import Pipeline
from dagster_unified.connectors import DeltaSink, ParquetSource
from dagster_unified.orchestration import ObjectStore, StreamingDeployment, unified_definitions


class Sale(NamedTuple):
    shop: str
    amount: int


pipeline = Pipeline("sales")
pipeline.from_source(ParquetSource("s3://lake/branch/in", Sale)).sink_to(DeltaSink("s3://lake/branch/out", name="out"))
stream = StreamingDeployment(pipeline, options={{"execution.checkpointing.dir": "s3://lake/branch/checkpoints"}})
store = ObjectStore(endpoint="{endpoint}", region="us-east-1", key="key", secret="secret")
defs = Definitions.merge(
    unified_definitions(pipeline, stream, resources={{"object_store": None}}),
    Definitions(resources={{"object_store": store}}),
)
"""


def test_the_command_line_and_sensors_know_the_store_that_a_branchs_definitions_give(bucket, tmp_path):
    """While definitions load nobody knows it, and nobody asks it."""
    (tmp_path / "branch.py").write_text(BRANCH.format(endpoint=bucket["AWS_ENDPOINT_URL"]))
    own = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    elsewhere = {
        **own,
        "DAGSTER_HOME": str(tmp_path),
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
    }

    def said(*command):
        command = (str(Path(sys.executable).with_name(command[0])), *command[1:])
        done = subprocess.run(command, cwd=tmp_path, env=elsewhere, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    assert "not started" in said("dagster-unified", "list", "branch.py")
    asked = said("dagster", "sensor", "preview", "sales_streaming_sensor", "-f", "branch.py")
    assert "run requests for 1 run" in asked, asked
