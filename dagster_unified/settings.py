"""Where settings come from, and which place is stronger. Knows files and the environment; no run, no deployment.

From the strongest: the launch (the command line's `-D`, or run configuration in Dagster), a deployment's options, the
environment, the file, the default. The first two are for one run or deployment, the last three for every run that
starts here.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dagster_unified.errors import ConfigurationError, nearest
from dagster_unified.graph.options import OPTIONS, Configuration, Layer, Option

FILE = "dagster-unified.toml"
FILE_VARIABLE = "DAGSTER_UNIFIED_CONFIG_FILE"
"""The environment variable that names the file where it is not in the working directory."""

PREFIX = "DAGSTER_UNIFIED_"


def environment_name(key: str) -> str:
    """The environment variable of an option: `execution.runtime-mode` is `DAGSTER_UNIFIED_EXECUTION_RUNTIME_MODE`."""
    return PREFIX + key.upper().replace(".", "_").replace("-", "_")


def configuration(
    definitions: Sequence[str] = (), folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> Configuration:
    """The options from all layers; `definitions` are the command line's `key=value`."""
    return Configuration([command_line(definitions), *shared_layers(folder, environment)])


def shared_layers(folder: Path | None = None, environment: Mapping[str, str] | None = None) -> list[Layer]:
    """The layers that all runs of this process share: the environment, and the file in `folder` (by default here).

    Raises `ConfigurationError` for a variable or a key that is like an option's and is none, and for a file that cannot
    be read.
    """
    environment = os.environ if environment is None else environment
    return [*_from_environment(environment), *_from_file(folder, environment)]


def command_line(definitions: Sequence[str]) -> Layer:
    """The options that the command line gives."""
    return Layer("command line", _definitions(definitions))


def places(key: str) -> str:
    """Every place where a value for `key` is looked for, strongest first."""
    return (
        f"-D {key}=… or run configuration, a deployment's options, the environment variable {environment_name(key)},"
        f" {FILE}"
    )


def _from_environment(environment: Mapping[str, str]) -> Iterator[Layer]:
    known = {environment_name(key): key for option in OPTIONS for key in _keys(option)}
    families = tuple({environment_name(key.partition(".")[0]) + "_" for key in known.values()})
    for name in sorted(environment):
        if name in known:
            yield Layer(f"environment, {name}", {known[name]: environment[name]}, shared=True)
        elif name.startswith(families) or _is_misspelled(name, known):
            raise ConfigurationError(
                f"the environment variable {name} is like an option's, but no option has that"
                f" name{nearest(name, known)}"
            )


def _is_misspelled(name: str, known: Iterable[str]) -> bool:
    """Whether a variable is nearly an option's; a program may have others of its own that begin alike."""
    if not name.startswith(PREFIX):
        return False
    return bool(
        get_close_matches(name.removeprefix(PREFIX), [option.removeprefix(PREFIX) for option in known], 1, 0.85)
    )


def _keys(option: Option) -> tuple[str, ...]:
    return (option.key, *option.other_keys)


def _from_file(folder: Path | None, environment: Mapping[str, str]) -> Iterator[Layer]:
    named = environment.get(FILE_VARIABLE)
    file = Path(named) if named else (folder or Path.cwd()) / FILE
    if not named and not file.exists():
        return
    try:
        values = dict(_flat(tomllib.loads(file.read_text())))
    except OSError as error:
        raise ConfigurationError(f"{file}, which {FILE_VARIABLE} names, cannot be read: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{file} is not TOML: {error}") from error
    yield Layer(f"file, {file.name}", values, shared=True)


def _definitions(definitions: Sequence[str]) -> dict[str, str]:
    options = {}
    for definition in definitions:
        key, equals, value = definition.partition("=")
        if not equals or not key:
            raise ConfigurationError(f"-D {definition}: expected key=value, such as -D execution.runtime-mode=BATCH")
        options[key.strip()] = value.strip()
    return options


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
