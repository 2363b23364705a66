"""The option keys: Flink's where Flink has the thing, with their types, defaults and what they do.

A configuration is resolved from layers (command line > environment > file > default); each value remembers where it came
from. An unknown key is an error that names the nearest known one. Knows nothing of files or of a command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dagster_unified.errors import ConfigurationError, nearest


@dataclass(frozen=True)
class Option:
    """One option: its key, what it may be, and what it does. A default of None means "follows from the mode"."""

    key: str
    kind: str
    default: Any
    description: str
    choices: tuple[str, ...] = ()
    aliases: Mapping[str, str] | None = None
    """Older spellings of the choices."""

    def parse(self, given: Any) -> Any:
        """`given`, as text or already of the right type; raises `ConfigurationError` that says what was expected."""
        try:
            return _PARSERS[self.kind](self, given)
        except (ValueError, TypeError):
            raise ConfigurationError(f"{self.key}: {given!r} is not {self.expected()}{nearest(str(given), self.choices)}") from None

    def expected(self) -> str:
        """What a value must be, in words."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        return {"bool": "true or false", "count": "a whole number of at least 1", "size": "a whole number of at least 0", "text": "a text"}[self.kind]


def _choice(option: Option, given: Any) -> str:
    wanted = str(given).upper()
    wanted = (option.aliases or {}).get(wanted, wanted)
    if wanted not in option.choices:
        raise ValueError
    return wanted


def _bool(_: Option, given: Any) -> bool:
    if isinstance(given, bool):
        return given
    return {"true": True, "false": False}[str(given).lower()] if str(given).lower() in ("true", "false") else _raise()


def _raise() -> Any:
    raise ValueError


def _number(least: int) -> Callable[[Option, Any], int]:
    def parse(_: Option, given: Any) -> int:
        number = int(given)
        return number if number >= least and not isinstance(given, (bool, float)) else _raise()

    return parse


_PARSERS: dict[str, Callable[[Option, Any], Any]] = {"choice": _choice, "bool": _bool, "count": _number(1), "size": _number(0), "text": lambda _, v: str(v)}

OPTIONS: tuple[Option, ...] = (
    Option("execution.runtime-mode", "choice", "AUTOMATIC", "BATCH, STREAMING, or AUTOMATIC: BATCH when all sources are bounded, else STREAMING (FLIP-134).", ("BATCH", "STREAMING", "AUTOMATIC")),
    Option(
        "execution.batch-shuffle-mode", "choice", "ALL_EXCHANGES_BLOCKING",
        "Which exchanges are barriers in BATCH: all but forward ones, all but pointwise ones, or none (one Spark job).",
        ("ALL_EXCHANGES_BLOCKING", "POINTWISE_EXCHANGES_PIPELINED", "ALL_EXCHANGES_PIPELINED"),
        {"ALL_EDGES_BLOCKING": "ALL_EXCHANGES_BLOCKING", "ALL_EDGES_PIPELINED": "ALL_EXCHANGES_PIPELINED", "POINTWISE_EDGES_PIPELINED": "POINTWISE_EXCHANGES_PIPELINED"},
    ),
    Option("execution.schedule-mode", "choice", None, "When regions start: EAGER (STREAMING) or LAZY_FROM_SOURCES (BATCH). Follows from the mode.", ("EAGER", "LAZY_FROM_SOURCES")),
    Option("execution.incremental-updates", "bool", None, "Whether a rolling operation emits one update per record (STREAMING) or one final result per key (BATCH). Follows from the mode."),
    Option("execution.checkpointing.interval", "text", None, "How often a STREAMING job takes a checkpoint. BATCH has no checkpoints, and refuses this."),
    Option("pipeline.processing-time.allow", "choice", "ALLOW", "What registering a processing-time timer does (FLIP-134): ALLOW, IGNORE or FAIL.", ("ALLOW", "IGNORE", "FAIL")),
    Option("pipeline.processing-time.end-of-input", "choice", "FIRE_AND_QUIESCE", "What happens to pending processing-time timers at the end of input (FLIP-134).", ("FIRE_AND_QUIESCE", "IGNORE")),
    Option("pipeline.event-time.end-of-input-chain", "size", 16, "How many generations of timers, each registered by the one before, are followed past the input's last event time."),
    Option("pipeline.operator-chaining.enabled", "bool", True, "Whether operators joined by forward exchanges run in one task."),
    Option("parallelism.default", "count", None, "Partitions of an exchange, where an operator does not say. Unset, Spark decides."),
)  # fmt: skip

BY_KEY: dict[str, Option] = {o.key: o for o in OPTIONS}


@dataclass(frozen=True)
class Setting:
    """A value and the layer that gave it."""

    value: Any
    origin: str


class Configuration:
    """All options with their values. `layers` are (origin, values) pairs, the strongest first."""

    def __init__(self, layers: Sequence[tuple[str, Mapping[str, Any]]] = ()) -> None:
        self._settings = {o.key: Setting(o.default, "default") for o in OPTIONS}
        for origin, values in reversed(layers):
            for key, given in values.items():
                if given is not None:
                    self._settings[key] = Setting(option(key).parse(given), origin)

    @staticmethod
    def of(values: Mapping[str, Any] | None = None) -> Configuration:
        """A configuration with these values set, as if at launch."""
        return Configuration([("launch", values or {})])

    def __getitem__(self, key: str) -> Any:
        return self._settings[key].value

    def origin(self, key: str) -> str:
        """Which layer gave a value."""
        return self._settings[key].origin

    def is_set(self, key: str) -> bool:
        """Whether any layer gave a value."""
        return self._settings[key].origin != "default"

    def items(self) -> list[tuple[str, Setting]]:
        """All options, in their order."""
        return list(self._settings.items())


def option(key: str) -> Option:
    """The option with this key; raises `ConfigurationError` naming the nearest one."""
    found = BY_KEY.get(key)
    if found is None:
        raise ConfigurationError(f"unknown option '{key}'{nearest(key, BY_KEY)}")
    return found
