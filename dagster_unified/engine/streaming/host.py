"""What the process that runs a query's epochs has for them: the job's, or through Spark Connect the server's.

Knows neither queries nor epochs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_unified.engine.events import Observer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class Host:
    """The session, and what epochs ask and tell the job."""

    spark: SparkSession
    check: Callable[[], None]
    """Raises where the job may not write any more."""

    observe: Observer
    stopping: Callable[[], bool]
    """Whether the job is being stopped, so that an epoch is to close soon."""
