"""Spark's Python daemon, with what this library's workers need already imported: workers are forked from it, so that
none imports it again.

Spark starts it as `python -m dagster_unified.engine.daemon pyspark.worker`.
"""

from pyspark import daemon

import dagster_unified.engine.streaming.worker
import dagster_unified.engine.worker  # noqa: F401

if __name__ == "__main__":
    daemon.manager()
