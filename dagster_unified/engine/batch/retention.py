"""Which intermediates go, and which stay: the release rule, then budgets of age and bytes, the oldest first.

Knows what is stored; the caller knows who still needs it. What is freed too early is not lost: a stage that needs it
recomputes it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta

from upath import UPath

from dagster_unified.engine.batch.intermediates import MANIFEST, Address, IntermediateStore, Manifest
from dagster_unified.engine.malformed import FOLDER
from dagster_unified.errors import ConfigurationError
from dagster_unified.graph.plan import Plan
from dagster_unified.graph.regions import releasable
from dagster_unified.storage.paths import children


@dataclass(frozen=True)
class Budget:
    """How long intermediates are kept that nobody needs any more.

    At most `max_age`, and of one pipeline at most `max_bytes` in all. None does not limit.
    """

    max_age: timedelta | None = timedelta(days=7)
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        if (self.max_age is not None and self.max_age < timedelta(0)) or (
            self.max_bytes is not None and self.max_bytes < 0
        ):
            raise ConfigurationError("retention: max_age and max_bytes cannot be negative")


@dataclass(frozen=True)
class StoredIntermediate:
    """An intermediate in the store, with its manifest; None for an attempt that a killed run left uncommitted."""

    address: Address
    manifest: Manifest | None
    bytes: int
    created: float
    """Seconds since the epoch."""

    committed: float = 0.0
    """When this run had it: later than `created` where it was taken over from another."""

    @property
    def linked(self) -> bool:
        """Whether its data is another run's."""
        return self.manifest is not None and self.manifest.run != self.address.run


def stored_intermediates(store: IntermediateStore, pipeline: str) -> Iterator[StoredIntermediate]:
    """Yield everything that is stored of a pipeline."""
    for stage in (f for f in _folders(store.root / pipeline) if f.name != FOLDER):
        for partition in _folders(stage):
            for run in _folders(partition):
                address = Address(pipeline, stage.name, run.name, partition.name)
                manifest = store.manifest(address)
                size = sum(f.bytes for f in manifest.files) if manifest is not None else sum(map(_size, run.rglob("*")))
                written = float((run / MANIFEST if manifest is not None else run).stat().st_mtime)
                yield StoredIntermediate(
                    address, manifest, size, manifest.created if manifest is not None else written, written
                )


def to_free(
    stored: Iterable[StoredIntermediate],
    plan: Plan,
    budget: Budget,
    now: float,
    running: Callable[[str], bool],
    needed: Callable[[StoredIntermediate], bool],
) -> list[StoredIntermediate]:
    """Return the intermediates to remove now, the oldest first.

    `running` says whether a run may still write, and `needed` whether somebody may still read an intermediate. An
    intermediate is released when all its consumers have finished in its run, or when its run is over.
    """
    known = list(stored)
    finished: dict[tuple[str, str], set[str]] = {}
    for intermediate in known:
        if intermediate.manifest is not None:
            finished.setdefault((intermediate.address.run, intermediate.address.partition), set()).add(
                intermediate.address.stage
            )

    def goes(intermediate: StoredIntermediate) -> bool:
        if needed(intermediate):
            return False
        return not running(intermediate.address.run) or (
            intermediate.manifest is not None
            and intermediate.address.stage
            in _released(plan, finished[(intermediate.address.run, intermediate.address.partition)])
        )

    candidates = sorted((s for s in known if goes(s)), key=lambda s: (s.created, not s.linked))
    leavings = [s for s in candidates if s.manifest is None]
    whole = [s for s in candidates if s.manifest is not None]
    stored_bytes = sum(s.bytes for s in known if not s.linked)
    links: dict[Address, set[Address]] = {}
    for intermediate in known:
        if intermediate.linked and intermediate.manifest is not None:
            links.setdefault(replace(intermediate.address, run=intermediate.manifest.run), set()).add(
                intermediate.address
            )
    going: dict[Address, StoredIntermediate] = {}

    def stays_for_a_link(intermediate: StoredIntermediate) -> bool:
        return not links.get(intermediate.address, set()) <= going.keys()

    stored_bytes -= sum(s.bytes for s in leavings)
    for intermediate in whole:
        too_old = budget.max_age is not None and now - intermediate.created > budget.max_age.total_seconds()
        too_much = budget.max_bytes is not None and stored_bytes > budget.max_bytes
        if (too_old or too_much) and not stays_for_a_link(intermediate):
            going[intermediate.address] = intermediate
            stored_bytes -= 0 if intermediate.linked else intermediate.bytes
    return [*(s for s in leavings if not stays_for_a_link(s)), *going.values()]


def _released(plan: Plan, finished: Collection[str]) -> set[str]:
    by_id = {r.id: r.name for r in plan.regions}
    return {by_id[r] for r in releasable(plan.inputs, [r.id for r in plan.regions if r.name in finished])}


def _size(path: UPath) -> int:
    """Return the bytes of a file; 0 for anything else, and for one that a run has deleted meanwhile."""
    try:
        return int(path.stat().st_size) if path.is_file() else 0
    except FileNotFoundError:
        return 0


def _folders(path: UPath) -> list[UPath]:
    """Return the folders in a folder, which a bucket lists in one request."""
    return [path / name for name, is_folder in sorted(children(path).items()) if is_folder and name[0] != "."]
