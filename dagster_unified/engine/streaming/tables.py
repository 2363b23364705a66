"""The tables that lookups read in a running query."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def refresh(tables: Iterable[DataFrame]) -> None:
    """List the files of the tables again, so that the next micro-batch reads new ones; Spark lists them only once."""
    for table in tables:
        plan: Any = table._jdf.queryExecution().analyzed()
        leaves = plan.collectLeaves()
        for number in range(leaves.size()):
            leaf = leaves.apply(number)
            if (
                leaf.getClass().getSimpleName() == "LogicalRelation"
                and leaf.relation().getClass().getSimpleName() == "HadoopFsRelation"
            ):
                leaf.relation().location().refresh()
