"""Databases that SQLAlchemy has a dialect for: a sink that commits rows with the mark of who wrote, and a source."""

from dagster_unified.connectors.sql.generic.sink import DatabaseSink
from dagster_unified.connectors.sql.generic.source import DatabaseSource

__all__ = ["DatabaseSink", "DatabaseSource"]
