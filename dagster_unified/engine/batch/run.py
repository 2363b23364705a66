"""A run of a pipeline's stages: where it runs, as whom, and which state it goes on from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_unified.engine.batch.intermediates.store import Address, IntermediateStore, Manifest
from dagster_unified.engine.events import Observer, ignore_events
from dagster_unified.engine.state_tables.savepoints import StartingState
from dagster_unified.errors import CarriedStateError
from dagster_unified.graph.plan import Plan, Region
from dagster_unified.graph.slices import WHOLE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Lookup = Callable[[Region], Manifest | None]
"""Finds the manifest of a region's intermediate, if its data still stands."""


@dataclass(frozen=True)
class Carrying:
    """Where the state before a partition comes from: nowhere for the first partition.

    `last` says that the input ends with this partition.
    """

    before: Lookup | None
    key_before: str
    last: bool = False
    start: StartingState | None = None
    """The savepoint that the first partition starts from."""

    only_saved: bool = False
    """Whether the state begins empty and goes to a savepoint and nowhere else."""

    def manifest(self, plan: Plan, region: Region) -> Manifest | None:
        """The manifest of the partition before, which a stage without state can do without.

        Raises `CarriedStateError` where there is none for a stage with state, and for one that ended.
        """
        if self.before is None:
            return None
        found = self.before(region)
        if found is None and not region.carried:
            return None
        if found is None:
            raise CarriedStateError(
                f"{plan.name}: stage '{region.name}' goes on from the state of partition {self.key_before}, which is"
                " not there: it has not been run, or its state was freed; run a backfill that begins with"
                f" {self.key_before}, or with an earlier partition"
            )
        if found.ended:
            raise CarriedStateError(
                f"{plan.name}: stage '{region.name}' goes on from the state of partition {self.key_before}, with which"
                " the input ended when it ran, so that its windows have closed and its timers have fired; run a"
                f" backfill that begins with {self.key_before}"
            )
        return found


@dataclass(frozen=True)
class Run:
    """Where and as whom stages run.

    A run, its retries and its re-executions share one `execution`, in which `number` grows from run to run.
    """

    plan: Plan
    spark: SparkSession
    store: IntermediateStore
    run_id: str
    execution: str
    partition: str = WHOLE
    number: int = 0
    partition_end: int | None = None
    """Where a partition in time ends: milliseconds since the epoch."""

    observe: Observer = ignore_events
    carry: Carrying | None = None
    check: Callable[[], None] = lambda: None
    """Raises where the run is to stop; called before anything is written or committed."""

    def address(self, region: Region) -> Address:
        """Where this run puts a region's intermediate."""
        return Address(self.plan.name, region.name, self.run_id, self.partition)


def only_saved(runs: Sequence[Run]) -> bool:
    """Whether what a job's operators leave goes to a savepoint and nowhere else, and starts from nothing."""
    return len(runs) == 1 and runs[0].carry is not None and runs[0].carry.only_saved
