"""Boundedness and runtime mode, and the options that follow from the mode (FLIP-134).

A pipeline is bounded when all its sources are. The mode is set at launch, never in the program.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from dagster_unified.errors import ConfigurationError, PipelineError
from dagster_unified.graph.connectors import Boundedness
from dagster_unified.graph.nodes import Graph
from dagster_unified.graph.options import Configuration, written

_RESTARTS = "restart-strategy."


@dataclass(frozen=True)
class Streaming:
    """The options that only a STREAMING job has a use for.

    `interval` is None where an epoch begins as soon as there is input.
    """

    interval: timedelta | None
    directory: str
    retained: int
    backend: str
    max_parallelism: int
    watermark_interval: timedelta
    max_feedback: int
    """How many records may circulate in an unbounded iteration while it takes new input."""

    event_time_unit: int | None = None
    """The milliseconds of the units in which records are counted by event time, where a deployment asks for it."""


@dataclass(frozen=True)
class Savepoint:
    """Where and when a run leaves its state, and whether it drops what no operator claims of the one it starts from.

    `interval` is None where a STREAMING job takes no savepoints by itself; `retained` is how many of them it keeps.
    """

    path: str | None
    ignore_unclaimed: bool
    interval: timedelta | None
    retained: int


@dataclass(frozen=True)
class Execution:
    """The resolved mode, and every option that depends on it."""

    mode: str
    boundedness: Boundedness
    schedule_mode: str
    shuffle_mode: str
    incremental_updates: bool
    processing_time: str
    processing_time_at_end: str
    end_of_input_chain: int
    chaining: bool
    object_reuse: bool
    parallelism: int | None
    goes_on: bool
    """Whether the end of the data is not the end of the input: the run leaves its state in a savepoint."""

    starts_from: str | None
    """The savepoint that it starts from."""

    lowers: bool = field(repr=False)
    """Whether functions that can be read run as operations on columns, which changes no result."""

    savepoint: Savepoint = field(repr=False)
    streaming: Streaming = field(repr=False)
    native_aggregates: str = field(repr=False)
    """These three are not part of what identifies a stage's result, beyond the graph that follows from them."""

    @property
    def has_savepoint(self) -> bool:
        """Whether the run starts from a savepoint, or leaves one."""
        return self.goes_on or self.starts_from is not None


def boundedness(graph: Graph) -> Boundedness:
    """Bounded when all sources are."""
    unbounded = any(s.source.boundedness is Boundedness.UNBOUNDED for s in graph.sources)
    return Boundedness.UNBOUNDED if unbounded else Boundedness.BOUNDED


def resolve(graph: Graph, configuration: Configuration) -> Execution:
    """Return the mode and what follows from it; raises when the configuration contradicts the graph or the mode."""
    bound = boundedness(graph)
    mode = configuration["execution.runtime-mode"]
    if mode == "AUTOMATIC":
        mode = "BATCH" if bound is Boundedness.BOUNDED else "STREAMING"
    if mode == "BATCH":
        for node in graph.sources:
            if node.source.boundedness is Boundedness.UNBOUNDED:
                raise PipelineError(
                    f"{graph.name}: source '{node.name}' is unbounded, and BATCH needs bounded sources; "
                    "read it from a bounded source, or launch with execution.runtime-mode=STREAMING"
                )
        if configuration.asked("execution.checkpointing.interval"):
            raise ConfigurationError(
                f"{graph.name}: execution.checkpointing.interval is set, and BATCH takes no checkpoints: a failed stage"
                " restarts from the materialized output of the stages before it; remove the option, or launch with"
                " execution.runtime-mode=STREAMING"
            )
        if configuration.asked("execution.savepoint.interval"):
            raise ConfigurationError(
                f"{graph.name}: execution.savepoint.interval is set, and BATCH leaves its state at the end of its data;"
                " set execution.savepoint.path instead, or launch with execution.runtime-mode=STREAMING"
            )
    else:
        for reader in graph.readers:
            if reader.source.only_in_batch:
                raise PipelineError(
                    f"{graph.name}: source '{reader.reads}' ({reader.source.describe()}):"
                    f" {reader.source.only_in_batch}, or launch with execution.runtime-mode=BATCH"
                )
    delay = f"{_RESTARTS}exponential-delay."
    first, longest = configuration[f"{delay}initial-backoff"], configuration[f"{delay}max-backoff"]
    if first > longest:
        raise ConfigurationError(
            f"{graph.name}: {delay}initial-backoff is {written(first)}, and {delay}max-backoff {written(longest)}; the"
            " first wait cannot be longer than the longest"
        )
    if (
        mode == "STREAMING"
        and configuration["execution.batch-shuffle-mode"] != "ALL_EXCHANGES_PIPELINED"
        and configuration.asked("execution.batch-shuffle-mode")
    ):
        raise ConfigurationError(
            f"{graph.name}: execution.batch-shuffle-mode={configuration['execution.batch-shuffle-mode']} cannot be"
            " honoured in STREAMING, where every exchange is pipelined; remove the option, or launch with"
            " execution.runtime-mode=BATCH"
        )
    expected = "EAGER" if mode == "STREAMING" else "LAZY_FROM_SOURCES"
    schedule = configuration["execution.schedule-mode"] or expected
    if schedule != expected and configuration.asked("execution.schedule-mode"):
        raise ConfigurationError(
            f"{graph.name}: execution.schedule-mode={schedule} cannot be honoured in {mode}, which schedules"
            f" {expected}; remove the option"
        )
    updates = configuration["execution.incremental-updates"]
    native = next((n for n in graph.nodes if n.native and n.emits_updates), None)
    if mode == "BATCH" and updates and native is not None:
        raise ConfigurationError(
            f"{graph.name}: execution.incremental-updates=true cannot be honoured in BATCH by '{native.name}', which"
            " Catalyst runs and which gives one row per key; remove the option, or use reduce"
        )
    return Execution(
        mode=mode,
        boundedness=bound,
        schedule_mode=expected,
        shuffle_mode=(
            "ALL_EXCHANGES_PIPELINED" if mode == "STREAMING" else configuration["execution.batch-shuffle-mode"]
        ),
        incremental_updates=(mode == "STREAMING") if updates is None else updates,
        processing_time=configuration["pipeline.processing-time.allow"],
        processing_time_at_end=configuration["pipeline.processing-time.end-of-input"],
        end_of_input_chain=configuration["pipeline.event-time.end-of-input-chain"],
        chaining=configuration["pipeline.operator-chaining.enabled"],
        object_reuse=configuration["pipeline.object-reuse"],
        parallelism=configuration["parallelism.default"],
        goes_on=configuration["execution.savepoint.path"] is not None,
        starts_from=configuration["execution.state-recovery.path"],
        lowers=configuration["execution.lowering"] == "AUTO",
        savepoint=Savepoint(
            path=configuration["execution.savepoint.path"],
            ignore_unclaimed=configuration["execution.savepoint.ignore-unclaimed-state"],
            interval=configuration["execution.savepoint.interval"],
            retained=configuration["execution.savepoint.retained"],
        ),
        streaming=Streaming(
            interval=configuration["execution.checkpointing.interval"],
            directory=configuration["execution.checkpointing.dir"],
            retained=configuration["execution.checkpointing.num-retained"],
            backend=configuration["state.backend.type"],
            max_parallelism=configuration["pipeline.max-parallelism"],
            watermark_interval=configuration["pipeline.auto-watermark-interval"],
            max_feedback=configuration["iteration.max-feedback-records"],
        ),
        native_aggregates=configuration["state.native-aggregates"],
    )
