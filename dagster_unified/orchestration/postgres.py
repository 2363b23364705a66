"""A PostgreSQL server as a Dagster resource, shared by pipelines and the other assets of a code location."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Optional

from dagster import ConfigurableResource
from pydantic import Field

from dagster_unified.connectors.postgres.connection import PostgresConnection

if TYPE_CHECKING:
    import psycopg


class PostgresResource(ConfigurableResource):  # type: ignore[type-arg]
    """How to reach a PostgreSQL server. Give it to `PostgresSink` and `PostgresSource`, and to assets of your own.

    A field may be an `EnvVar`, which is looked up where a client connects.

    Examples:
        >>> from dagster import EnvVar
        >>> warehouse = PostgresResource(host="db.example", database="sales", password=EnvVar("DATABASE_PASSWORD"))
        >>> warehouse.connection()
        PostgresConnection(postgresql://db.example:5432/sales)
    """

    host: str = Field(default="localhost", description="The server's name or address.")
    port: int = Field(default=5432, description="The server's port.")
    database: Optional[str] = Field(default=None, description="The database.")
    user: Optional[str] = Field(default=None, description="The user to connect as.")
    password: Optional[str] = Field(default=None, description="The user's password; an EnvVar keeps it out of code.")
    options: dict[str, str] = Field(default={}, description="Further parameters of libpq, such as sslmode.")

    def connection(self) -> PostgresConnection:
        """The same for sinks and sources."""
        return PostgresConnection(
            host=self.host,
            port=self.port,
            database=self.database,
            user=self.user,
            password=self.password,
            options=self.options,
        )

    @contextmanager
    def get_connection(self) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
        """A psycopg connection, for an asset; committed at the end of the block, or rolled back after an error."""
        with self.connection().connect("resource") as connected:
            yield connected
