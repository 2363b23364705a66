"""Stages in processes of their own, over Spark Connect."""

from __future__ import annotations

from dagster import ExecutorDefinition, multiprocess_executor

from dagster_unified.orchestration._dagster_compat import STORAGE_MODULE

_PRELOADED = [
    "dagster_unified.orchestration",
    STORAGE_MODULE,
    "deltalake",
    "matplotlib.figure",
    "pyarrow.parquet",
    "pyspark.sql.connect.functions",
    "pyspark.sql.connect.session",
]
"""What every step needs; importing it takes longer than most steps. What is not there is left out."""


def process_executor(max_concurrent: int = 2) -> ExecutorDefinition:
    """Executes each stage of a run in a process of its own, at most `max_concurrent` at once.

    Independent stages run in parallel, and one whose process dies takes no other with it. It needs a session that
    processes can share: `SparkResource(remote=…)` or `SparkResource(connect=…)`.

    It is Dagster's multiprocess executor, with processes that are forked from one which has imported the library.
    """
    return multiprocess_executor.configured(
        {"max_concurrent": max_concurrent, "start_method": {"forkserver": {"preload_modules": _PRELOADED}}}
    )
