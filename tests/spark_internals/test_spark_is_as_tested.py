"""Whether what the library uses of Spark's inside is as it was tested: the first to fail with another Spark."""

import inspect
import logging

import pyspark
import pytest
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor_api_client import StatefulProcessorApiClient
from upath import UPath

from dagster_unified import spark_internals
from dagster_unified.spark_internals.placing import spread_of
from dagster_unified.spark_internals.spark_log import entries, files_found, readers


def test_this_is_the_version_that_was_tested():
    assert pyspark.__version__.startswith(f"{spark_internals.TESTED}.")


def test_another_version_is_told_once(caplog):
    with caplog.at_level(logging.WARNING):
        for version in (f"{spark_internals.TESTED}.7", "5.0.0", "5.0.0"):
            spark_internals.check_version(version)
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == ["this is Spark 5.0.0"]


def test_the_state_client_sends_and_receives_as_it_did():
    parameters = {
        name: list(inspect.signature(getattr(StatefulProcessorApiClient, name)).parameters)
        for name in ("_send_proto_message", "_receive_proto_message", "set_implicit_key")
    }
    assert parameters == {
        "_send_proto_message": ["self", "message"],
        "_receive_proto_message": ["self"],
        "set_implicit_key": ["self", "key"],
    }
    sent = inspect.getsource(StatefulProcessorApiClient._send_proto_message)
    assert "write_int(0, self.sockfile)" in sent
    assert "write_int(len(message), self.sockfile)" in sent


@pytest.mark.spark
def test_an_exchange_goes_by_the_hash_that_is_inverted(spark):
    frame = spark.createDataFrame([(3, 5, spread_of(3, 5, 64))], "lane int, group int, spread int")
    assert frame.select(F.pmod(F.hash("lane", "group", "spread"), F.lit(64))).collect() == [((3 + 5) % 64,)]


@pytest.mark.spark
def test_the_jvm_has_what_classes_are_compiled_and_defined_with(spark):
    jvm = spark._jvm
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(jvm.org.apache.spark.util.Utils.getSparkClassLoader())
    compiler.cook("public class Probe {}")
    assert list(compiler.getBytecodes()) == ["Probe"]
    local = jvm.org.apache.hadoop.fs.FileSystem.get(
        jvm.java.net.URI("file:///"), spark.sparkContext._jsc.hadoopConfiguration()
    )
    assert local.getClass().getName() == "dagster_unified.LocalDisk"


@pytest.mark.spark
def test_an_rdd_of_the_jvm_takes_preferred_places(spark):
    context = spark.sparkContext
    jvm = context._jvm
    seq, row = jvm.org.apache.spark.api.python.PythonUtils.toSeq, jvm.org.apache.spark.sql.Row.fromSeq
    rows = [jvm.scala.Tuple2(row(seq(["a"])), seq(["executor_host_1"]))]
    placed = context._jsc.sc().makeRDD(seq(rows), jvm.scala.reflect.ClassTag.AnyRef())
    assert placed.preferredLocations(placed.partitions()[0]).mkString() == "executor_host_1"


@pytest.mark.spark
def test_the_logs_of_file_sources_and_sinks_are_as_they_were(spark, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "one.json").write_text('{"n": 1}\n')
    frame = spark.readStream.schema("n int").json(str(tmp_path / "in"))
    written = frame.writeStream.format("json").option("checkpointLocation", str(tmp_path / "checkpoint"))
    written.trigger(availableNow=True).start(str(tmp_path / "out")).awaitTermination()
    (reader,) = readers(UPath(tmp_path / "checkpoint"))
    assert reader.logged == 0
    assert [entry.path.rpartition("/")[2] for entry in files_found(reader.log, None)] == ["one.json"]
    assert len(entries(UPath(tmp_path / "out" / "_spark_metadata" / "0"))) >= 1
