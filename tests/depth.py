"""How much of a long test runs: in `make test` a part that changes from day to day, in `make test-all` everything.

The part follows from a seed. It is the date unless UNIFIED_SEED is set; pytest prints it at the end.
"""

import os
import random
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import TypeVar
from zlib import crc32

NIGHTLY = os.environ.get("UNIFIED_TESTS") == "nightly"
# In the environment, so that the workers of pytest-xdist and programs that a test starts have the same.
SEED = int(os.environ.setdefault("UNIFIED_SEED", datetime.now(timezone.utc).strftime("%Y%m%d")))

T = TypeVar("T")


def examples(count: int) -> int:
    """How many examples a property test on Spark tries: ten times as many at night.

    And one more, since Hypothesis begins with the simplest of all, which is the same every day and has little in it.
    """
    return 1 + (10 * count if NIGHTLY else count)


def rotated(cases: Sequence[T], count: int) -> list[T]:
    """`count` of the cases in their order, others with another seed; all of them at night."""
    if NIGHTLY or count >= len(cases):
        return list(cases)
    # Neighbouring seeds take neighbouring cases, so that so many days see all of them.
    first = SEED * count
    chosen = {(first + n) % len(cases) for n in range(count)}
    return [case for place, case in enumerate(cases) if place in chosen]


def of_the_day(names: Sequence[str], count: int) -> set[str]:
    """`count` of the names, neighbours seldom together, others with another seed; all of them at night."""
    return set(rotated(sorted(names, key=lambda name: crc32(name.encode())), count))


def chance(name: str) -> random.Random:
    """Random numbers of a test's own, from the seed."""
    return random.Random(f"{SEED} {name}")
