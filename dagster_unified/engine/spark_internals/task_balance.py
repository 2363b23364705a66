"""Which of Spark's tasks a key group is in: the groups of an operator are spread evenly over the tasks.

Spark's exchange puts a row into the task that the hash of its columns says. The hash of a lane and a group is like
chance: of 128 groups in 64 tasks the fullest has six or seven, and nine have none. So the exchange has a third column,
which is chosen such that the hash is the task that the group is to be in. That column is a part of the key under which
Spark keeps the group's state. Knows Spark's hash function, and nothing of what runs in a group.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SPREAD = "spread"
"""The column behind the lane and the group. 0 in the rows that an exchange may put anywhere."""

PLACED = ("lane", "group", SPREAD)
"""The columns that an exchange goes by."""

_SEED = 42
_WORD = 0xFFFFFFFF
_MIX = (0xCC9E2D51, 0x1B873593)
_FINAL = (0x85EBCA6B, 0xC2B2AE35)
_ADDED = 0xE6546B64


def spread(frame: DataFrame, lanes: Collection[int], groups: int, tasks: int) -> DataFrame:
    """Packed rows with the column `SPREAD`, for an exchange of the groups of these lanes into so many tasks.

    `tasks` may be another number than Spark's, such as after a restart with other settings: then the groups are not
    spread evenly, and nothing else changes.
    """
    from pyspark.sql import functions as F

    chosen = ",".join(str(spread_of(lane, group, tasks)) for lane in sorted(lanes) for group in range(groups))
    number = F.array_position(F.lit(sorted(lanes)), F.col("lane")) - 1
    # one string, which Catalyst splits once, since it takes long over a plan with so many numbers
    own = F.element_at(F.split(F.lit(chosen), ","), (number * groups + F.col("group") + 1).cast("int")).cast("int")
    return frame.withColumn(SPREAD, F.when(F.col("lane").isin(*lanes), own).otherwise(0))


def spread_of(lane: int, group: int, tasks: int) -> int:
    """What Spark has to hash behind a lane and a group for the row to get into the group's task.

    The groups of a lane follow one another, and each lane begins one task later.
    """
    return _last_word((lane + group) % tasks, (lane, group))


def _last_word(hashed: int, words: tuple[int, ...]) -> int:
    """The word which makes the Murmur3 hash of all of them, as Spark computes it, what is wanted."""
    so_far = _SEED
    for word in words:
        so_far = _finalized(_mixed_in(so_far, word))
    mixed = (_unfinalized(hashed) - _ADDED) * pow(5, -1, 1 << 32) & _WORD
    word = _rotated(mixed, 32 - 13) ^ so_far
    word = _rotated(word * pow(_MIX[1], -1, 1 << 32) & _WORD, 32 - 15) * pow(_MIX[0], -1, 1 << 32) & _WORD
    return word - (1 << 32) if word >> 31 else word


def _mixed_in(so_far: int, word: int) -> int:
    word = _rotated(word * _MIX[0] & _WORD, 15) * _MIX[1] & _WORD
    return _rotated(so_far ^ word, 13) * 5 + _ADDED & _WORD


def _finalized(word: int) -> int:
    word ^= 4  # the length of an integer in bytes
    word = (word ^ word >> 16) * _FINAL[0] & _WORD
    word = (word ^ word >> 13) * _FINAL[1] & _WORD
    return word ^ word >> 16


def _unfinalized(word: int) -> int:
    word ^= word >> 16
    word = word * pow(_FINAL[1], -1, 1 << 32) & _WORD
    word ^= word >> 13 ^ word >> 26
    word = word * pow(_FINAL[0], -1, 1 << 32) & _WORD
    return word ^ word >> 16 ^ 4


def _rotated(word: int, bits: int) -> int:
    return (word << bits | word >> 32 - bits) & _WORD
