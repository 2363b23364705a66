"""Values that are looked up when a client connects, such as passwords; they never appear in text.

A value is a string, or an object with `get_value()`, such as Dagster's `EnvVar`. Knows no system and no Dagster.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
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


T = TypeVar("T", bound=Option)


def deferred(value: T) -> T | Environment:
    """The value in a form that reaches workers: Dagster's `EnvVar` as an `Environment`, anything else as it is."""
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
    return repr(value) if isinstance(value, Environment) else "(looked up)"


def check_is_no_url(table: object) -> None:
    """Raise `PipelineError` for a URL instead of a table, without showing it: it may hold a password."""
    scheme = re.match(r"[\w+.-]+://", table) if isinstance(table, str) else None
    if scheme is not None:
        raise PipelineError(
            f"the table comes first, and the connection after it, and the first argument is a URL, {scheme.group()}...;"
            " exchange them"
        )
