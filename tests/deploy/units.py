"""Reads systemd's units as far as those in `deploy/machines` go."""

import re
import shlex
from configparser import RawConfigParser
from pathlib import Path

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = sorted((DEPLOY / "machines").glob("*.service"))


class _Repeatable(dict):
    """Options that may be given more than once, one value after the other."""

    def __setitem__(self, key, value):
        if isinstance(value, list) and key in self:
            value = self[key] + value
        super().__setitem__(key, value)


def service(unit):
    """The options of a unit's service, each with all its values."""
    found = RawConfigParser(strict=False, dict_type=_Repeatable, interpolation=None)
    found.optionxform = str
    found.read(unit)
    return {name: value.splitlines() for name, value in found["Service"].items()}


def commands(unit, environment):
    """What a unit starts, with the variables that it names: first what has to end before the service."""
    found = service(unit)
    lines = [*found.get("ExecStartPre", []), *found["ExecStart"]]
    return [shlex.split(re.sub(r"\$\{(\w+)\}", lambda found: environment[found[1]], line)) for line in lines]


def variables(file):
    """The variables of an environment file."""
    lines = (line.partition("=") for line in file.read_text().splitlines() if line and not line.startswith("#"))
    return {name: value for name, _, value in lines}
