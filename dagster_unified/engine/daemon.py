"""Spark's Python daemon, which imports this library once for all workers that it forks.

Spark starts it as `python -m dagster_unified.engine.daemon pyspark.worker`.
"""

from pyspark import daemon

import dagster_unified.engine.streaming.processor
import dagster_unified.engine.streaming.worker
import dagster_unified.engine.worker  # noqa: F401

if __name__ == "__main__":
    daemon.manager()
