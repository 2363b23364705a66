"""The tables that lookups read in a running query."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from dagster_unified.graph.fingerprint import digest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from upath import UPath


class LookupTables:
    """The lookup tables of the query `name` of a job, whose checkpoint directory is `folder`.

    `started` is the token of the job that started the query. Spark lists the files of a table once for a query. A
    temporary view has that list in common with the query, and by the view's name Spark lists the files again, in a
    classic session and through Connect.
    """

    def __init__(self, spark: SparkSession, folder: UPath, name: str, started: int) -> None:
        self._spark, self._folder, self._name, self._started = spark, folder, name, started
        self._views: list[str] = []
        self._goes_on = False

    def go_on_with(self, started: int) -> None:
        """The query was started by the job with that token, which has made the views."""
        self._started, self._goes_on = started, True

    def __call__(self, table: DataFrame) -> DataFrame:
        """A table whose files can be listed again."""
        from pyspark.sql import functions as F

        view = _view(self._folder, self._name, self._started, len(self._views))
        self._views.append(view)
        if self._goes_on:
            return table
        # Listing the files again also drops what is cached of the same plan: this column makes the plan another one.
        table.withColumn("__view", F.lit(view)).createOrReplaceTempView(view)
        return self._spark.table(view)

    def refresh(self) -> None:
        """List the files of the tables again, so that the next micro-batch reads new ones."""
        for view in self._views:
            self._spark.catalog.refreshTable(view)

    def drop(self) -> None:
        """Forget the tables: their query has ended."""
        if self._views:
            forget(self._spark, self._folder, self._name, self._started)
            self._views.clear()


def forget(spark: SparkSession, folder: UPath, name: str, started: int) -> None:
    """Drop what an ended query has left of its tables."""
    for number in count():
        if not spark.catalog.dropTempView(_view(folder, name, started, number)):
            return


def _view(folder: UPath, name: str, started: int, number: int) -> str:
    return f"lookup_{digest(folder, name)}_{started}_{number}"
