"""The resource that says which S3-compatible store a code location uses."""

from __future__ import annotations

from dagster import ConfigurableResource
from pydantic import Field

from dagster_unified.connectors import object_store
from dagster_unified.connectors.secrets import deferred, resolved


class ObjectStore(ConfigurableResource):  # type: ignore[type-arg]
    """The S3-compatible store of intermediates, checkpoints, savepoints and tables, for all that reads and writes them.

    Give it to `unified_definitions` once, as a resource of any name. It sets the environment of the code location's
    processes and Spark's settings for Hadoop's connector, so that sensors, runs and workers reach the store. What is
    left out is what the machine has. Dagster shows what is written here: give secrets as `EnvVar`.
    """

    endpoint: str | None = Field(
        default=None, description="The URL of a store other than Amazon's, such as https://minio.example.com."
    )
    region: str | None = Field(default=None, description="The region, such as eu-central-1.")
    key: str | None = Field(default=None, description="The access key's id.")
    secret: str | None = Field(default=None, description="The secret access key: an EnvVar.")
    token: str | None = Field(default=None, description="The token of temporary credentials: an EnvVar.")

    def use(self) -> None:
        """Let this process use the store."""
        names = ("endpoint", "region", "key", "secret", "token")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        values = {name: resolved(deferred(value), f"ObjectStore's {name}") for name, value in given.items()}
        object_store.use(object_store.Store(**values))
