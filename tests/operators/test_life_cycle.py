"""`open` and `close`: once each, in BATCH and in each micro-batch of STREAMING, whatever happens between."""

import pytest

from dagster_unified.api import (
    FilterFunction,
    FlatMapFunction,
    KeyedProcessFunction,
    MapFunction,
    Pipeline,
    ProcessFunction,
    ReduceFunction,
)
from dagster_unified.errors import UserFunctionError
from dagster_unified.testing import Shared, run_pipeline
from tests.support import MODES, results


class Noted:
    """Notes when it is opened and closed; fails on 13."""

    def __init__(self):
        self.shared = Shared([])

    @property
    def notes(self):
        return self.shared.value

    def open(self, context):
        self.notes.append(f"open {context.get_task_name()}")

    def close(self):
        self.notes.append("close")

    def see(self, value):
        if value == 13:
            raise ValueError("unlucky")
        return value


class Map(Noted, MapFunction):
    def map(self, value) -> int:
        return self.see(value)


class Filter(Noted, FilterFunction):
    def filter(self, value):
        return self.see(value) >= 0


class FlatMap(Noted, FlatMapFunction):
    def flat_map(self, value) -> list[int]:
        return [self.see(value)]


class Process(Noted, ProcessFunction):
    def process_element(self, value, ctx) -> list[int]:
        return [self.see(value)]


class KeyedProcess(Noted, KeyedProcessFunction):
    def process_element(self, value, ctx) -> list[int]:
        return [self.see(value)]


class Reduce(Noted, ReduceFunction):
    def reduce(self, value1, value2):
        return self.see(value2)


KINDS = {
    "map": Map,
    "filter": Filter,
    "flat_map": FlatMap,
    "process": Process,
    "keyed process": KeyedProcess,
    "reduce": Reduce,
}


@MODES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fails", [False, True])
def test_open_and_close_run_once_also_when_a_record_fails(mode, kind, fails):
    function = KINDS[kind]()
    pipeline = Pipeline("p")
    stream = pipeline.from_collection([1, 13 if fails else 3, 5])
    stream = stream.key_by(lambda v: 0, key_type=int) if kind in ("keyed process", "reduce") else stream
    getattr(stream, kind.split()[-1])(function).name("noted").print()
    if fails:
        with pytest.raises(UserFunctionError, match="operator 'noted': ValueError: unlucky"):
            run_pipeline(pipeline, mode)
    else:
        run_pipeline(pipeline, mode)
    lives = len(function.notes) // 2
    assert function.notes == ["open noted", "close"] * lives
    assert lives == 1 if mode == "BATCH" else lives >= 1


@MODES
def test_what_was_opened_is_closed_when_a_later_open_fails(mode):
    class Broken(MapFunction):
        def open(self, context):
            raise OSError("no connection")

        def map(self, value) -> int:
            return value

    first = Map()
    made = Pipeline("p").from_collection([1]).map(first).map(Broken())
    with pytest.raises(UserFunctionError, match=r"operator 'Broken': OSError: no connection.*on 'open\(\)'"):
        results(made, mode)
    assert first.notes == ["open Map", "close"]


@MODES
def test_a_function_learns_its_partition_and_attempt(mode):
    class Where(MapFunction):
        def open(self, context):
            self.here = context.get_index_of_this_subtask(), context.get_attempt_number()

        def map(self, value) -> tuple[int, int]:
            return self.here

    made = Pipeline("p").from_collection([1]).map(Where())
    assert results(made, mode) == [(0, 0)]


class Tolerant(Map):
    def map(self, value) -> int:
        return value


class FailsToClose(Map):
    """As a function does that closes what its `open` did not get to."""

    def close(self):
        super().close()
        raise OSError("broken pipe")


class KeyedFailsToClose(KeyedProcess):
    def close(self):
        super().close()
        raise OSError("broken pipe")


@MODES
@pytest.mark.parametrize("kind", [FailsToClose, KeyedFailsToClose])
@pytest.mark.parametrize(
    ("number", "told", "noted"),
    [(13, "ValueError: unlucky, at .*, on 13", 1), (1, "OSError: broken pipe, at .* in close", 0)],
)
def test_a_failure_to_close_hides_no_other_and_leaves_nothing_open(mode, kind, number, told, noted):
    first, function, last = Tolerant(), kind(), Tolerant()
    pipeline = Pipeline("p")
    stream = pipeline.from_collection([number], int).map(first)
    stream = (
        stream.map(function) if kind is FailsToClose else stream.key_by(lambda n: n, key_type=int).process(function)
    )
    stream.map(last).print()
    with pytest.raises(UserFunctionError, match=rf"operator '{kind.__name__}': {told}") as raised:
        run_pipeline(pipeline, mode)
    opened = [one for one in (first, function, last) if one.notes]  # in BATCH an operator is opened after those before
    assert function in opened
    assert all(one.notes[-1] == "close" for one in opened)
    notes = getattr(raised.value, "__notes__", [])
    assert len(notes) == noted
    assert all("OSError: broken pipe" in note for note in notes)
