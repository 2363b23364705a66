"""What came out of Spark as one sentence."""

import pytest

from dagster_unified.engine.failures import translated


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


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            JAVA,
            "SparkException: [FAILED_READ_FILE.NO_HINT] Encountered error while reading file file:///in/0.parquet. "
            " SQLSTATE: KD001; IOException: no columns",
        ),
        ("An error occurred while calling o1.load", "An error occurred while calling o1.load"),
        ("something else\nand more", "ValueError: something else"),
        ("", "ValueError: "),
    ],
)
def test_the_sentence_says_what_java_says(text, sentence):
    assert str(translated(ValueError(text), Plan(), "s", None)) == f"p: stage 's': {sentence}"
