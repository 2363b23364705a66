"""Where Spark's tasks run: in the executor that has their files, with key groups spread evenly over them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from dagster_unified.storage.object_store import is_connect

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

EXECUTOR = "executor"
"""The column in which a task is told where it runs, as Spark writes the place of an executor."""


class Placing:
    """Where each subtask last ran; with `copies` executors have files that others have not."""

    def __init__(self, spark: SparkSession, copies: bool) -> None:
        self._spark = spark
        self._last: dict[int, dict[int, str]] = {}
        """The places of the subtasks of each level."""

        self._frames: dict[tuple[int, ...], tuple[list[str], DataFrame]] = {}
        self._is_useful = copies and not is_connect(spark)

    def rows(self, level: int, subtasks: Sequence[int]) -> DataFrame:
        """A row for each of some subtasks, with its task's place, in a partition that prefers the place it had."""
        from pyspark.sql import functions as F

        last, key = self._last.get(level), (level, *subtasks)
        place_of = within_share(last, self._executors()) if last else {}
        places = [place_of.get(subtask, "") for subtask in subtasks]
        known = self._frames.get(key)
        if known is not None and known[0] == places:
            return known[1]
        frame = self._placed(places) if any(places) else self._spark.range(0, len(places), 1, len(places))
        rows = frame.select((_place() if self._is_useful else F.lit("")).alias(EXECUTOR))
        self._frames[key] = places, rows
        return rows

    def ran(self, level: int, places: Mapping[int, str]) -> None:
        """Record where subtasks ran."""
        self._last.setdefault(level, {}).update({subtask: place for subtask, place in places.items() if place})

    def _executors(self) -> int:
        """Count the present executors: they come and go with dynamic allocation."""
        return len(self._spark.sparkContext._jsc.sc().statusTracker().getExecutorInfos()) - 1  # it counts the driver

    def _placed(self, places: Sequence[str]) -> DataFrame:
        from pyspark.sql.classic.dataframe import DataFrame

        context = self._spark.sparkContext
        jvm = context._jvm
        assert jvm is not None
        seq, row = jvm.org.apache.spark.api.python.PythonUtils.toSeq, jvm.org.apache.spark.sql.Row.fromSeq
        rows = [jvm.scala.Tuple2(row(seq([place])), seq([place] if place else [])) for place in places]
        placed = context._jsc.sc().makeRDD(seq(rows), jvm.scala.reflect.ClassTag.AnyRef()).toJavaRDD()
        schema = self._spark.range(0).selectExpr("'' place")._jdf.schema()
        return DataFrame(self._spark._jsparkSession.createDataFrame(placed, schema), self._spark)


def within_share(places: Mapping[int, str], executors: int) -> dict[int, str]:
    """Return the places of subtasks, without those by which an executor would exceed its share."""
    share = math.ceil(len(places) / max(executors, 1))
    taken: Counter[str] = Counter()
    within = {}
    for subtask, place in sorted(places.items()):
        taken[place] += 1
        if taken[place] <= share:
            within[subtask] = place
    return within


def _place() -> Column:
    """Return where a task runs, as Spark writes it; empty where it runs in no executor.

    An executor's command line has its number and its host; nothing in Python tells them to a task.
    """
    from pyspark.sql import functions as F

    command = F.java_method(F.lit("java.lang.System"), F.lit("getProperty"), F.lit("sun.java.command"))
    host, number = (F.regexp_extract(command, rf"--{name} (\S+)", 1) for name in ("hostname", "executor-id"))
    return F.when(number != "", F.concat(F.lit("executor_"), host, F.lit("_"), number)).otherwise("")


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
    spread_task = F.element_at(F.split(F.lit(chosen), ","), (number * groups + F.col("group") + 1).cast("int")).cast(
        "int"
    )
    return frame.withColumn(SPREAD, F.when(F.col("lane").isin(*lanes), spread_task).otherwise(0))


def spread_of(lane: int, group: int, tasks: int) -> int:
    """Return what Spark hashes behind a lane and a group for the row to get into the group's task.

    The groups of a lane follow one another, and each lane begins one task later.
    """
    return _last_word((lane + group) % tasks, (lane, group))


def _last_word(hashed: int, words: tuple[int, ...]) -> int:
    """Return the word that makes Spark's Murmur3 hash of all of them the wanted one."""
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
