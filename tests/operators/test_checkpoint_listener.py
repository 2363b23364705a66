"""`CheckpointListener`: functions hear of committed epochs, in STREAMING only."""

from typing import NamedTuple

import pytest

from dagster_unified.api import (
    CheckpointListener,
    CoMapFunction,
    KeyedProcessFunction,
    MapFunction,
    Pipeline,
    ProcessFunction,
    ReduceFunction,
    ValueStateDescriptor,
)
from dagster_unified.errors import UserFunctionError
from dagster_unified.testing import run_pipeline


class Heard(CheckpointListener):
    def open(self, runtime_context):
        self.heard = []

    def notify_checkpoint_complete(self, epoch):
        self.heard.append(epoch)


class Map(Heard, MapFunction):
    def map(self, value) -> list[int]:
        return list(self.heard)


class Process(Heard, ProcessFunction):
    def process_element(self, value, ctx) -> list[list[int]]:
        return [list(self.heard)]


class Both(Heard, CoMapFunction):
    def map1(self, value) -> list[int]:
        return list(self.heard)

    def map2(self, value) -> list[int]:
        return list(self.heard)


class Keyed(Heard, KeyedProcessFunction):
    def process_element(self, value, ctx) -> list[list[int]]:
        return [list(self.heard)]


def given(pipeline):
    return pipeline.from_collection([1, 2, 3], int, "numbers")


OPERATORS = {
    "map": lambda p: given(p).map(Map()),
    "process": lambda p: given(p).process(Process()),
    "connected map": lambda p: given(p).connect(p.from_collection([], str, "no words")).map(Both()),
    "keyed map": lambda p: given(p).key_by(lambda n: 0, key_type=int).map(Map()),
    "keyed process": lambda p: given(p).key_by(lambda n: 0, key_type=int).process(Keyed()),
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_function_hears_of_an_epoch_before_it_gets_a_record_of_the_next(operator):
    pipeline = Pipeline("listening")
    OPERATORS[operator](pipeline).print()

    assert run_pipeline(pipeline, "STREAMING").only() == [[], [0], [1]]


@pytest.mark.parametrize("operator", OPERATORS)
def test_in_batch_there_are_no_epochs_to_hear_of(operator):
    pipeline = Pipeline("listening")
    OPERATORS[operator](pipeline).print()

    assert run_pipeline(pipeline, "BATCH").only() == [[], [], []]


class Sum(Heard, ReduceFunction):
    def reduce(self, value1, value2):
        return value1 + value2 + 100 * len(self.heard)


def test_a_reduce_function_hears_as_well():
    pipeline = Pipeline("listening")
    given(pipeline).key_by(lambda n: 0, key_type=int).reduce(Sum()).print()

    assert run_pipeline(pipeline, "STREAMING").only() == [1, 103, 206]


class Total(NamedTuple):
    amount: int
    epoch: int


class CommittedTotal(KeyedProcessFunction, CheckpointListener):
    """Has state of its key, and what it was told last."""

    epoch = -1

    def open(self, runtime_context):
        self.total = runtime_context.get_state(ValueStateDescriptor("total", int))

    def notify_checkpoint_complete(self, epoch):
        self.epoch = epoch

    def process_element(self, value, ctx) -> list[Total]:
        self.total.update((self.total.value() or 0) + value)
        return [Total(self.total.value(), self.epoch)]


def test_a_keyed_function_has_its_state_and_hears():
    pipeline = Pipeline("listening")
    given(pipeline).key_by(lambda n: 0, key_type=int).process(CommittedTotal()).print()

    assert run_pipeline(pipeline, "STREAMING").only() == [(1, -1), (3, 0), (6, 1)]


class Failing(MapFunction, CheckpointListener):
    def notify_checkpoint_complete(self, epoch):
        raise ValueError("cannot publish")

    def map(self, value) -> int:
        return value


def test_an_exception_names_the_operator_and_the_epoch():
    pipeline = Pipeline("listening")
    given(pipeline).map(Failing()).print()

    with pytest.raises(UserFunctionError, match=r"operator 'Failing': ValueError: cannot publish.*, on 'epoch 0'"):
        run_pipeline(pipeline, "STREAMING")
