"""A stage's automation condition, as it looks at what the stage depends on.

Knows Dagster's conditions; no engine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from dagster import AssetKey, AssetSelection, AutomationCondition

from dagster_unified.orchestration._dagster_compat import AllDepsCondition, has_allow_ignore

Condition = AutomationCondition[AssetKey]


def condition_of(given: Condition, sources: Collection[AssetKey], own: AssetKey) -> Condition:
    """The condition of a stage, from the one that its deployment gives.

    It leaves out the assets that stand for `sources`: nobody materializes them, so that a condition that waits for
    them, as `on_cron` and `eager` do, would wait for ever. And what has to be new since a tick is not the stage's own
    partition before, from which it goes on with `carry_state`.
    """
    if sources and has_allow_ignore(given):
        given = given.ignore(AssetSelection.assets(*sources))
    for waiting in dict.fromkeys(_for_all_deps(given)):
        given = given.replace(waiting, waiting.ignore(AssetSelection.assets(own)))
    return given


def _for_all_deps(condition: AutomationCondition[Any]) -> Iterator[AllDepsCondition[Any]]:
    if isinstance(condition, AllDepsCondition):
        yield condition
        return
    for child in condition.children:
        yield from _for_all_deps(child)
