"""Restart strategies: pure functions of the failures that were seen."""

from datetime import datetime, timedelta, timezone

from dagster_unified.engine.restarts import Failure, decide
from dagster_unified.graph.options import Configuration

NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)
SECOND = timedelta(seconds=1)


def failures(*ended, ran=10):
    return [Failure(NOON + e * SECOND - ran * SECOND, NOON + e * SECOND, str(e)) for e in ended]


def strategy(kind, **options):
    return Configuration.of(
        {
            "restart-strategy.type": kind,
            **{f"restart-strategy.{kind.lower()}.{k.replace('_', '-')}": v for k, v in options.items()},
        }
    )


def test_none_gives_up_at_once():
    assert decide(failures(0), strategy("NONE")).at is None


def test_fixed_delay_gives_up_after_its_attempts():
    options = strategy("FIXED-DELAY", attempts=2, delay="5 s")
    assert decide(failures(0, 20), options).at == NOON + 25 * SECOND
    verdict = decide(failures(0, 20, 40), options)
    assert (verdict.at, verdict.reason) == (None, "all 2 attempts of restart-strategy.fixed-delay have failed")


def test_exponential_delay_grows_to_its_maximum_and_begins_anew_after_a_long_run():
    options = strategy(
        "EXPONENTIAL-DELAY",
        initial_backoff="1 s",
        backoff_multiplier=2,
        max_backoff="5 s",
        jitter_factor=0,
        reset_backoff_threshold="1 min",
    )
    waits = [decide(failures(*range(n)), options).at - NOON - (n - 1) * SECOND for n in (1, 2, 3, 4, 9)]
    assert waits == [1 * SECOND, 2 * SECOND, 4 * SECOND, 5 * SECOND, 5 * SECOND]
    after_long = [*failures(0, 1, 2), *failures(100, ran=90)]
    assert decide(after_long, options).attempt == 1


def test_jitter_keeps_within_its_factor_and_is_the_same_at_every_tick():
    options = strategy("EXPONENTIAL-DELAY", initial_backoff="10 s", jitter_factor=0.2)
    at = decide(failures(3), options).at
    assert 8 * SECOND <= at - NOON - 3 * SECOND <= 12 * SECOND
    assert decide(failures(3), options).at == at


def test_no_wait_is_longer_than_the_longest_whatever_the_jitter_and_the_multiplier():
    options = strategy("EXPONENTIAL-DELAY", backoff_multiplier=1e9, max_backoff="5 s", jitter_factor=1)
    waits = [decide(failures(*range(n)), options).at - NOON - (n - 1) * SECOND for n in range(2, 100)]
    assert max(waits) == 5 * SECOND


def test_failure_rate_counts_within_its_interval():
    options = strategy("FAILURE-RATE", max_failures_per_interval=2, failure_rate_interval="1 min", delay="3 s")
    assert decide(failures(0, 100), options).at == NOON + 103 * SECOND
    assert decide(failures(50, 80, 100), options).at is None
