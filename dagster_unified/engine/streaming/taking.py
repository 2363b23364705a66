"""Takes a savepoint of a deployment, whether its job runs or not, for the one who asks from another process.

A job that runs is asked for it. Of one that does not, the checkpoint is copied here, and a Spark session writes its
tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from dagster_unified.engine.streaming.checkpoint import PATIENCE, CheckpointDirectory
from dagster_unified.engine.streaming.control import ControlFile
from dagster_unified.engine.streaming.portable import stopped, write_tables
from dagster_unified.engine.streaming.requests import await_answer, request
from dagster_unified.engine.streaming.savepoint import Savepoint, save_stopped, savepoints
from dagster_unified.engine.streaming.topology import MAIN, Lanes, queries, topology
from dagster_unified.errors import UnifiedError
from dagster_unified.graph.plan import Plan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Taken(NamedTuple):
    """A savepoint, where it is, and why it has no tables, if it has none."""

    savepoint: Savepoint
    location: str
    without_tables: str = ""


def take(
    plan: Plan, directory: CheckpointDirectory, owner: str, reason: str, spark: Callable[[], SparkSession]
) -> Taken:
    """Take a savepoint; raises `StateError` where there is no state to save."""
    if _runs(directory):
        given = await_answer(directory, request(directory, reason), lambda: not _runs(directory))
        name = given.location.rstrip("/").rpartition("/")[2]
        return Taken(next(s for s in savepoints(directory) if s.name == name), given.location, given.without_tables)
    saved = save_stopped(directory, owner, reason)
    folder = directory.path / "savepoints" / saved.name
    main = next((one for one in queries(plan) if one.aggregate is None), None)
    if main is None or not any(node.runs_by_key for node in plan.graph.nodes):
        return Taken(saved, str(folder))
    try:
        stages = topology(plan, main.sinks, Lanes(saved.deployed.lanes))
        checkpoint = stopped(folder / "spark" / MAIN, ControlFile(str(folder / "control" / MAIN)).read())
        write_tables(plan, spark(), saved.deployed, stages, checkpoint, str(folder), reason)
    except UnifiedError as error:
        return Taken(saved, str(folder), str(error))
    return Taken(saved, str(folder))


def _runs(directory: CheckpointDirectory) -> bool:
    """Whether a job holds the lease and is alive."""
    holder = directory.holder()
    return holder is not None and holder.is_alive(PATIENCE)
