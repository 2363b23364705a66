"""Takes a savepoint of a deployment, whether its job runs or not, for the one who asks from another process.

A job that runs is asked for it. Of one that does not, the checkpoint is copied here, and a Spark session writes its
tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from dagster_unified.engine.failures import translated
from dagster_unified.engine.streaming.checkpoint import PATIENCE, CheckpointDirectory, last_number
from dagster_unified.engine.streaming.desired import ask
from dagster_unified.engine.streaming.portable import FrozenCheckpoint, frozen, stopped, write_tables
from dagster_unified.engine.streaming.requests import Answer, await_answer, request
from dagster_unified.engine.streaming.savepoint import Savepoint, save_stopped, savepoints
from dagster_unified.engine.streaming.saving import without_tables
from dagster_unified.engine.streaming.topology import MAIN, Lanes, queries, topology
from dagster_unified.errors import StateError, UnifiedError
from dagster_unified.graph.plan import Plan
from dagster_unified.state import manifest as manifests

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from upath import UPath


class Taken(NamedTuple):
    """A savepoint, where it is, and where its tables are."""

    savepoint: Savepoint
    location: str
    tables: str = ""
    """Empty where it has none."""

    error: str = ""
    """Why its tables could not be written."""


def take(
    plan: Plan,
    directory: CheckpointDirectory,
    owner: str,
    reason: str,
    spark: Callable[[], SparkSession],
    path: str = "",
    suspend: bool = False,
) -> Taken:
    """Take a savepoint, with its tables in `path` if one is given.

    `suspend` stops the job, and keeps it stopped: the savepoint is its state where it stops. Raises `StateError` where
    there is no state to save, or a savepoint in `path` already; nothing is asked then.
    """
    why = without_tables(plan)
    if path:
        path = str(manifests.check_free(path, "savepoint"))
        if why:
            raise StateError(f"{plan.name}: a savepoint of this pipeline has no tables, since {why}; give no path")
    given = _asked(directory, reason, path, suspend)
    if given is None:
        return _take_stopped(plan, directory, owner, reason, spark, path)
    if not given.location:
        raise StateError(given.error)
    name = given.location.rstrip("/").rpartition("/")[2]
    saved = next(one for one in savepoints(directory) if one.name == name)
    tables = "" if why or given.error else path or given.location
    return Taken(saved, given.location, tables, given.error)


def _asked(directory: CheckpointDirectory, reason: str, path: str, suspend: bool) -> Answer | None:
    """The answer of the job that runs; None where none does. Raises `StateError` where it was killed meanwhile."""
    asked = False
    while True:
        holder = directory.holder()
        token = holder.token if holder is not None and holder.is_alive(PATIENCE) else None
        wanted = None if token is None else request(directory, token, reason, path, suspend)
        if suspend and not asked:
            asked = bool(ask(directory, state="suspended", reason=reason))
        if wanted is None:
            return None
        given = await_answer(directory, wanted)
        if given is not None:
            return given
        if not suspend and not directory.released(wanted.token):
            raise StateError(
                f"{directory.path.name}: the job was killed or replaced before it had taken the savepoint; ask again"
            )


def _take_stopped(
    plan: Plan, directory: CheckpointDirectory, owner: str, reason: str, spark: Callable[[], SparkSession], path: str
) -> Taken:
    """Take a savepoint of a job that does not run."""
    saved = save_stopped(directory, owner, reason, tables=path)
    folder = directory.path / "savepoints" / saved.name
    keyed = any(node.runs_by_key for node in plan.graph.nodes)
    if without_tables(plan) or not (keyed or path):
        return Taken(saved, str(folder))
    tables = path or str(folder)
    try:
        _write_tables(plan, spark(), saved, folder, tables)
    except UnifiedError as error:
        return Taken(saved, str(folder), error=str(error))
    return Taken(saved, str(folder), tables)


def _write_tables(plan: Plan, spark: SparkSession, saved: Savepoint, folder: UPath, path: str) -> None:
    (main,) = queries(plan)
    stages = topology(plan, main.sinks, Lanes(saved.deployed.lanes))
    try:
        write_tables(plan, spark, saved.deployed, stages, _checkpoint(folder, saved), path, saved.reason)
    except Exception as error:
        raise translated(error, plan, "savepoint", spark) from error


def _checkpoint(folder: UPath, saved: Savepoint) -> FrozenCheckpoint:
    epoch = last_number(folder / "spark" / MAIN / "commits")
    return frozen(folder, epoch) if saved.settled and epoch is not None else stopped(folder)
