"""Values that are looked up when a client connects, such as passwords; they never appear in text.

A value is a string, or an object with `get_value()`, such as Dagster's `EnvVar`. A whole connection is looked up by the
key of a resource, which `connected` gives it where a run begins. Knows no system and no Dagster.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

from dagster_unified.errors import ConfigurationError, PipelineError


@runtime_checkable
class HasValue(Protocol):
    """An object that looks its value up when asked."""

    def get_value(self) -> str | None:
        """The value, or None where there is none."""


Value: TypeAlias = str | HasValue

Option: TypeAlias = Value | int | float | bool
"""An option of a client; numbers stand for themselves. Dagster's `EnvVar.int` is an int as well, and looked up."""


@dataclass(frozen=True)
class Environment:
    """The value of an environment variable, looked up where it is needed: on the driver, and in the workers."""

    name: str

    def get_value(self) -> str | None:
        return os.environ.get(self.name)

    def __repr__(self) -> str:
        return f"${self.name}"


@runtime_checkable
class _GivesConnection(Protocol):
    """Something that knows how to reach a system, such as `KafkaResource`."""

    def connection(self) -> object:
        """How to reach it."""


@dataclass(frozen=True, repr=False)
class ResourceKey:
    """Stands for a connection: the resource that has this key where the pipeline runs.

    Give it to a source or a sink in the place of its connection. Under Dagster the resource is that of
    `Definitions(resources=...)`, looked up when a step begins, so that a branch deployment or a test gives another one;
    `Pipeline.execute` takes `resources=`. To load, lint and explain a pipeline takes no resource, and neither a
    fingerprint nor a savepoint knows more of it than its key. The same in both modes.

    A resource is a `KafkaResource` or a `PostgresResource`, a connection, or a text, such as the URL of a database.
    Raises `ConfigurationError` where it is missing: when the definitions load, or where a pipeline runs without them.

    Examples:
        >>> sink = PostgresSink("public.sales", ResourceKey("warehouse"), mode="upsert", key="id")
        >>> sink.describe()
        "table public.sales at postgresql at resource 'warehouse' (upsert by id)"
    """

    key: str
    resource: object = field(default=None, init=False, compare=False)
    """The connection, or the text, that it stands for; None until a run begins."""

    def __post_init__(self) -> None:
        if not isinstance(self.key, str) or not self.key.isidentifier():
            raise PipelineError(f"{self.key!r} cannot be the key of a resource; give a name, such as 'warehouse'")

    def __repr__(self) -> str:
        return f"resource '{self.key}'"

    def connected(self, resources: Mapping[str, object]) -> ResourceKey:
        """The same, with the resource that it stands for, in a form that reaches workers."""
        given = resources[self.key]
        resource = given.connection() if isinstance(given, _GivesConnection) else given
        connected = ResourceKey(self.key)
        object.__setattr__(connected, "resource", deferred(resource) if isinstance(resource, str) else resource)
        return connected

    def unfit(self, wanted: str) -> ConfigurationError:
        """The error for a resource that is something else than is needed, or that was not given yet."""
        if self.resource is None:
            return ConfigurationError(f"{self!r} is given where a pipeline runs, and nothing runs here")
        return ConfigurationError(f"{self!r} gives a {type(self.resource).__name__}; give a {wanted}")

    def get_value(self) -> str | None:
        """The value of a resource that is a text, or that looks one up."""
        if isinstance(self.resource, HasValue):
            return self.resource.get_value()
        if not isinstance(self.resource, str):
            raise self.unfit("text, such as a URL")
        return self.resource


T = TypeVar("T", bound=Option)


def deferred(value: T) -> T | Environment:
    """The value in a form that reaches workers: Dagster's `EnvVar` as an `Environment`, anything else as it is.

    Raises `PipelineError` for the key of a resource: that stands for all of a connection.
    """
    if isinstance(value, ResourceKey):
        raise PipelineError(f"{value!r} stands for all of a connection; give ResourceKey('{value.key}') in its place")
    name = getattr(value, "env_var_name", None)
    return Environment(name) if isinstance(name, str) else value


def resolved(value: Option, what: str) -> str:
    """Look the value up, as a text; raises `ConfigurationError` where there is none."""
    if not isinstance(value, HasValue):
        return str(value)
    text = value.get_value()
    if text is None:
        where = f"environment variable {value.name}" if isinstance(value, Environment) else "it"
        raise ConfigurationError(f"{what}: {where} has no value; set it where the job and its workers run")
    return text


def shown(value: Value) -> str:
    """The value for people, if it was written down; else its origin."""
    if isinstance(value, str):
        return value
    return repr(value) if isinstance(value, (Environment, ResourceKey)) else "(looked up)"


def check_is_no_url(table: object) -> None:
    """Raise `PipelineError` for a URL instead of a table, without showing it: it may hold a password."""
    scheme = re.match(r"[\w+.-]+://", table) if isinstance(table, str) else None
    if scheme is not None:
        raise PipelineError(
            f"the table comes first, and the connection after it, and the first argument is a URL, {scheme.group()}...;"
            " exchange them"
        )
