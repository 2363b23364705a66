"""Has a task run where it ran last: the executor that has copies of its files.

Spark takes preferred places from an RDD of the JVM only. A session through Connect has none, so that Spark chooses
there. A task waits for its place as long as `spark.locality.wait` says. Knows tasks and executors; neither rounds nor
files.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dagster_unified.connectors.sessions import is_connect
from dagster_unified.engine.iterations.worker import EXECUTOR

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_COMMAND = "java_method('java.lang.System', 'getProperty', 'sun.java.command')"
_PLACE = (
    f"concat('executor_', regexp_extract({_COMMAND}, '--hostname (\\\\S+)', 1), '_',"
    f" regexp_extract({_COMMAND}, '--executor-id (\\\\S+)', 1))"
)
"""An executor has its number and its host from its command line; nothing in Python tells them to a task."""

Subtask = tuple[int, int]
"""A level, and the number of a subtask in it."""


class Placing:
    """Where each subtask ran last."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._last: dict[Subtask, str] = {}
        self._frames: dict[tuple[str, ...], DataFrame] = {}
        self._is_possible = not is_connect(spark)

    def rows(self, subtasks: Sequence[Subtask]) -> DataFrame:
        """A row for each subtask, with its task's place, in a partition that prefers the place it had."""
        places = self._wanted(subtasks)
        if places not in self._frames:
            self._frames = {known: frame for known, frame in self._frames.items() if len(known) != len(places)}
            self._frames[places] = self._placed(places) if any(places) else self._anywhere(len(places))
        return self._frames[places]

    def ran(self, places: Mapping[Subtask, str]) -> None:
        """Tasks have run there."""
        self._last |= places

    def _wanted(self, subtasks: Sequence[Subtask]) -> tuple[str, ...]:
        """The place that each subtask had, as long as an executor does not get more than its share."""
        if not self._is_possible or not self._last:
            return ("",) * len(subtasks)
        share = math.ceil(len(subtasks) / max(self._executors(), 1))
        taken: Counter[str] = Counter()
        wanted = []
        for subtask in subtasks:
            place = self._last.get(subtask, "")
            taken[place] += 1
            wanted.append(place if taken[place] <= share else "")
        return tuple(wanted)

    def _executors(self) -> int:
        """The executors that there are now: they come and go with dynamic allocation."""
        return len(self._spark.sparkContext._jsc.sc().statusTracker().getExecutorInfos()) - 1  # it counts the driver

    def _anywhere(self, tasks: int) -> DataFrame:
        rows = self._spark.range(0, tasks, 1, tasks)
        return rows.selectExpr(f"{_PLACE} {EXECUTOR}" if self._is_possible else f"'' {EXECUTOR}")

    def _placed(self, places: Sequence[str]) -> DataFrame:
        from pyspark.sql.classic.dataframe import DataFrame

        context = self._spark.sparkContext
        jvm = context._jvm
        assert jvm is not None
        seq, row = jvm.org.apache.spark.api.python.PythonUtils.toSeq, jvm.org.apache.spark.sql.Row.fromSeq
        rows = [jvm.scala.Tuple2(row(seq([place])), seq([place] if place else [])) for place in places]
        placed = context._jsc.sc().makeRDD(seq(rows), jvm.scala.reflect.ClassTag.AnyRef()).toJavaRDD()
        schema = self._spark.range(0).selectExpr("'' place")._jdf.schema()
        frame = DataFrame(self._spark._jsparkSession.createDataFrame(placed, schema), self._spark)
        return frame.selectExpr(f"{_PLACE} {EXECUTOR}")
