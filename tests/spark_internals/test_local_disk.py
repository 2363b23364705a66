"""Spark sets permissions of local files without a process for each."""

import os
import shutil
import stat
import subprocess
import sys

import pytest

from tests.servers.standalone import Cluster

pytestmark = pytest.mark.spark


@pytest.fixture
def hadoop(spark):
    return spark._jvm.org.apache.hadoop.fs


@pytest.fixture
def file_system(spark, hadoop):
    return hadoop.FileSystem.get(spark._jvm.java.net.URI("file:///"), spark.sparkContext._jsc.hadoopConfiguration())


@pytest.mark.parametrize("mode", ["0644", "0600", "0777", "0000", "0751", "1777"])
def test_permissions_are_those_that_chmod_sets(file_system, hadoop, tmp_path, mode):
    assert file_system.getClass().getName() == "dagster_unified.LocalDisk"
    folder = tmp_path / "folder"
    folder.mkdir()
    file_system.setPermission(hadoop.Path(f"file://{folder}"), hadoop.permission.FsPermission(mode))
    assert stat.S_IMODE(os.stat(folder).st_mode) == int(mode, 8)


def test_a_file_that_is_not_there_is_an_error(file_system, hadoop, tmp_path):
    with pytest.raises(Exception, match="NoSuchFile"):
        file_system.setPermission(hadoop.Path(f"file://{tmp_path}/none"), hadoop.permission.FsPermission("0644"))


def test_files_and_folders_that_spark_writes_have_the_permissions_of_the_umask(spark, tmp_path):
    spark.range(10).write.parquet(f"file://{tmp_path}/out")
    assert stat.S_IMODE(os.stat(tmp_path / "out").st_mode) == 0o755
    assert {stat.S_IMODE(os.stat(file).st_mode) for file in (tmp_path / "out").iterdir()} == {0o644}
    assert (tmp_path / "out" / "._SUCCESS.crc").exists()


WRITING = """
import sys

from dagster_unified.engine import session

spark = session.start(sys.argv[1], config={"spark.executor.memory": "600m"})
spark.range(0, 100, 1, 8).write.parquet(f"file://{sys.argv[2]}/out")
spark.stop()
"""


@pytest.mark.rotates("clusters")
def test_executors_of_a_cluster_start_no_process_for_a_file(tmp_path):
    chmod = tmp_path / "bin" / "chmod"
    chmod.parent.mkdir()
    chmod.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/started\nexec {shutil.which("chmod")} "$@"\n')
    chmod.chmod(0o755)
    cluster = Cluster(tmp_path, {"PATH": f"{chmod.parent}:{os.environ['PATH']}"})
    try:
        driver = {**cluster.environment, "PATH": os.environ["PATH"]}
        subprocess.run([sys.executable, "-c", WRITING, cluster.url, str(tmp_path)], env=driver, check=True)
    finally:
        cluster.end()
    written = [file for file in (tmp_path / "out").iterdir() if file.suffix == ".parquet"]
    assert {stat.S_IMODE(os.stat(file).st_mode) for file in written} == {0o644}
    started = (tmp_path / "started").read_text().splitlines()
    assert {arguments.split()[0] for arguments in started} == {"a+x"}  # Spark's own, for the jar that it has fetched
