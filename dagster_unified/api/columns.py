"""`functions`: Spark's column functions, usable while a pipeline is being built, with no Spark session and no JVM.

    from dagster_unified.api import functions as F
    flights.where(F.col("dep_delay") > 15)

The names and arguments are those of `pyspark.sql.functions`; what is written is recorded and replayed there by the engine.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dagster_unified.errors import PipelineError, nearest
from dagster_unified.graph.expressions import Column


@cache
def _names() -> frozenset[str]:
    """The functions that the installed pyspark has, read from its source: importing it takes longer than building a pipeline."""
    found = find_spec("pyspark")
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parent / "sql" / "functions"
    defined = re.findall(r"^def ([a-zA-Z]\w*)\(", (folder / "builtin.py").read_text(), re.MULTILINE)
    exported = re.findall(r'^    "(\w+)",$', (folder / "__init__.py").read_text(), re.MULTILINE)
    return frozenset([*defined, *exported])


class _Functions:
    """Records calls of `pyspark.sql.functions`."""

    def __getattr__(self, name: str) -> Callable[..., Column]:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in _names():
            raise PipelineError(f"pyspark.sql.functions has no function '{name}'{nearest(name, _names())}")

        def record(*arguments: Any, **options: Any) -> Column:
            return Column(None, name, arguments, options)

        record.__name__ = name
        return record


functions = _Functions()
