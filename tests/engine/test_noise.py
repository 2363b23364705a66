"""What Spark's standard error shows of a run.

It shows what the pipeline prints and what fails, and nothing that Spark says to itself.
"""

import os
import socket
import struct
import subprocess
import sys
from contextlib import closing
from threading import Thread

import pytest
from pyspark.accumulators import AccumulatorTCPServer, UpdateRequestHandler

from dagster_unified.engine.launch import ignore_closed, without_noise, without_pandas_warnings

PROGRAM = """
from dagster_unified.api import Pipeline
from dagster_unified.connectors import CollectionSource
from dagster_unified.engine import session
from dagster_unified.engine.streaming.job import Start, StreamingJob

def shown(number: int) -> int:
    print("seen", number)
    return number

if __name__ == "__main__":
    pipeline = Pipeline("p")
    pipeline.from_collection([7], int).map(shown).key_by(lambda n: 0, key_type=int).sum().print("out")
    options = {"execution.runtime-mode": "STREAMING", "execution.checkpointing.dir": "checkpoints"}
    plan = pipeline.plan({**options, "pipeline.max-parallelism": 1})
    spark = session.start("local[1]", config={"spark.driver.memory": "512m"})
    StreamingJob(plan, spark, Start("one")).run()
"""


def passed_on(text):
    found = []
    without_noise(text.encode().splitlines(keepends=True), found.append)
    return b"".join(found).decode()


def test_notes_of_the_launcher_and_of_workers_are_left_out():
    assert (
        passed_on(
            'WARNING: Using incubator modules: jdk.incubator.vector\nSetting default log level to "WARN".\nTo adjust'
            " logging level use sc.setLogLevel(newLevel). For SparkR, use setLogLevel(newLevel).\nSetting Spark log"
            ' level to "ERROR".\nStarting Streaming TransformWithStateInPandas Python worker.\n\nseen 1\n\nStreaming'
            " TransformWithStateInPandas Python worker Completed execution of UDF: <f>.\n\n"
        )
        == "seen 1\n\n"
    )


def test_a_workers_traceback_is_left_out_and_an_error_of_spark_is_not():
    assert (
        passed_on(
            "PySpark worker failed with exception:\nTraceback (most recent call last):\nBrokenPipeError\n\n12:00:00"
            " ERROR Worker: lost\n"
        )
        == "12:00:00 ERROR Worker: lost\n"
    )


SOURCE = '  File "/x/python_streaming_source_runner.py", line 257, in main\n    read_int(infile)\n'


def traceback(frames, error):
    return f"Traceback (most recent call last):\n{frames}{error}\n"


def test_the_end_of_a_sources_process_whose_query_has_ended_is_left_out():
    chained = "\nDuring handling of the above exception, another exception occurred:\n\n"
    reset = traceback(SOURCE, "ConnectionResetError: [Errno 104] Connection reset by peer")
    broken = traceback(SOURCE, "BrokenPipeError: [Errno 32] Broken pipe")
    assert passed_on(f"seen 1\n{reset}{chained}{broken}\nseen 2\n\n") == "seen 1\nseen 2\n\n"
    ended = traceback(
        SOURCE + '  File "/x/pyspark/serializers.py", line 597, in read_int\n    raise EOFError\n', "EOFError"
    )
    assert passed_on(f"seen 1\n{ended}{chained}{broken}\nseen 2\n") == "seen 1\nseen 2\n"
    driver = '  File "/x/pyspark.zip/pyspark/sql/streaming/transform_with_state_driver_worker.py", line 9, in main\n'
    assert passed_on(f"{traceback(driver, 'EOFError')}seen\n") == "seen\n"
    authors = traceback(SOURCE + '  File "job.py", line 1, in read\n', "EOFError: the file ends in a record")
    assert passed_on(f"{authors}seen\n") == f"{authors}seen\n"
    own = traceback('  File "job.py", line 1, in <module>\n', "BrokenPipeError: [Errno 32] Broken pipe")
    wrong = traceback(SOURCE, "ValueError: no such offset")
    assert passed_on(f"{own}{chained}{wrong}seen") == f"{own}{chained}{wrong}seen"


NEW_PANDAS = """
import pandas, warnings
from pyspark.sql.pandas.utils import require_minimum_pandas_version
pandas.__version__ = "3.0.0"
require_minimum_pandas_version()
warnings.warn("the author's own")
"""


def test_sparks_python_processes_do_not_warn_of_pandas():
    """As PySpark does where pandas 3 is installed, which is not so here; other warnings are shown."""
    seen = []
    for environment in ({}, {"PYTHONWARNINGS": "default::DeprecationWarning"}):
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("PYTHONWARNINGS", raising=False)
            for name, value in environment.items():
                patch.setenv(name, value)
            with without_pandas_warnings():
                done = subprocess.run([sys.executable, "-c", NEW_PANDAS], capture_output=True, text=True, check=True)
            assert os.environ.get("PYTHONWARNINGS") == environment.get("PYTHONWARNINGS")
        seen.append(done.stderr)
    assert not any("pandas" in text for text in seen)
    assert all("the author's own" in text for text in seen)


@pytest.mark.rotates("processes")
@pytest.mark.spark
def test_a_streaming_job_shows_what_the_pipeline_prints_and_nothing_else(tmp_path):
    (tmp_path / "job.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "job.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "seen 7\n"


def test_a_jvm_that_closes_the_connection_of_accumulators_leaves_no_traceback(capsys):
    def closed(ignored):
        server = AccumulatorTCPServer(("127.0.0.1", 0), UpdateRequestHandler, "token")
        if ignored:
            ignore_closed(server)
        with closing(socket.create_connection(server.server_address)) as connection:
            connection.sendall(b"token" + struct.pack("!i", 0))
            client = Thread(target=lambda: (connection.recv(1), connection.close()))
            client.start()
            server.handle_request()
            client.join()
        server.server_close()
        return capsys.readouterr().err

    assert "EOFError" in closed(ignored=False)
    assert closed(ignored=True) == ""
