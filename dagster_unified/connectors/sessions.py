"""What kind of Spark session one is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def is_connect(session: SparkSession) -> bool:
    """Whether a session is Spark Connect's, by its class's name: not every machine has Connect's packages."""
    return type(session).__module__.startswith("pyspark.sql.connect")
