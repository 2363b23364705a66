"""The tables that lookups read in a running query."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class LookupTables:
    """The tables of one query that is named `query`, among all of a session, and was started with the token `started`.

    Spark lists the files of a table once for a query. A temporary view has that list in common with the query, and by
    the view's name Spark lists the files again: also through Connect, and for a job that goes on with the query.
    """

    def __init__(self, spark: SparkSession, query: str, started: int) -> None:
        self._spark, self._query = spark, query
        self.started = started
        self._views: list[str] = []

    def __call__(self, table: DataFrame) -> DataFrame:
        """A table whose files can be listed again."""
        view = f"lookup_{self._query}_{self.started}_{len(self._views)}"
        self._views.append(view)
        if not self._spark.catalog.tableExists(view):
            table.createTempView(view)
        return self._spark.table(view)

    def refresh(self) -> None:
        """List the files of the tables again, so that the next micro-batch reads new ones."""
        for view in self._views:
            self._spark.catalog.refreshTable(view)

    def drop(self) -> None:
        """Forget the tables: their query has ended."""
        for view in self._views:
            self._spark.catalog.dropTempView(view)
        self._views.clear()
