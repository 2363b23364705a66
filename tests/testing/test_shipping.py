"""Functions in the harness are copies, as in Spark's workers: new in each run, and in STREAMING in each micro-batch."""

import logging
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from dagster_unified.api import (
    FilterFunction,
    KeyedBroadcastProcessFunction,
    KeySelector,
    MapFunction,
    MapStateDescriptor,
    Pipeline,
    ValueStateDescriptor,
)
from dagster_unified.by_value import by_value_bytes
from dagster_unified.engine.shipping import Payload
from dagster_unified.engine.streaming.worker import shipped as shipped_in_streaming
from dagster_unified.engine.worker import shipped as shipped_in_batch
from dagster_unified.errors import PipelineError
from dagster_unified.operators.routing import RoutedProgram
from dagster_unified.testing import Shared, assert_same_in_both_modes, run_pipeline
from dagster_unified.testing.driving import single
from tests.support import MODES

LOG = logging.getLogger(__name__)
LOCK = threading.Lock()
SEEN: set[int] = set()


class Counts(MapFunction[int, int]):
    def __init__(self) -> None:
        self.n = 0

    def map(self, value: int) -> int:
        self.n += 1
        return self.n


def numbers(*values):
    return Pipeline("p").from_collection(list(values), int, "numbers")


def run(stream, mode, **options):
    stream.print()
    return run_pipeline(stream._pipeline, mode, **options).only()


def test_what_a_function_counts_begins_anew_in_each_run_and_micro_batch():
    function = Counts()
    for _ in range(2):
        stream = numbers(5, 5, 5).map(function)
        assert run(stream, "BATCH") == [1, 2, 3]
    for size, found in ((1, [1, 1, 1]), (2, [1, 2, 1]), (None, [1, 2, 3])):
        assert run(numbers(5, 5, 5).map(function), "STREAMING", micro_batch=size) == found
    assert function.n == 0


class Once(FilterFunction[int]):
    of_all: set[int] = set()

    def __init__(self) -> None:
        self.own: set[int] = set()

    def filter(self, value: int) -> bool:
        is_new = value not in self.own and value not in self.of_all and value not in SEEN
        self.own.add(value)
        self.of_all.add(value)
        SEEN.add(value)
        return is_new


def once():
    seen = set()
    return lambda value: value not in seen and not seen.add(value)


@MODES
@pytest.mark.parametrize("make", [Once, once])
def test_what_a_filter_has_seen_in_a_run_another_does_not_see(mode, make):
    stream = numbers(1, 2, 1).filter(make())
    stream.print()
    for _ in range(2):
        assert sorted(run_pipeline(stream._pipeline, mode, micro_batch=None).only()) == [1, 2]
    with pytest.raises(AssertionError, match="ends differently"):
        assert_same_in_both_modes(stream._pipeline)
    assert not SEEN


@MODES
def test_a_key_selector_is_a_copy_as_well(mode):
    class Grows(KeySelector[int, int]):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def get_key(self, value: int) -> int:
            self.seen.append(value)
            return value

    selector = Grows()
    assert sorted(run(numbers(1, 2).key_by(selector).map(lambda n: n, int), mode)) == [1, 2]
    assert selector.seen == []


def locked_closure():
    lock = threading.Lock()
    return lambda value: value if lock.locked() else value + 1


class Locked(MapFunction[int, int]):
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def map(self, value: int) -> int:
        return value


def uses_the_modules_lock(value):
    with LOCK:
        return value


@pytest.mark.parametrize(
    "make", [locked_closure, Locked, lambda: uses_the_modules_lock], ids=["closure", "own", "global"]
)
def test_a_lock_is_refused_as_on_spark_in_the_same_words(make):
    stream = numbers(1).map(make(), int).name("locked")
    stream.print()
    said = []
    for mode in ("BATCH", "STREAMING"):
        with pytest.raises(PipelineError) as refused:
            run_pipeline(stream._pipeline, mode)
        said.append(str(refused.value))
        plan = stream._pipeline.plan({"execution.runtime-mode": mode})
        program = single(plan, next(node for node in plan.graph.nodes if node.name == "locked"))
        with pytest.raises(PipelineError) as refused:
            shipped_in_batch(program) if mode == "BATCH" else shipped_in_streaming({0: RoutedProgram(program, ())}, 4)
        said.append(str(refused.value))
    assert set(said) == {
        "p: stage 'locked', operator 'locked' cannot be sent to Spark's workers: cannot pickle '_thread.lock' object;"
        " create connections, locks and open files in open(), not before"
    }


@MODES
def test_a_modules_logger_and_a_lock_that_open_creates_work(mode, caplog, monkeypatch):
    monkeypatch.setattr(LOG, "disabled", False)  # where an instance of Dagster is set up, Alembic disables all that are

    class Logs(MapFunction[int, int]):
        def open(self, runtime_context) -> None:
            self.lock = threading.Lock()

        def map(self, value: int) -> int:
            with self.lock:
                LOG.warning("came %s", value)
            return value

    assert run(numbers(7).map(Logs()), mode) == [7]
    assert [text for name, _, text in caplog.record_tuples if name == LOG.name] == ["came 7"]


@dataclass(frozen=True)
class Place:
    name: str


@MODES
def test_records_are_of_the_tests_own_classes(mode):
    places = Pipeline("p").from_collection([Place("a")], Place)
    named = places.map(lambda place: Place(place.name + str(isinstance(place, Place))), Place)
    assert run(named, mode) == [Place("aTrue")]


@MODES
def test_a_test_double_is_shared(mode):
    calls = Shared([])
    assert run(numbers(3).map(lambda n: calls.value.append(n) or n, int), mode) == [3]
    assert calls.value == [3]


def test_a_test_double_is_refused_in_another_process():
    calls = Shared([])
    data = by_value_bytes(lambda n: calls.value.append(n))
    ran = subprocess.run(
        [sys.executable, "-c", f"from pyspark import cloudpickle; cloudpickle.loads({data!r})"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "a function refers to an object of a test (Shared, ManualClock)" in ran.stderr


def test_a_plain_function_that_remembers_is_another_one_for_each_task():
    remembering = Payload.of(once(), [once()])
    assert [remembering.load()(1) for _ in range(2)] == [True, True]


TOTAL = ValueStateDescriptor("total", int)


class Totals(KeyedBroadcastProcessFunction):
    """Tells what it finds out about its keys."""

    def open(self, runtime_context):
        self.total = runtime_context.get_state(TOTAL)

    def process_element(self, value: int, ctx) -> Iterable[str]:
        self.total.update((self.total.value() or 0) + 1)
        return []

    def process_broadcast_element(self, value: int, ctx) -> Iterable[str]:
        found = []
        ctx.apply_to_keyed_state(TOTAL, lambda key, total: found.append(key))
        yield f"asked {value}"
        yield from map(str, found)
        yield f"{len(found)} keys"


def test_key_groups_are_apart_where_there_is_broadcast_state():
    pipeline = Pipeline("p")
    keys = pipeline.from_collection(list(range(8)), int, "keys")
    rules = pipeline.from_collection([9], int, "rules")
    asked = keys.key_by(lambda n: n, key_type=int).connect(rules.broadcast(MapStateDescriptor("rules", str, int)))
    asked.process(Totals()).print()
    found = run_pipeline(pipeline, "STREAMING").only()
    assert sorted(f for f in found if "key" not in f) == [*map(str, range(8)), "asked 9"]
    counts = [int(f.split()[0]) for f in found if "key" in f]
    assert sum(counts) == 8
    assert 0 in counts
    assert len(counts) > 3
