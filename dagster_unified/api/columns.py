"""`functions`: Spark's column functions, usable while a pipeline is being built, with no Spark session and no JVM.

    from dagster_unified.api import functions as F
    flights.where(F.col("dep_delay") > 15)

The names and arguments are those of `pyspark.sql.functions`; what is written is recorded and replayed there by the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dagster_unified.errors import PipelineError, nearest
from dagster_unified.graph.expressions import Column


class _Functions:
    """Records calls of `pyspark.sql.functions`."""

    def __getattr__(self, name: str) -> Callable[..., Column]:
        if name.startswith("_"):
            raise AttributeError(name)
        import pyspark.sql.functions as spark_functions

        if not hasattr(spark_functions, name):
            raise PipelineError(f"pyspark.sql.functions has no function '{name}'{nearest(name, dir(spark_functions))}")

        def record(*arguments: Any, **options: Any) -> Column:
            return Column(None, name, arguments, options)

        record.__name__ = name
        return record


functions = _Functions()
