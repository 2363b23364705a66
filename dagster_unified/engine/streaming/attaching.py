"""Which queries a Spark Connect server runs for a job: they outlive its process, and the next job goes on with them.

A record in the checkpoint directory, `running.json`, says where they are, and which job they obey. The next job finds
them by it; and where that job has taken the lease, they find out by it whether they obey it from now on or end
(`through_connect.py`). A job goes on with queries only if it would have started the same: of the same code and options,
in sessions with the same settings, from the state that they have. Knows Connect's sessions; not what a query does.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING

import msgspec

from dagster_unified.engine.session import in_session, server_of
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory, Deployed
from dagster_unified.engine.streaming.desired import read_desired
from dagster_unified.engine.streaming.sources import SETTINGS, forget
from dagster_unified.errors import LeaseLostError
from dagster_unified.graph.fingerprint import digest
from dagster_unified.storage import conditional
from dagster_unified.storage.object_store import is_connect
from dagster_unified.storage.paths import read_whole

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from upath import UPath

FILE = "running.json"

ENDS_WITHIN = 20.0
"""Seconds that a query of a job before is given to stop; it commits nothing more in any case."""

_log = logging.getLogger(__name__)

_SET_BY_QUERIES = ("spark.sql.streaming.statefulOperator.allowMultiple", *SETTINGS)
"""The settings that a job sets anew for each query that it starts."""


class Running(msgspec.Struct, frozen=True):
    """The queries of a job that a server runs; none before they are started and after they are stopped."""

    token: int
    """The fencing token of the job that they obey."""

    started: int
    """The token of the job that started them."""

    version: int = 0
    """Of the record of the deployment that they run: each start and whatever changes the state writes another."""

    server: tuple[str, str] = ("", "")
    """Its address, and the user there."""

    session: str = ""
    settings: str = ""
    """A digest of the session's."""

    queries: dict[str, tuple[str, str]] = {}
    """The ids of each query and of its run."""


@dataclass(frozen=True)
class RunningQueries:
    """Running queries, and their session."""

    running: Running
    spark: SparkSession
    queries: dict[str, StreamingQuery]


def running(directory: CheckpointDirectory) -> Running | None:
    """Return the record of the queries that a server runs; None where no job has left any."""
    try:
        return msgspec.json.decode(read_whole(directory.path / FILE), type=Running)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def record(directory: CheckpointDirectory, current: Running) -> None:
    """Write the record; raises `LeaseLostError` where a later job has written one."""
    path = directory.path / FILE
    before = conditional.read(path)
    written = running(directory)
    try:
        if written is not None and written.token > current.token:
            raise FileExistsError
        conditional.write(path, msgspec.json.encode(current), before and before.version)
    except FileExistsError:
        raise LeaseLostError(
            f"{directory.path.name}: another job has taken over the checkpoint directory and its queries; this one"
            " stops and writes nothing more"
        ) from None


def settings_of(spark: SparkSession) -> str:
    """Return a digest of the settings of a server's session."""
    settings = spark.conf.getAll
    return digest(*(f"{name}={value}" for name, value in sorted(settings.items()) if name not in _SET_BY_QUERIES))


def find(
    directory: CheckpointDirectory, spark: SparkSession, deployed: Deployed | None, names: Collection[str]
) -> RunningQueries | None:
    """Return the queries that the previous job left, if all of them run, and are what this job would start.

    `spark` is the session of the job, set up as for its queries, and `deployed` the record that it has found.
    """
    before = running(directory)
    if before is None or deployed is None or not is_connect(spark) or before.queries.keys() != set(names):
        return None
    is_same = (before.version, before.server, before.settings) == (
        deployed.version,
        server_of(spark),
        settings_of(spark),
    )
    ended = (
        directory.released(before.token) or read_desired(directory).stop >= before.token
    )  # as one that made no progress
    if ended or not is_same:
        return None
    try:
        session = in_session(spark, before.session)
        queries = {name: session.streams.get(id_) for name, (id_, _) in before.queries.items()}
        alive = {name: query for name, query in queries.items() if query is not None and query.isActive}
    except Exception as error:  # the server has closed the session, or its client cannot be given one
        _log.info(
            "%s: its queries are started anew, because those that ran are not to be had: %s", directory.path, error
        )
        return None
    if any(name not in alive or alive[name].runId != run for name, (_, run) in before.queries.items()):
        return None
    return RunningQueries(before, session, alive)


def end(before: Running, spark: SparkSession, folder: UPath) -> None:
    """Stop the queries of a job before with which this one does not go on; logs a warning for those on another server.

    `folder` is the checkpoint directory of both.

    Spark stops one only where a query of the same id starts, and a job without state starts others: what was left would
    begin an epoch in their checkpoint before it is told that it may not.
    """
    if not before.queries:
        return
    if not is_connect(spark) or before.server != server_of(spark):
        _log.warning(
            "queries of an earlier job may still run on the Spark Connect server at %s, which this job does not use;"
            " they commit nothing more, but they may still write to their checkpoint: end that server, if it is up",
            before.server[0] or "an address that was not recorded",
        )
        return
    stopping = Thread(target=_stop, args=(before, spark, folder), daemon=True, name="end of earlier queries")
    stopping.start()
    stopping.join(ENDS_WITHIN)
    if stopping.is_alive():
        _log.warning("queries of an earlier job have not stopped within %.0f s; they commit nothing more", ENDS_WITHIN)


def _stop(before: Running, spark: SparkSession, folder: UPath) -> None:
    try:
        session = in_session(spark, before.session)
        for name, (id_, _) in before.queries.items():
            query = session.streams.get(id_)
            if query is not None:
                query.stop()
            forget(session, folder, name, before.started)
    except Exception as error:  # the server has closed the session, and its queries with it
        _log.info("the queries of an earlier job are not to be had: %s", error)
