"""The daemons from which Spark's Python workers are forked."""

import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pyspark

from dagster_unified.engine.daemon import without_zipped_copies

IDLE = 0.4


def test_the_installed_pyspark_is_imported_and_not_the_zipped_copy_that_comes_with_it(tmp_path):
    installed = Path(pyspark.__file__).parents[1]
    zipped = [str(file) for file in (installed / "pyspark" / "python" / "lib").glob("*.zip")]
    assert len(zipped) == 2
    other = str(tmp_path / "spark" / "python" / "lib" / "pyspark.zip")
    path = [*zipped, other, "", str(installed), str(tmp_path / "archive.zip")]
    assert without_zipped_copies(path) == path[2:]


def test_a_daemon_of_a_server_ends_when_it_has_had_no_worker_for_a_while():
    started = f"from dagster_unified.engine.daemon import main; main({IDLE})"
    environment = {**os.environ, "PYTHON_WORKER_FACTORY_SECRET": "secret", "SPARK_REUSE_WORKER": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", started, "pyspark.worker"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        process_group=0,
    ) as daemon:
        (port,) = struct.unpack("!i", daemon.stdout.read(4))
        with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rb") as answers:
            (worker,) = struct.unpack("!i", answers.read(4))
            time.sleep(5 * IDLE)
            assert daemon.poll() is None
            os.kill(worker, 0)
        daemon.wait(timeout=60)
