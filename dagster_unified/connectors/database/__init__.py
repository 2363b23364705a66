"""Databases that SQLAlchemy has a dialect for: a sink that commits rows with the mark of who wrote them."""

from dagster_unified.connectors.database.sink import DatabaseSink

__all__ = ["DatabaseSink"]
