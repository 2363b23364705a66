"""What came out of Spark as one sentence."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from upath import UPath

from dagster_unified.api import Pipeline
from dagster_unified.api import functions as F
from dagster_unified.engine.failures import naming_store, translated
from dagster_unified.errors import (
    ConfigurationError,
    MalformedInputError,
    MissingRequirementError,
    PipelineError,
    RecordTypeError,
    SlowStartError,
    SourceError,
    StageError,
    UnavailableError,
    UnsupportedError,
    lasting,
)
from tests.depth import rotated


class Plan:
    name = "p"


JAVA = """An error occurred while calling o54.parquet.
: org.apache.spark.SparkException: [FAILED_READ_FILE.NO_HINT] \
Encountered error while reading file file:///in/0.parquet.  SQLSTATE: KD001
\tat org.apache.spark.sql.errors.QueryExecutionErrors$.cannotReadFilesError(QueryExecutionErrors.scala:920)
Caused by: java.lang.RuntimeException: wrapped
\t... 1 more
Caused by: java.io.IOException: no columns
\t... 2 more
"""

PYTHON = """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "worker.py", line 4207, in invoke_udf
    func, profiler, deserializer, serializer = read_udfs(
                                               ^^^^^^^^^^
  File "serializers.py", line 483, in loads
    return cloudpickle.loads(obj, encoding=encoding)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
ModuleNotFoundError: No module named 'shops'

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:581)
"""


STARTING = """org.apache.spark.SparkException: Job aborted due to stage failure: org.apache.spark.SparkException:
Error from python worker:
  Traceback (most recent call last):
    File "<frozen runpy>", line 198, in _run_module_as_main
    File "shops.py", line 1, in <module>
  ModuleNotFoundError: No module named 'shops'
PYTHONPATH was:
  /opt/spark/python/lib/pyspark.zip:/opt/shops
org.apache.spark.SparkException: No port number in pyspark.daemon's stdout
\tat org.apache.spark.api.python.PythonWorkerFactory.startDaemon(PythonWorkerFactory.scala:284)
"""
"""Of a process that ended before it was a worker: Spark indents its trace, and says its path after it."""


RAISED = PYTHON.replace("ModuleNotFoundError: No module named 'shops'", "ConnectionResetError: away")
EARLY = STARTING.replace("ModuleNotFoundError: No module named 'shops'", "OSError: disk full")

CUT = "An exception was thrown\nTraceback (most recent call last):\n" + "    | a line of a group\n" * 60
"""A trace without its last line, as of an `ExceptionGroup`, whose lines are all indented."""


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            JAVA,
            "SparkException: [FAILED_READ_FILE.NO_HINT] Encountered error while reading file file:///in/0.parquet. "
            " SQLSTATE: KD001; IOException: no columns",
        ),
        ("An error occurred while calling o1.load", "An error occurred while calling o1.load"),
        (CUT, "ValueError: An exception was thrown"),
        (RAISED, "ConnectionResetError: away"),
        (EARLY, "a Python process of Spark's ended as it started: OSError: disk full"),
        ("something else\nand more", "ValueError: something else"),
        ("", "ValueError: "),
    ],
)
def test_the_sentence_says_what_went_wrong(text, sentence):
    assert str(translated(ValueError(text), Plan(), "s", None)) == f"p: stage 's': {sentence}"


def test_a_file_whose_name_has_a_colon_is_named():
    text = JAVA.replace("file:///in/0.parquet", "file:///in/10:00.csv").replace(
        "no columns", "java.net.URISyntaxException: Relative path in absolute URI: .10:00.csv.crc"
    )
    with pytest.raises(SourceError, match=r"^p: stage 's': the name of /in/10:00.csv has a colon, which Hadoop"):
        raise translated(ValueError(text), Plan(), "s", None)


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("msgspec", "no msgspec"),
        ("pyarrow.lib", "a pyarrow without the module pyarrow.lib"),
        (
            "dagster_unified.engine.environment",
            "a dagster_unified without the module dagster_unified.engine.environment",
        ),
        ("google.protobuf", "no google.protobuf"),
        ("google.protobuf.any", "a google.protobuf without the module google.protobuf.any"),
    ],
)
def test_a_worker_that_lacks_a_module_is_named(name, lacks):
    text = f"Lost task 0.3 in stage 1.0 (TID 7) (10.0.0.7 executor 2): ModuleNotFoundError: No module named '{name}'"
    assert str(translated(ValueError(text), Plan(), "s", None)).startswith(f"p: host 10.0.0.7 has {lacks}: install ")


NOT_IMPORTED = """Job aborted: Lost task 0.0 in stage 1.0 (TID 7) (10.0.0.7 executor 2): An exception was thrown
Traceback (most recent call last):
  File "serializers.py", line 483, in loads
    return cloudpickle.loads(obj, encoding=encoding)
ImportError: cannot import name 'opened' from 'shops' (/lib/shops.py)

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:581)
"""

NO_CLASS = """An error occurred while calling o88.load.
: java.lang.ClassNotFoundException: org.sales.Driver
\tat java.base/java.net.URLClassLoader.findClass(URLClassLoader.java:445)
"""

NO_FORMAT = """An error occurred while calling o88.load.
: org.apache.spark.SparkClassNotFoundException: [DATA_SOURCE_NOT_FOUND] Failed to find the data source: sales. Make \
sure the provider name is correct SQLSTATE: 42K02
\tat org.apache.spark.sql.execution.datasources.DataSource$.lookupDataSource(DataSource.scala:600)
Caused by: java.lang.ClassNotFoundException: sales.DefaultSource
\t... 1 more
"""


@pytest.mark.parametrize(
    ("error", "kind", "sentence"),
    [
        (ValueError(PYTHON), MissingRequirementError, "p: a Python process of Spark's has no shops: install what"),
        (ValueError(STARTING), MissingRequirementError, "p: a Python process of Spark's has no shops: install what"),
        (
            ModuleNotFoundError("No module named 'shops.till'"),
            MissingRequirementError,
            "p: this process has a shops without the module shops.till: install what",
        ),
        (
            ValueError(NOT_IMPORTED),
            MissingRequirementError,
            "p: host 10.0.0.7 cannot import a module that stage 's' needs (ImportError: cannot import name 'opened'"
            " from 'shops' (/lib/shops.py)): install what",
        ),
        (
            ValueError("dagster_unified.errors.PipelineError: host a cannot load what it was sent: ValueError: no"),
            PipelineError,
            "p: host a cannot load what it was sent: ValueError: no",
        ),
        (
            ValueError(NO_CLASS),
            MissingRequirementError,
            "p: stage 's': Spark's JVM lacks a class (ClassNotFoundException: org.sales.Driver); give the session",
        ),
        (
            ValueError(NO_FORMAT),
            MissingRequirementError,
            "p: stage 's': Spark has no data source 'sales'; correct the name, or give the session its package: Spark",
        ),
        (
            ValueError("Data source sales does not support streamed reading."),
            UnsupportedError,
            "p: Spark's data source sales is not read in STREAMING; read it in BATCH,",
        ),
        (
            ValueError(
                "Lost task 0.0 in stage 1.0 (TID 7) (10.0.0.7 executor 2): java.io.IOException: Cannot run program"
                ' "/opt/python" (in directory "."): error=2, No such file or directory'
            ),
            MissingRequirementError,
            "p: host 10.0.0.7 cannot run the interpreter /opt/python: install it there, or",
        ),
    ],
)
def test_what_no_retry_mends_is_terminal_and_names_what_is_missing(error, kind, sentence):
    found = translated(error, Plan(), "s", None)
    assert type(found) is kind
    assert str(found).startswith(sentence)
    assert not found.retryable
    assert lasting(type(found).__name__)


@pytest.mark.parametrize("state", ["", " SQLSTATE: P0001", "\n  SQLSTATE: 38000"])
def test_an_error_of_the_library_is_what_a_worker_raised_without_sparks_state(state):
    raised = ValueError(f"Job aborted: dagster_unified.errors.PipelineError: p: operator 'a' is odd{state}\n\tat java")
    assert str(translated(raised, Plan(), "s", None)) == "p: operator 'a' is odd"


def test_what_spark_says_of_a_query_is_not_in_a_sentence_of_the_librarys():
    text = (
        "Traceback (most recent call last):\n  ...\ndagster_unified.errors.SourceError: source 't': table t has no"
        " column 'v' SQLSTATE: 38000\n=== Streaming Query ===\nIdentifier: [id = 1, runId = 2]\nCurrent Offsets: {}"
    )
    with pytest.raises(SourceError, match=r"^p: source 't': table t has no column 'v'$"):
        raise translated(ValueError(text), Plan(), "s", None)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            '{"source":"sales","file":"file:///in/a%20b.json","reason":"field \'n\' is \\"x\\"","row":"{\\"n\\": \\u00',
            "p: source 'sales': /in/a b.json: field 'n' is \"x\": {\\\"n\\\": \\u00",
        ),
        (
            '{"source":"sales","file":"file:///a.json","reason":"field \'n\' is missing","row":"{\\"t\\": \\"long...',
            "p: source 'sales': /a.json: field 'n' is missing: {\"t\": \"long...",
        ),
        (
            '{"source":"sales","file":"file:///a.json","row":"{\\"n\\": ',
            "p: source 'sales': /a.json: a row does not fit its record type: {\"n\":",
        ),
        ('{"source":"sales","reason":"it is late","row":"1"}', "p: source 'sales': it is late: 1"),
        ("an author's own {", "p: an author's own {"),
    ],
)
def test_a_malformed_row_whose_message_spark_has_cut_is_a_sentence(said, sentence):
    plan = SimpleNamespace(name="p", graph=SimpleNamespace(sources=(), readers=()))
    error = translated(ValueError(f"dagster_unified.errors.MalformedInputError: {said}"), plan, "s", None)
    assert isinstance(error, MalformedInputError)
    assert str(error) == sentence


def test_a_connection_of_another_kind_that_is_refused_is_not_the_stores():
    """Where Spark's JVM has died, its process is the one that refuses."""
    with pytest.raises(ConnectionRefusedError), naming_store("p", UPath("s3://lake/checkpoints"), "it goes on"):
        raise ConnectionRefusedError(111, "Connection refused")


def test_a_folder_that_takes_no_files_is_named_and_another_file_is_not_taken_for_it(tmp_path):
    (tmp_path / "file").write_text("")
    store = UPath(tmp_path / "file" / "store")
    said = r"^p: nothing can be written to /.*/file/store: Not a directory: /"
    with pytest.raises(ConfigurationError, match=said), naming_store("p", store, "it goes on"):
        store.mkdir(parents=True)
    with pytest.raises(NotADirectoryError), naming_store("p", UPath(tmp_path / "store"), "it goes on"):
        store.mkdir(parents=True)


GRPC = """<_MultiThreadedRendezvous of RPC that terminated with:
\tstatus = StatusCode.UNAVAILABLE
\tdetails = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused"
\tdebug_error_string = "UNKNOWN:Error received from peer"
>"""


class Session:
    """What a session of Spark Connect is known by."""

    __module__ = "pyspark.sql.connect.session"


def test_a_connect_server_that_has_ended_is_named():
    asked = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused"
    said = f"p: stage 's': the Spark Connect server does not answer any more ({asked}); see its log for why it ended"
    assert str(translated(ValueError(GRPC), Plan(), "s", Session())) == said


def test_another_server_that_a_worker_asks_is_not_sparks():
    raised = f"An exception was thrown\nTraceback (most recent call last):\n  File 'sink.py'\n{GRPC}"
    for text, session in ((GRPC, None), (raised, Session())):
        assert "Spark Connect" not in str(translated(ValueError(text), Plan(), "s", session))


HADOOP = """An error occurred while calling o88.parquet.
: java.net.ConnectException: getFileStatus on s3a://lake/x: software.amazon.awssdk.core.exception.SdkClientException: \
Unable to execute HTTP request: Connect to 127.0.0.1:1 [/127.0.0.1] failed: Connection refused (SDK Attempt Count: 6): \
   software.amazon.awssdk.core.exception.SdkClientException: Unable to execute HTTP request: Connect to 127.0.0.1:1
\tat org.apache.hadoop.fs.s3a.S3AUtils.translateException(S3AUtils.java:249)
"""
"""What Hadoop's connector says, after two minutes."""


def test_a_store_that_does_not_answer_spark_is_named():
    error = translated(ValueError(HADOOP), Plan(), "s", None)
    assert isinstance(error, UnavailableError)
    asked = "s3a://lake/x: Connect to 127.0.0.1:1 [/127.0.0.1] failed: Connection refused"
    assert str(error) == f"p: stage 's': its object store does not answer ({asked}); another attempt may succeed"


RUST = "\x1b[31m↳\x1b[0m ".join(
    [
        "Kernel error -> Generic S3 error\n          ",
        "Error performing GET http://127.0.0.1:1/lake/_delta_log/_last_checkpoint in 4.5s, after 10 retries,\n",
        "10, retry_timeout\n",
        "180s  - HTTP error\n",
        "error sending request\n",
        "client error (Connect)\n",
        "tcp connect error\n",
        "Connection refused (os error 111)\n",
    ]
)
"""What deltalake says where nobody listens."""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (RUST, "Connection refused (os error 111)"),
        (
            f"Job aborted: {RUST}\n\tat java.base/java.lang.Thread.run(Thread.java:840)",
            "Connection refused (os error 111)",
        ),
        (RUST.partition("error sending request")[0] + "error sending request", "the request could not be sent"),
    ],
)
def test_a_store_that_does_not_answer_a_table_is_named(text, why):
    error = translated(OSError(text), Plan(), "s", None)
    assert isinstance(error, UnavailableError)
    asked = f"GET http://127.0.0.1:1/lake/_delta_log/_last_checkpoint: {why}"
    assert str(error) == f"p: stage 's': its object store does not answer ({asked}); another attempt may succeed"


DEAD = """
import os
import signal

from pyspark import SparkContext

from dagster_unified.api import Pipeline
from dagster_unified.engine import session

spark = session.start("local[1]")
jvm = SparkContext._gateway.proc.pid
pipeline = Pipeline("p")
pipeline.from_collection([1]).map(lambda number: os.kill(jvm, signal.SIGKILL), output_type=int).print("out")
try:
    pipeline.execute(OPTIONS, spark=spark).result()
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.rotates("kills")
@pytest.mark.spark
@pytest.mark.parametrize("mode", rotated(["BATCH", "STREAMING"], 1))
def test_a_jvm_that_was_killed_is_named(mode, tmp_path):
    checkpoints = {"execution.checkpointing.dir": str(tmp_path)} if mode == "STREAMING" else {}
    program = DEAD.replace("OPTIONS", repr({"execution.runtime-mode": mode, **checkpoints}))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    said = "the JVM of this process's Spark session was killed (SIGKILL), by hand or by the operating system for want"
    assert done.stdout.startswith("StageError p: stage '"), done.stderr[-2000:]
    assert f"': {said} of memory\n" in done.stdout


@pytest.mark.parametrize(
    "text",
    [
        "[STREAM_FAILED] Query terminated with exception: Python worker failed to connect back. SQLSTATE: XXKST",
        "PySparkRuntimeError: [CANNOT_OPEN_SOCKET] Can not open socket: [\"tried to connect to ('127.0.0.1', 1), but an"
        ' error occurred: timed out"].',
    ],
)
def test_a_process_that_was_too_slow_for_spark_is_transient_and_said_in_one_sentence(text, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    slow = (
        "p: 's' could not start: a Python process of Spark's did not answer within Spark's ten seconds; this machine is"
    )
    for load, said in (
        (12.3, f"{slow} busy (load 12 on 2 cores): run less beside it, or give it more cores"),
        (1.0, slow),
    ):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, load, load))
        error = translated(ValueError(text), Plan(), "s", None)
        assert isinstance(error, SlowStartError)
        assert error.retryable
        assert str(error).startswith(said)


class Spent(NamedTuple):
    shop: str
    amount: int


OVERFLOWN = "org.apache.spark.SparkArithmeticException: [ARITHMETIC_OVERFLOW] overflow. Use 'try_add' to tolerate"


def test_a_sum_that_catalyst_cannot_hold_names_operator_and_field():
    pipeline = Pipeline("p")
    keyed = pipeline.from_collection([Spent("a", 1)]).map(lambda spent: spent, Spent).key_by("shop")
    keyed.agg(F.sum("amount").alias("amount"), output_type=Spent).name("op").print()
    plan = pipeline.plan()
    found = translated(ValueError(OVERFLOWN), plan, "op", None)
    assert isinstance(found, RecordTypeError)
    assert str(found).startswith("p: operator 'op': field 'amount' is larger than its type holds")
    elsewhere = translated(ValueError(OVERFLOWN), plan, plan.regions[0].name, None)
    assert type(elsewhere) is StageError
