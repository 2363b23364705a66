"""What rests on what Spark does not promise. Each file here uses something of Spark's inside, and nothing else does so.

* `java_class.py` has Janino, which Spark brings along for its own code, compile classes of ours, and defines them in
  Spark's class loader: `LocalDisk.java`, `BucketFiles.java`, `InPlace.java` and `ControlStream.java`.
* `state_client.py` changes how the client of `transformWithState` sends its requests.
* `spark_log.py` reads and writes the logs of Spark's file sources and sinks.
* `placing.py` inverts the hash by which Spark's exchange chooses a task, and has an RDD of the JVM prefer executors.

`tests/spark_internals/test_spark_is_as_tested.py` is the first that fails where Spark has changed one of these.
"""

import logging

TESTED = "4.3"
"""The version of Spark that all of this was tested with."""

_log = logging.getLogger(__name__)
_warned: set[str] = set()


def check_version(version: str) -> None:
    """Warn once where Spark has another version than the tested ones: its internals may have changed."""
    if version.startswith(f"{TESTED}.") or version in _warned:
        return
    _warned.add(version)
    _log.warning(
        "this is Spark %s, and the parts of Spark's inside that dagster-unified uses were tested with %s: its file"
        " logs, its state client, its hash function, and classes that are compiled when a session starts; install"
        " pyspark==%s.*, or try your pipelines first",
        version,
        TESTED,
        TESTED,
    )
