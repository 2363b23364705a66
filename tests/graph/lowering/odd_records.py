"""Records with the values on which Spark and Python disagree most easily."""

import random
from typing import NamedTuple


class Odd(NamedTuple):
    n: int
    m: int | None
    text: str
    note: str | None
    x: float
    y: float | None
    flag: bool
    mark: bool | None


INTEGERS = [0, 1, -1, 2, 3, 5, 7, 10, -7, 100, 2**31, 2**53, 2**53 + 1, 2**62, 2**63 - 1, -(2**63)]
FLOATS = [0.0, -0.0, 0.5, 1.0, 3.0, -1.5, 1e300, 5e-324, float("inf"), float("-inf"), float("nan"), 2.0**53]
TEXTS = ["", "a", "A", "ß", "ss", "\U0001f600", "\ue000", "a ", "aa", "x' OR true --", "\0", "e\u0301"]


def rows(count, seed):
    drawn = random.Random(seed)
    return [
        Odd(
            drawn.choice(INTEGERS),
            drawn.choice([None, *INTEGERS]),
            drawn.choice(TEXTS),
            drawn.choice([None, *TEXTS]),
            drawn.choice(FLOATS),
            drawn.choice([None, *FLOATS]),
            drawn.random() < 0.5,
            drawn.choice([None, True, False]),
        )
        for _ in range(count)
    ]
