"""What a docstring calls a parameter is one: names in backticks are held against what there is."""

import builtins
import importlib
import inspect
import pkgutil
import re

from dagster_unified import api, connectors
from dagster_unified.connectors import protocol

_NAME = re.compile(r"`([a-z_][a-z0-9_]*)(?:=[^`]*)?`")

_WORDS = {
    "append",
    "overwrite",
    "upsert",
    "text",
    "mermaid",
    "json",
    "kafka",
    "date",
    "a",
    "_",
    "__ts",
    "window_start",
    "window_end",
    "session_window",
    "on_timer",
    "records",
    "create_accumulator",
    "timedelta",
}
"""Values, columns, and methods of a user's function."""


def public():
    for package in (api, connectors, protocol):
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(found.name)
            for name, value in vars(module).items():
                if (
                    not name.startswith("_")
                    and getattr(value, "__module__", None) == module.__name__
                    and (inspect.isclass(value) or inspect.isfunction(value))
                ):
                    yield value


def methods(thing):
    found = (
        [getattr(m, "__func__", m) for name, m in vars(thing).items() if not name.startswith("_")]
        if inspect.isclass(thing)
        else []
    )
    return [m for m in found if inspect.isfunction(m)]


def parameters(thing):
    try:
        return set(inspect.signature(thing).parameters)
    except (TypeError, ValueError):
        return set()


def test_names_in_backticks_are_parameters_or_public_names():
    things = list(public())
    known = (
        {name for thing in things if inspect.isclass(thing) for name in dir(thing)}
        | {thing.__name__ for thing in things}
        | set(dir(builtins))
        | set(api.__all__)
        | _WORDS
    )
    unknown = {}
    for thing in things:
        own = parameters(thing).union(*map(parameters, methods(thing)))
        for documented in (thing, *methods(thing)):
            odd = set(_NAME.findall(inspect.getdoc(documented) or "")) - known - own
            if odd:
                unknown[f"{documented.__module__}.{documented.__qualname__}"] = sorted(odd)
    assert unknown == {}
