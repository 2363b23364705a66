"""The option keys: Flink's where Flink has the thing, with their types, defaults and what they do.

A configuration is resolved from layers, the strongest first; each value remembers which layer gave it. An unknown key
is an error that names the nearest known one. Knows nothing of files, of the environment or of a command line
(`settings.py` does).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any, NamedTuple

from dagster_unified.errors import ConfigurationError, PipelineError, nearest
from dagster_unified.operators.time import checked_span, to_span


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

    other_keys: tuple[str, ...] = ()
    """Older spellings of the key."""

    least: Any = None
    """The smallest value of a number or a duration, where that is not its kind's."""

    most: Any = None
    """The largest value, where there is one."""

    def parse(self, value: Any) -> Any:
        """`value`, as text or already of the right type; raises `ConfigurationError` that says what was expected."""
        try:
            parsed = _PARSERS[self.kind](self, value)
            if (self.least is not None and parsed < self.least) or (self.most is not None and parsed > self.most):
                raise ValueError
            return parsed
        except (ValueError, TypeError):
            raise ConfigurationError(
                f"{self.key}: {value!r} is not {self.expected()}{nearest(str(value), self.choices)}"
            ) from None

    def expected(self) -> str:
        """Describe the values that it takes."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        what, least = {
            "bool": ("true or false", None),
            "count": ("a whole number", 1),
            "size": ("a whole number", 0),
            "text": ("a text that is not empty", None),
            "factor": ("a number", 0),
            "duration": ("a duration such as 10 s, 500 ms or 2 min", None),
        }[self.kind]
        smallest = least if self.least is None else written(self.least)
        if self.most is not None:
            return f"{what} from {smallest} to {written(self.most)}"
        return what if smallest is None else f"{what}{',' if self.kind == 'duration' else ''} of at least {smallest}"


def _choice(option: Option, value: Any) -> str:
    wanted = str(value).upper()
    wanted = (option.aliases or {}).get(wanted, wanted)
    if wanted not in option.choices:
        raise ValueError
    return wanted


def _bool(_: Option, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    return {"true": True, "false": False}[str(value).lower()] if str(value).lower() in ("true", "false") else _raise()


def _raise() -> Any:
    raise ValueError


def _number(least: int) -> Callable[[Option, Any], int]:
    def parse(_: Option, value: Any) -> int:
        number = int(value)
        return number if number >= least and not isinstance(value, (bool, float)) else _raise()

    return parse


_UNITS = {"ms": 1, "s": 1000, "sec": 1000, "min": 60_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|sec|min|m|h|d)")


def _duration(option: Option, value: Any) -> timedelta:
    if isinstance(value, timedelta):
        length = value
    else:
        written_as = _DURATION.fullmatch(str(value).strip().lower()) or _raise()
        length = _exact(Decimal(written_as.group(1)) * _UNITS[written_as.group(2)])
    if length < timedelta(0):
        raise ValueError
    try:
        checked_span(option.key, length)
    except PipelineError as error:
        raise ConfigurationError(str(error)) from None
    return length


def _exact(millis: Decimal) -> timedelta:
    """Return a length of time, with a part of a millisecond where one was given."""
    whole, rest = divmod(millis, 1)
    try:
        return timedelta(milliseconds=int(whole), microseconds=bool(rest))
    except OverflowError:
        raise ValueError from None


def _factor(_: Option, value: Any) -> float:
    number = float(value)
    return number if 0 <= number < math.inf and not isinstance(value, bool) else _raise()


def _text(_: Option, value: Any) -> str:
    text = str(value)
    return text if text.strip() else _raise()


_PARSERS: dict[str, Callable[[Option, Any], Any]] = {
    "choice": _choice,
    "bool": _bool,
    "count": _number(1),
    "size": _number(0),
    "text": _text,
    "duration": _duration,
    "factor": _factor,
}

OPTIONS: tuple[Option, ...] = (
    Option(
        "execution.runtime-mode",
        "choice",
        "AUTOMATIC",
        "BATCH, STREAMING, or AUTOMATIC: BATCH when all sources are bounded, else STREAMING (FLIP-134).",
        ("BATCH", "STREAMING", "AUTOMATIC"),
    ),
    Option(
        "execution.batch-shuffle-mode",
        "choice",
        "ALL_EXCHANGES_BLOCKING",
        "Which edges between tasks are barriers in BATCH: all (ALL_EDGES_BLOCKING), all but forward ones"
        " (ALL_EXCHANGES_BLOCKING), all but pointwise ones, or none (one Spark job).",
        ("ALL_EDGES_BLOCKING", "ALL_EXCHANGES_BLOCKING", "POINTWISE_EXCHANGES_PIPELINED", "ALL_EXCHANGES_PIPELINED"),
        {
            "ALL_EDGES_PIPELINED": "ALL_EXCHANGES_PIPELINED",
            "POINTWISE_EDGES_PIPELINED": "POINTWISE_EXCHANGES_PIPELINED",
            "FORWARD_EDGES_PIPELINED": "ALL_EXCHANGES_BLOCKING",
        },
        ("execution.shuffle-mode",),
    ),
    Option(
        "execution.batch.partitions-per-job",
        "count",
        32,
        "Of a range of partitions that one run is for, how many a stage's Spark job runs; a failure costs as many.",
    ),
    Option(
        "execution.schedule-mode",
        "choice",
        None,
        "When regions start: EAGER (STREAMING) or LAZY_FROM_SOURCES (BATCH). Follows from the mode.",
        ("EAGER", "LAZY_FROM_SOURCES"),
    ),
    Option(
        "execution.incremental-updates",
        "bool",
        None,
        "Whether a rolling operation emits one update per record (STREAMING) or one final result per key (BATCH)."
        " Follows from the mode.",
    ),
    Option(
        "execution.checkpointing.interval",
        "duration",
        None,
        "How often a STREAMING job takes a checkpoint, which is when it commits an epoch; unset, as soon as there is"
        " input. BATCH has no checkpoints, and refuses this.",
    ),
    Option(
        "execution.checkpointing.dir",
        "text",
        ".dagster_unified/checkpoints",
        "Where STREAMING jobs keep state and progress: a folder, or a URL such as s3://bucket/folder.",
    ),
    Option("execution.checkpointing.num-retained", "count", 10, "How many micro-batches' checkpoints STREAMING keeps."),
    Option(
        "execution.savepoint.path",
        "text",
        None,
        "Where a run over bounded input leaves its state, as a savepoint, at the end of its data. The end of the data"
        " is then not the end of the input: open windows and pending timers are in the savepoint.",
    ),
    Option(
        "execution.savepoint.interval",
        "duration",
        None,
        "How often a STREAMING job takes a savepoint by itself, while it goes on; unset, never. BATCH refuses this: it"
        " leaves its state at the end of its data.",
        least=timedelta(milliseconds=1),
    ),
    Option(
        "execution.savepoint.retained",
        "count",
        2,
        "How many of the savepoints that the interval made are kept. All others stay until somebody removes them.",
    ),
    Option(
        "execution.state-recovery.path",
        "text",
        None,
        "The savepoint that a run starts from, of either mode. A STREAMING job takes it where it has no state yet.",
    ),
    Option(
        "execution.savepoint.ignore-unclaimed-state",
        "bool",
        False,
        "Whether state in a savepoint that no operator's uid claims is dropped; by default it is an error.",
        other_keys=("execution.state-recovery.ignore-unclaimed-state",),
    ),
    Option(
        "state.backend.type",
        "choice",
        "ROCKSDB",
        "What keeps a STREAMING job's state on the workers: ROCKSDB or HASHMAP.",
        ("ROCKSDB", "HASHMAP"),
    ),
    Option(
        "state.native-aggregates",
        "choice",
        "AUTOMATIC",
        "What keeps the state of aggregates on columns (agg) in STREAMING: SPARK, in Catalyst's own form, or PORTABLE,"
        " for local-global aggregation with state in key groups, so that it is in savepoints of both modes and keyed"
        " operators may follow. AUTOMATIC: PORTABLE where one of these is asked for, else SPARK. In BATCH it is"
        " PORTABLE where a run starts from a savepoint or leaves one; partitions with carry_state hand it on in that"
        " form then, with PORTABLE always, and session windows unless it is SPARK.",
        ("AUTOMATIC", "PORTABLE", "SPARK"),
    ),
    Option(
        "pipeline.max-parallelism",
        "count",
        128,
        "The number of key groups of a STREAMING job. Fixed in its checkpoint.",
        most=1 << 15,  # Flink's bound
    ),
    Option(
        "iteration.max-feedback-records",
        "count",
        1_000_000,
        "How many records may circulate in an unbounded iteration while it takes new input. With more of them a"
        " STREAMING job reads nothing until there are fewer. It ends with an error where they become ten times as many,"
        " and more in each of ten epochs in a row.",
    ),
    Option(
        "restart-strategy.type",
        "choice",
        "EXPONENTIAL-DELAY",
        "Whether and when a job is started again after an error that may pass. In BATCH it counts where it is set for"
        " the run, and for each stage; else stages are tried again as `retry_policy` says.",
        ("NONE", "FIXED-DELAY", "EXPONENTIAL-DELAY", "FAILURE-RATE"),
        {
            "OFF": "NONE",
            "DISABLE": "NONE",
            "FIXEDDELAY": "FIXED-DELAY",
            "EXPONENTIALDELAY": "EXPONENTIAL-DELAY",
            "FAILURERATE": "FAILURE-RATE",
        },
    ),
    Option("restart-strategy.fixed-delay.attempts", "count", 3, "How often in all FIXED-DELAY starts again."),
    Option("restart-strategy.fixed-delay.delay", "duration", timedelta(seconds=10), "How long FIXED-DELAY waits."),
    Option(
        "restart-strategy.exponential-delay.initial-backoff",
        "duration",
        timedelta(seconds=1),
        "How long EXPONENTIAL-DELAY waits at first.",
        least=timedelta(milliseconds=1),
    ),
    Option(
        "restart-strategy.exponential-delay.max-backoff", "duration", timedelta(minutes=1), "How long it waits at most."
    ),
    Option(
        "restart-strategy.exponential-delay.backoff-multiplier",
        "factor",
        1.5,
        "By how much each wait is longer than the one before.",
        least=1.0,
    ),
    Option(
        "restart-strategy.exponential-delay.reset-backoff-threshold",
        "duration",
        timedelta(hours=1),
        "After running so long without a failure, the first wait counts again.",
    ),
    Option(
        "restart-strategy.exponential-delay.jitter-factor",
        "factor",
        0.1,
        "The part of a wait by which it varies, so that jobs do not start all at once.",
        most=1.0,
    ),
    Option(
        "restart-strategy.failure-rate.max-failures-per-interval",
        "count",
        1,
        "How many failures FAILURE-RATE bears in an interval.",
    ),
    Option(
        "restart-strategy.failure-rate.failure-rate-interval",
        "duration",
        timedelta(minutes=1),
        "The interval in which FAILURE-RATE counts.",
        least=timedelta(milliseconds=1),
    ),
    Option("restart-strategy.failure-rate.delay", "duration", timedelta(seconds=1), "How long FAILURE-RATE waits."),
    Option(
        "pipeline.processing-time.allow",
        "choice",
        "ALLOW",
        "What a function may do with processing time (FLIP-134): ALLOW, IGNORE (timers are not registered) or FAIL"
        " (reading it or registering a timer is an error).",
        ("ALLOW", "IGNORE", "FAIL"),
    ),
    Option(
        "pipeline.processing-time.end-of-input",
        "choice",
        "FIRE_AND_QUIESCE",
        "What happens to pending processing-time timers at the end of input (FLIP-134).",
        ("FIRE_AND_QUIESCE", "IGNORE"),
    ),
    Option(
        "pipeline.auto-watermark-interval",
        "duration",
        timedelta(seconds=1),
        "How often STREAMING asks a watermark generator for its periodic watermark while no records come; 0 s, never."
        " It is asked at the end of each micro-batch in any case.",
    ),
    Option(
        "pipeline.event-time.end-of-input-chain",
        "size",
        16,
        "How many generations of timers, each registered by the one before, are followed past the input's last event"
        " time.",
    ),
    Option(
        "pipeline.operator-chaining.enabled",
        "bool",
        True,
        "Whether operators joined by forward exchanges run in one task.",
    ),
    Option(
        "pipeline.object-reuse",
        "bool",
        False,
        "Whether an operator is given the very records that others emitted. Faster where records can change (lists,"
        " dicts, classes that are not frozen), and only right where no function changes one.",
    ),
    Option(
        "execution.lowering",
        "choice",
        "AUTO",
        "Whether functions whose source says what they compute run as operations on columns, with the same results"
        " (AUTO), or all are called for each record (OFF). `explain` says which are, and why others are not.",
        ("AUTO", "OFF"),
    ),
    Option(
        "parallelism.default",
        "count",
        None,
        "How many tasks an exchange has, where an operator does not say. Unset, spark.sql.shuffle.partitions,"
        " which is two for each core where you do not set it. A STREAMING job keeps that of its checkpoint.",
    ),
)

BY_KEY: dict[str, Option] = {o.key: o for o in OPTIONS}

_OTHER_KEYS: dict[str, Option] = {key: o for o in OPTIONS for key in o.other_keys}


@dataclass(frozen=True)
class Setting:
    """A value and the layer that gave it."""

    value: Any
    layer: Layer

    @property
    def origin(self) -> str:
        """The name of the layer."""
        return self.layer.origin


class Layer(NamedTuple):
    """Values that one place gives. A `shared` place, such as the environment, gives them to runs of both modes."""

    origin: str
    values: Mapping[str, Any]
    shared: bool = False


_DEFAULTS = Layer("default", {o.key: o.default for o in OPTIONS}, shared=True)


class Configuration:
    """All options with their values, from `layers`, the strongest first."""

    def __init__(self, layers: Sequence[Layer] = ()) -> None:
        self._settings = {o.key: Setting(o.default, _DEFAULTS) for o in OPTIONS}
        for layer in reversed(layers):
            self._settings |= _set_by(layer)

    @staticmethod
    def of(values: Mapping[str, Any] | None = None) -> Configuration:
        """Return a configuration with these values set, as if at launch."""
        return Configuration([Layer("launch", values or {})])

    def under(self, layer: Layer) -> Configuration:
        """Return the same below a layer that is stronger than all of these."""
        changed = Configuration()
        changed._settings = {**self._settings, **_set_by(layer)}
        return changed

    def __getitem__(self, key: str) -> Any:
        return self._settings[option(key).key].value

    def origin(self, key: str) -> str:
        """Which layer gave a value."""
        return self._settings[option(key).key].origin

    def asked(self, key: str) -> bool:
        """Return whether a value was given for this very run or deployment.

        A layer that runs of both modes share does not count.
        """
        return not self._settings[option(key).key].layer.shared

    def items(self) -> list[tuple[str, Setting]]:
        """Return all options, in their order."""
        return list(self._settings.items())


def _set_by(layer: Layer) -> dict[str, Setting]:
    """The options that a layer sets."""
    settings: dict[str, Setting] = {}
    spelled: dict[str, str] = {}
    for key, value in layer.values.items():
        if value is None:
            continue
        known = option(key)
        other = spelled.setdefault(known.key, key)
        if other != key:
            raise ConfigurationError(f"{layer.origin}: {other} and {key} are two names of one option; give one of them")
        settings[known.key] = Setting(_parsed(known, value, layer), layer)
    return settings


def _parsed(known: Option, value: Any, layer: Layer) -> Any:
    try:
        return known.parse(value)
    except ConfigurationError as error:
        if not layer.shared:
            raise
        raise ConfigurationError(f"{layer.origin}: {error}") from None  # nobody has written it for this run


def written(value: Any) -> str:
    """Return a value as it is written in configuration."""
    if isinstance(value, timedelta):
        return f"{to_span(value)} ms"
    return str(value).lower() if isinstance(value, bool) else str(value)


def option(key: str) -> Option:
    """Return the option with this key, or with this older spelling of it.

    Raises `ConfigurationError`, which names the nearest one.
    """
    known = BY_KEY.get(key) or _OTHER_KEYS.get(key)
    if known is None:
        raise ConfigurationError(f"unknown option '{key}'{nearest(key, BY_KEY)}")
    return known
