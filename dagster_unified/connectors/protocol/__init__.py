"""What only an author of a connector needs: the classes to extend, and what their methods are given and return.

A source extends `SplitSource`, `WrittenAheadSource` or `SparkSource` and says its boundedness; a sink extends
`SparkSink` and says what its target is able to do (`Capabilities`).
"""

from dagster_unified.connectors.protocol.commits import (
    Commit,
    CommitConflictError,
    Committable,
    Committer,
    CommitUncertainError,
    NoCommitter,
    SparkSink,
    WriteAttempt,
    WriteIdentity,
    Writer,
    WriterTask,
)
from dagster_unified.connectors.protocol.frame import Malformed
from dagster_unified.connectors.protocol.positions import Offsets
from dagster_unified.connectors.protocol.source import SparkSource
from dagster_unified.connectors.protocol.splits import SplitSource
from dagster_unified.connectors.written_ahead import WrittenAheadSource
from dagster_unified.graph.connectors import Boundedness, Capabilities

__all__ = [
    "Boundedness", "Capabilities", "Commit", "CommitConflictError", "CommitUncertainError", "Committable", "Committer",
    "Malformed", "NoCommitter", "Offsets", "SparkSink", "SparkSource", "SplitSource", "WriteAttempt", "WriteIdentity",
    "Writer", "WriterTask", "WrittenAheadSource",
]  # fmt: skip
