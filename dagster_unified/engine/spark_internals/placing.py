"""Places a task in the executor where it last ran, which has copies of its files.

Spark takes preferred places from an RDD of the JVM only. A session through Connect has none, so Spark chooses there. A
task waits for its place as long as `spark.locality.wait` says. Knows tasks and executors; neither epochs nor files.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dagster_unified.connectors.sessions import is_connect
from dagster_unified.engine.iterations.worker import EXECUTOR

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


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
        kept = within_share(last, self._executors()) if last else {}
        places = [kept.get(subtask, "") for subtask in subtasks]
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
        """The executors that there are now: they come and go with dynamic allocation."""
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
    """The places of subtasks, without those by which an executor would have more than its share of them."""
    share = math.ceil(len(places) / max(executors, 1))
    taken: Counter[str] = Counter()
    kept = {}
    for subtask, place in sorted(places.items()):
        taken[place] += 1
        if taken[place] <= share:
            kept[subtask] = place
    return kept


def _place() -> Column:
    """Where a task runs, as Spark writes it; nothing where it runs in no executor.

    An executor has its number and its host from its command line; nothing in Python tells them to a task.
    """
    from pyspark.sql import functions as F

    command = F.java_method(F.lit("java.lang.System"), F.lit("getProperty"), F.lit("sun.java.command"))
    host, number = (F.regexp_extract(command, rf"--{name} (\S+)", 1) for name in ("hostname", "executor-id"))
    return F.when(number != "", F.concat(F.lit("executor_"), host, F.lit("_"), number)).otherwise("")
