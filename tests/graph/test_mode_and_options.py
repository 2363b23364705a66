"""Boundedness, runtime mode and the options that follow from it."""

from datetime import timedelta
from typing import NamedTuple

import pytest

from dagster_unified.api import Pipeline
from dagster_unified.errors import ConfigurationError, PipelineError
from dagster_unified.graph.connectors import Boundedness, Source
from dagster_unified.graph.options import Configuration, Layer
from dagster_unified.records import record_type


class Event(NamedTuple):
    key: str
    value: int


class Endless(Source):
    boundedness = Boundedness.UNBOUNDED

    def __init__(self):
        self.name, self.records = "events", record_type(Event)

    def describe(self):
        return "a stream without end"

    def snapshot(self):
        return "now"


def endless():
    pipeline = Pipeline("flight_delays")
    pipeline.from_source(Endless()).union(pipeline.from_collection([Event("a", 1)])).print()
    return pipeline


def bounded():
    pipeline = Pipeline("p")
    pipeline.from_collection([Event("a", 1)]).key_by("key").sum("value").print()
    return pipeline


def test_automatic_is_batch_when_all_sources_are_bounded_and_streaming_otherwise():
    assert bounded().plan().execution.mode == "BATCH"
    assert endless().plan().execution.mode == "STREAMING"
    assert bounded().plan({"execution.runtime-mode": "streaming"}).execution.mode == "STREAMING"


def test_batch_with_an_unbounded_source_names_it_and_says_what_to_do():
    with pytest.raises(
        PipelineError,
        match=(
            r"flight_delays: source 'events' is unbounded, and BATCH needs bounded sources; .*"
            r" execution\.runtime-mode=STREAMING"
        ),
    ):
        endless().plan({"execution.runtime-mode": "BATCH"})


@pytest.mark.parametrize(
    ("mode", "schedule", "updates"), [("BATCH", "LAZY_FROM_SOURCES", False), ("STREAMING", "EAGER", True)]
)
def test_what_follows_from_the_mode(mode, schedule, updates):
    execution = bounded().plan({"execution.runtime-mode": mode}).execution
    assert (execution.schedule_mode, execution.incremental_updates) == (schedule, updates)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"execution.runtime-mode": "BATCH", "execution.checkpointing.interval": "1 min"},
            "BATCH takes no checkpoints",
        ),
        (
            {"execution.runtime-mode": "BATCH", "execution.savepoint.interval": "1 h"},
            r"BATCH leaves its state at the end of its data; set execution\.savepoint\.path instead",
        ),
        ({"execution.runtime-mode": "BATCH", "execution.schedule-mode": "EAGER"}, "cannot be honoured in BATCH"),
        (
            {"execution.runtime-mode": "STREAMING", "execution.batch-shuffle-mode": "ALL_EXCHANGES_BLOCKING"},
            "cannot be honoured in STREAMING",
        ),
        (
            {"execution.runtme-mode": "BATCH"},
            r"unknown option 'execution\.runtme-mode'; did you mean 'execution\.runtime-mode'\?",
        ),
        ({"execution.runtime-mode": "BACH"}, "'BACH' is not one of BATCH, STREAMING, AUTOMATIC; did you mean 'BATCH'"),
        ({"execution.incremental-updates": "maybe"}, "not true or false"),
        ({"execution.savepoint.interval": "0 s"}, "'0 s' is not a duration such as .* 2 min, of at least 1 ms"),
        (
            {"restart-strategy.failure-rate.failure-rate-interval": "0 s"},
            "'0 s' is not a duration such as .* of at least 1 ms",
        ),
        (
            {"execution.runtime-mode": "STREAMING", "restart-strategy.exponential-delay.max-backoff": "500 ms"},
            r"exponential-delay\.initial-backoff is 1000 ms, and .*max-backoff 500 ms; the first wait cannot be longer",
        ),
        ({"execution.checkpointing.dir": " "}, "' ' is not a text that is not empty"),
        ({"pipeline.max-parallelism": 1_000_000}, "1000000 is not a whole number from 1 to 32768"),
        ({"restart-strategy.exponential-delay.backoff-multiplier": 0.5}, "0.5 is not a number of at least 1.0"),
        ({"restart-strategy.exponential-delay.jitter-factor": "2"}, "'2' is not a number from 0 to 1.0"),
    ],
)
def test_a_value_that_cannot_be_honoured_is_an_error(options, words):
    with pytest.raises(ConfigurationError, match=words):
        bounded().plan(options)


def test_the_strongest_layer_wins_and_is_remembered():
    configuration = Configuration(
        [
            Layer("command line", {"parallelism.default": "3"}),
            Layer("file", {"parallelism.default": "5", "execution.runtime-mode": "BATCH"}, shared=True),
        ]
    )
    assert (configuration["parallelism.default"], configuration.origin("parallelism.default")) == (3, "command line")
    assert configuration.origin("execution.runtime-mode") == "file"
    assert configuration.origin("execution.schedule-mode") == "default"
    assert configuration.asked("parallelism.default")
    assert not configuration.asked("execution.runtime-mode")


def test_an_option_of_the_other_mode_is_an_error_for_one_run_and_left_alone_where_runs_of_both_modes_share_it():
    given = {
        "execution.checkpointing.interval": "1 min",
        "execution.savepoint.interval": "1 h",
        "execution.batch-shuffle-mode": "ALL_EXCHANGES_BLOCKING",
        "execution.schedule-mode": "EAGER",
    }
    shared = Layer("file", given, shared=True)
    batch = bounded().plan(Configuration([Layer("launch", {"execution.runtime-mode": "BATCH"}), shared])).execution
    streaming = (
        bounded().plan(Configuration([Layer("launch", {"execution.runtime-mode": "STREAMING"}), shared])).execution
    )
    assert (batch.schedule_mode, batch.shuffle_mode) == ("LAZY_FROM_SOURCES", "ALL_EXCHANGES_BLOCKING")
    assert (streaming.schedule_mode, streaming.shuffle_mode) == ("EAGER", "ALL_EXCHANGES_PIPELINED")


def test_the_key_of_flip_134_is_another_name_of_the_shuffle_mode():
    options = {"execution.shuffle-mode": "ALL_EDGES_PIPELINED"}
    assert bounded().plan(options).execution.shuffle_mode == "ALL_EXCHANGES_PIPELINED"
    assert Configuration.of(options)["execution.shuffle-mode"] == "ALL_EXCHANGES_PIPELINED"
    with pytest.raises(
        ConfigurationError,
        match=r"launch: execution\.shuffle-mode and execution\.batch-shuffle-mode are two names of one option",
    ):
        Configuration.of({**options, "execution.batch-shuffle-mode": "ALL_EDGES_BLOCKING"})


@pytest.mark.parametrize(
    ("key", "given", "value"),
    [
        ("execution.runtime-mode", "batch", "BATCH"),
        ("execution.batch-shuffle-mode", "all_edges_pipelined", "ALL_EXCHANGES_PIPELINED"),
        ("execution.schedule-mode", "eager", "EAGER"),
        ("execution.incremental-updates", "TRUE", True),
        ("execution.checkpointing.interval", "10 s", timedelta(seconds=10)),
        ("execution.checkpointing.interval", timedelta(minutes=1), timedelta(minutes=1)),
        ("state.backend.type", "hashmap", "HASHMAP"),
        ("restart-strategy.type", "exponential-delay", "EXPONENTIAL-DELAY"),
        ("restart-strategy.exponential-delay.jitter-factor", "0.2", 0.2),
        ("pipeline.processing-time.allow", "ignore", "IGNORE"),
        ("pipeline.processing-time.end-of-input", "IGNORE", "IGNORE"),
        ("pipeline.event-time.end-of-input-chain", "0", 0),
        ("pipeline.operator-chaining.enabled", False, False),
        ("pipeline.object-reuse", "true", True),
        ("parallelism.default", " 4 ", 4),
    ],
)
def test_every_option_reads_text_and_its_own_type(key, given, value):
    assert Configuration.of({key: given})[key] == value


@pytest.mark.parametrize("given", [2.7, "2.5", True, "0", "-1", "many"])
def test_a_count_is_a_whole_number(given):
    with pytest.raises(ConfigurationError, match=f"parallelism.default: {given!r} is not a whole number of at least 1"):
        Configuration.of({"parallelism.default": given})
