"""Restart strategies: whether and when a failed job is started again (Flink: *Restart Strategies*).

The sensor of a stream asks for a run, `Pipeline.execute` and the command line for a job of their process, a BATCH stage
under Dagster for a step.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

import pendulum

from dagster_unified.engine.events import JobRestarting
from dagster_unified.graph.options import Configuration

PREFIX = "restart-strategy."


@dataclass(frozen=True)
class Failure:
    """A failed run: when it began and ended, and a value of the run's own, for its jitter."""

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


class Attempts:
    """The attempts of a job that is started again in the process that runs it."""

    def __init__(self, options: Configuration, mode: str, job: str) -> None:
        self._options, self._mode, self._job = options, mode, job
        self._failures: list[Failure] = []

    def failed(self, began: datetime, error: str) -> JobRestarting | str:
        """Return when the next attempt begins after a failure that may pass, or why there is none.

        Without a reason where no strategy is asked for, or where it was the first attempt and no other was allowed.
        """
        if not is_asked_for(self._options, self._mode):
            return ""
        ended = datetime.now(timezone.utc)
        self._failures.append(Failure(began, ended, f"{self._job}/{len(self._failures)}"))
        verdict = decide(self._failures, self._options)
        if verdict.at is None:
            return verdict.reason
        return JobRestarting(verdict.attempt, max(0.0, (verdict.at - ended).total_seconds()), error)


def is_asked_for(options: Configuration, mode: str) -> bool:
    """Return whether the strategy starts a job again: a stream always, a BATCH run where one is set for it."""
    return mode == "STREAMING" or any(key.startswith(PREFIX) and options.asked(key) for key, _ in options.items())


def most_failures(options: Configuration) -> int:
    """Return after how many failures in a row the configured strategy gives up; 0 where it goes by no number."""
    if options["restart-strategy.type"] == "FIXED-DELAY":
        return int(options["restart-strategy.fixed-delay.attempts"]) + 1
    if options["restart-strategy.type"] == "FAILURE-RATE":
        return int(options["restart-strategy.failure-rate.max-failures-per-interval"]) + 1
    return 0


def decide(failures: Sequence[Failure], options: Configuration) -> Verdict:
    """Decide by the configured strategy after these failures in a row, the last one last."""
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
                f"{len(recent)} failures within {_words(interval)}, and restart-strategy.failure-rate bears {allowed}",
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


def _words(length: timedelta) -> str:
    return pendulum.duration(seconds=length.total_seconds()).in_words() or f"{length.total_seconds()} seconds"
