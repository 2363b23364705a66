"""Boundedness, runtime mode and the options that follow from it."""

from typing import NamedTuple

import pytest

from dagster_unified.api import Pipeline
from dagster_unified.errors import ConfigurationError, PipelineError
from dagster_unified.graph.connectors import Boundedness, Source
from dagster_unified.graph.options import Configuration
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
    pipeline.from_source(Endless()).print()
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
    with pytest.raises(PipelineError, match=r"flight_delays: source 'events' is unbounded, and BATCH needs bounded sources; .* execution\.runtime-mode=STREAMING"):
        endless().plan({"execution.runtime-mode": "BATCH"})


@pytest.mark.parametrize(("mode", "schedule", "updates"), [("BATCH", "LAZY_FROM_SOURCES", False), ("STREAMING", "EAGER", True)])
def test_what_follows_from_the_mode(mode, schedule, updates):
    execution = bounded().plan({"execution.runtime-mode": mode}).execution
    assert (execution.schedule_mode, execution.incremental_updates) == (schedule, updates)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"execution.runtime-mode": "BATCH", "execution.checkpointing.interval": "1 min"}, "BATCH takes no checkpoints"),
        ({"execution.runtime-mode": "BATCH", "execution.schedule-mode": "EAGER"}, "cannot be honoured in BATCH"),
        ({"execution.runtime-mode": "STREAMING", "execution.batch-shuffle-mode": "ALL_EXCHANGES_BLOCKING"}, "cannot be honoured in STREAMING"),
        ({"execution.runtme-mode": "BATCH"}, r"unknown option 'execution\.runtme-mode'; did you mean 'execution\.runtime-mode'\?"),
        ({"execution.runtime-mode": "BACH"}, "'BACH' is not one of BATCH, STREAMING, AUTOMATIC; did you mean 'BATCH'"),
        ({"parallelism.default": "0"}, "not a whole number of at least 1"),
        ({"execution.incremental-updates": "maybe"}, "not true or false"),
    ],
)
def test_a_value_that_cannot_be_honoured_is_an_error(options, words):
    with pytest.raises(ConfigurationError, match=words):
        bounded().plan(options)


def test_the_strongest_layer_wins_and_is_remembered():
    configuration = Configuration([("command line", {"parallelism.default": "3"}), ("file", {"parallelism.default": "5", "execution.runtime-mode": "BATCH"})])
    assert (configuration["parallelism.default"], configuration.origin("parallelism.default")) == (3, "command line")
    assert configuration.origin("execution.runtime-mode") == "file"
    assert configuration.origin("execution.schedule-mode") == "default"
