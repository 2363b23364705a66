"""Which partitions went on from a carried state that has been replaced since.

Dagster does not say it of assets that depend on themselves, once they have more than a hundred partitions. What each
partition was made of is in its materialization, so that the answer does not depend on what the janitor has freed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from dagster import AssetCheckResult, AssetCheckSeverity, AssetCheckSpec, AssetKey

from dagster_unified.orchestration.metadata import CARRIED_FROM, MADE_BY

CHECK = "carried_state"


def carried_state_spec(asset: AssetKey) -> AssetCheckSpec:
    """The check that the runs of a stage report."""
    return AssetCheckSpec(
        CHECK,
        asset=asset,
        description="Each partition goes on from the state that the one before it ended with when it last ran.",
    )


def carried_state_result(
    asset: AssetKey, keys: Sequence[str], shown: Mapping[str, Mapping[str, Any]]
) -> AssetCheckResult:
    """Warns of the partitions that a backfill has to run again, by the metadata of all that `keys` name in order.

    They are not wrong in themselves, so it is a warning.
    """
    stale = stale_partitions(keys, shown)
    if not stale:
        return AssetCheckResult(
            asset_key=asset,
            check_name=CHECK,
            passed=True,
            description="every partition goes on from the one before it",
            metadata={"stale partitions": 0},
        )
    which = stale[0] if len(stale) == 1 else f"{stale[0]} to {stale[-1]}"
    return AssetCheckResult(
        asset_key=asset,
        check_name=CHECK,
        passed=False,
        severity=AssetCheckSeverity.WARN,
        description=(
            f"{which} went on from a state that has been replaced since: run a backfill over"
            f" {'it' if len(stale) == 1 else 'them'}"
        ),
        metadata={"stale partitions": len(stale), "first": stale[0], "last": stale[-1]},
    )


def stale_partitions(keys: Sequence[str], shown: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The partitions to run again, in order: the first whose predecessor was materialized again, and all after it."""
    for i, (before, mine) in enumerate(pairwise(keys), 1):
        if (
            before in shown
            and MADE_BY in shown.get(mine, ())  # it has state; one that was the first went on from none
            and _run(shown[mine], CARRIED_FROM) != _run(shown[before], MADE_BY)
        ):
            return [key for key in keys[i:] if key in shown]
    return []


def _run(metadata: Mapping[str, Any], name: str) -> str | None:
    value = metadata.get(name)
    return None if value is None else str(value.value)
