"""Where the command line's settings come from: command line > environment > file > default. Each value knows its origin."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dagster_unified.errors import ConfigurationError
from dagster_unified.graph.options import OPTIONS, Configuration

FILE = "dagster-unified.toml"
PREFIX = "DAGSTER_UNIFIED_"


def environment_name(key: str) -> str:
    """The environment variable of an option: `execution.runtime-mode` is `DAGSTER_UNIFIED_EXECUTION_RUNTIME_MODE`."""
    return PREFIX + key.upper().replace(".", "_").replace("-", "_")


def configuration(definitions: Sequence[str] = (), folder: Path | None = None, environment: Mapping[str, str] | None = None) -> Configuration:
    """The options from all layers; `definitions` are the command line's `key=value`."""
    environment = os.environ if environment is None else environment
    layers: list[tuple[str, Mapping[str, Any]]] = [("command line", _definitions(definitions))]
    layers += [(f"environment, {environment_name(o.key)}", {o.key: environment[environment_name(o.key)]}) for o in OPTIONS if environment_name(o.key) in environment]
    file = (folder or Path.cwd()) / FILE
    if file.exists():
        try:
            layers.append((f"file, {file.name}", dict(_flat(tomllib.loads(file.read_text())))))
        except tomllib.TOMLDecodeError as error:
            raise ConfigurationError(f"{file} is not TOML: {error}") from error
    return Configuration(layers)


def places(key: str) -> str:
    """Every place where a value for `key` is looked for, strongest first."""
    return f"-D {key}=…, the environment variable {environment_name(key)}, {FILE}"


def _definitions(definitions: Sequence[str]) -> dict[str, str]:
    found = {}
    for definition in definitions:
        key, equals, value = definition.partition("=")
        if not equals or not key:
            raise ConfigurationError(f"-D {definition}: expected key=value, such as -D execution.runtime-mode=BATCH")
        found[key.strip()] = value.strip()
    return found


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
