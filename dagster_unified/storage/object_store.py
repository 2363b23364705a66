"""The S3-compatible store of a process and its Spark session: stated once, and known to every client by it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dagster_unified.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import DataFrameReader, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamReader


@dataclass(frozen=True)
class Store:
    """Where a store is, and its credentials; a value that is None is the machine's own."""

    endpoint: str | None = None
    region: str | None = None
    key: str | None = field(default=None, repr=False)
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if (self.key is None) != (self.secret is None):
            present, missing = ("secret", "key") if self.key is None else ("key", "secret")
            raise ConfigurationError(
                f"the object store at {self.endpoint or 'Amazon'} has a {present} and no {missing}; give both, or"
                " neither where the machine has credentials"
            )

    def environment(self) -> dict[str, str]:
        """The variables of a process that uses the store."""
        plain_http = None if self.endpoint is None or not self.endpoint.startswith("http://") else "true"
        variables = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_SESSION_TOKEN": self.token,
            "AWS_ALLOW_HTTP": plain_http,
        }
        return {name: value for name, value in variables.items() if value is not None}

    def settings(self) -> dict[str, str]:
        """Spark's settings for Hadoop's connector, without any secret."""
        options = {"endpoint": self.endpoint, "endpoint.region": self.region}
        # Hadoop's other kind of stream fails a task or a job whose read is cut off
        options["input.stream.type"] = "classic"
        # a folder is made, and a file removed, without a look at all the folders above
        options["performance.flags"] = "mkdir,delete"
        settings = {f"spark.hadoop.fs.s3a.{name}": value for name, value in options.items() if value is not None}
        if self.endpoint is not None:
            settings["spark.hadoop.fs.s3a.path.style.access"] = "true"
        return settings

    def executor_environment(self) -> dict[str, str]:
        """Spark's settings that pass the environment to executors on other machines; Spark hides them in its UI.

        They must not be on a command line.
        """
        hidden = {"spark.redaction.regex": "(?i)secret|password|token|access[._]?key"}
        return {**hidden, **{f"spark.executorEnv.{name}": value for name, value in self.environment().items()}}


TOKENS = ("AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN")
"""The names under which clients look for a token."""

_in_use: list[Store] = []


def in_use() -> Store | None:
    """The store of this process, if one was given."""
    return _in_use[0] if _in_use else None


def use(store: Store) -> None:
    """Make all clients of this process use a store; raises `ConfigurationError` where they use another one."""
    if _in_use and _in_use[0] != store:
        raise ConfigurationError(
            f"this process uses the object store at {_in_use[0].endpoint or 'Amazon'}, and a resource names another one"
            f" or other credentials, at {store.endpoint or 'Amazon'}; give one ObjectStore to all definitions of a code"
            " location"
        )
    _in_use[:] = [store]
    if store.key is not None:
        for name in TOKENS:  # a token of the machine's own belongs to another key
            os.environ.pop(name, None)
    os.environ.update(store.environment())


def is_connect(session: SparkSession | DataFrameReader | DataStreamReader) -> bool:
    """Whether a session or its reader is Spark Connect's, by its class's name: not every machine has its packages."""
    return type(session).__module__.startswith("pyspark.sql.connect")
