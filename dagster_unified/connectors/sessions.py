"""What kind of Spark session one is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrameReader, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamReader


def is_connect(session: SparkSession | DataFrameReader | DataStreamReader) -> bool:
    """Whether a session or its reader is Spark Connect's, by its class's name: not every machine has its packages."""
    return type(session).__module__.startswith("pyspark.sql.connect")
