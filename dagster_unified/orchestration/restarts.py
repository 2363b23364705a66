"""Restart strategies: whether and when a failed streaming job is started again (Flink: *Restart Strategies*).

Pure functions.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from dagster_unified.graph.options import Configuration
from dagster_unified.orchestration.moments import words


@dataclass(frozen=True)
class Failure:
    """A failed run: when it began and ended, and something that is the run's own, for its jitter."""

    began: datetime
    ended: datetime
    seed: str


@dataclass(frozen=True)
class Verdict:
    """When to restart, and which attempt that is.

    `at` is None where the strategy gives up, and `reason` says why.
    """

    attempt: int
    at: datetime | None
    reason: str = ""


def most_failures(options: Configuration) -> int:
    """How many failures in a row the configured strategy has to see to give up; 0 where it goes by no number."""
    if options["restart-strategy.type"] == "FIXED-DELAY":
        return int(options["restart-strategy.fixed-delay.attempts"]) + 1
    if options["restart-strategy.type"] == "FAILURE-RATE":
        return int(options["restart-strategy.failure-rate.max-failures-per-interval"]) + 1
    return 0


def decide(failures: Sequence[Failure], options: Configuration) -> Verdict:
    """What the configured strategy says after these failures in a row, the last one last."""
    strategy = options["restart-strategy.type"]
    last = failures[-1]
    if strategy == "NONE":
        return Verdict(len(failures), None, "restart-strategy.type is NONE")
    if strategy == "FIXED-DELAY":
        allowed = options["restart-strategy.fixed-delay.attempts"]
        if len(failures) > allowed:
            return Verdict(len(failures), None, f"all {allowed} attempts of restart-strategy.fixed-delay have failed")
        return Verdict(len(failures), last.ended + options["restart-strategy.fixed-delay.delay"])
    if strategy == "FAILURE-RATE":
        allowed, interval = (
            options["restart-strategy.failure-rate.max-failures-per-interval"],
            options["restart-strategy.failure-rate.failure-rate-interval"],
        )
        recent = [f for f in failures if f.ended > last.ended - interval]
        if len(recent) > allowed:
            return Verdict(
                len(failures),
                None,
                f"{len(recent)} failures within {words(interval)}, and restart-strategy.failure-rate bears {allowed}",
            )
        return Verdict(len(failures), last.ended + options["restart-strategy.failure-rate.delay"])
    return _exponential(failures, options)


def _exponential(failures: Sequence[Failure], options: Configuration) -> Verdict:
    prefix = "restart-strategy.exponential-delay"
    in_a_row: list[Failure] = []
    for failure in failures:
        if failure.ended - failure.began >= options[f"{prefix}.reset-backoff-threshold"]:
            in_a_row = []
        in_a_row.append(failure)
    first, most = options[f"{prefix}.initial-backoff"], options[f"{prefix}.max-backoff"]
    wait, longest = first.total_seconds(), most.total_seconds()
    for _ in in_a_row[1:]:
        wait = min(wait * options[f"{prefix}.backoff-multiplier"], longest)
    jitter = options[f"{prefix}.jitter-factor"]
    wait *= 1 + random.Random(failures[-1].seed).uniform(-jitter, jitter)
    return Verdict(len(in_a_row), failures[-1].ended + timedelta(seconds=min(wait, longest)))
