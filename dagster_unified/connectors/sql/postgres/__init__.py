"""PostgreSQL: a sink whose epochs commit in one transaction with their rows, and a source of one snapshot."""

from dagster_unified.connectors.sql.postgres.connection import PostgresConnection
from dagster_unified.connectors.sql.postgres.sink import PostgresSink
from dagster_unified.connectors.sql.postgres.source import PostgresSource

__all__ = ["PostgresConnection", "PostgresSink", "PostgresSource"]
