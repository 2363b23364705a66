"""Writes rows to a sink as the engine does, under an identity that a test says."""

from contextlib import closing

from dagster_unified.connectors.protocol.commits import WriteIdentity
from dagster_unified.engine.commit import SinkCommits, WriteContext


def written(sink, frame, execution="run", partition="all", before_commit=lambda: None, **identity):
    """The result of one write of pipeline p to a sink, by a job of its own."""
    who = WriteIdentity("p", identity.pop("uid", "sink"), execution, partition, **identity)
    with closing(SinkCommits(sink)) as commits:
        (result,) = commits.write(frame, [WriteContext(who, "stage", before_commit)])
    return result
