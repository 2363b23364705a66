"""What came out of Spark as one sentence."""

import pytest
from upath import UPath

from dagster_unified.engine.failures import naming_store, translated


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
        (PYTHON, "ModuleNotFoundError: No module named 'shops'"),
        ("something else\nand more", "ValueError: something else"),
        ("", "ValueError: "),
    ],
)
def test_the_sentence_says_what_went_wrong(text, sentence):
    assert str(translated(ValueError(text), Plan(), "s", None)) == f"p: stage 's': {sentence}"


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("msgspec", "no msgspec"),
        ("pyarrow.lib", "a pyarrow without the module pyarrow.lib"),
        ("dagster_unified.engine.handshake", "a dagster_unified without the module dagster_unified.engine.handshake"),
        ("google.protobuf", "no google.protobuf"),
    ],
)
def test_a_worker_that_lacks_a_module_is_named(name, lacks):
    text = f"Lost task 0.3 in stage 1.0 (TID 7) (10.0.0.7 executor 2): ModuleNotFoundError: No module named '{name}'"
    assert str(translated(ValueError(text), Plan(), "s", None)).startswith(f"p: host 10.0.0.7 has {lacks}: install ")


@pytest.mark.parametrize("state", ["", " SQLSTATE: P0001", "\n  SQLSTATE: 38000"])
def test_an_error_of_the_library_is_what_a_worker_raised_without_sparks_state(state):
    raised = ValueError(f"Job aborted: dagster_unified.errors.PipelineError: p: operator 'a' is odd{state}\n\tat java")
    assert str(translated(raised, Plan(), "s", None)) == "p: operator 'a' is odd"


def test_a_connection_of_another_kind_that_is_refused_is_not_the_stores():
    """Where Spark's JVM has died, its process is the one that refuses."""
    with pytest.raises(ConnectionRefusedError), naming_store("p", UPath("s3://lake/checkpoints"), "it goes on"):
        raise ConnectionRefusedError(111, "Connection refused")
