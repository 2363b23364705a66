"""What a function keeps elsewhere than in state: read from its text, and said by the lint and by `explain`."""

import functools
import logging
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterable

import pytest

from dagster_unified.api import (
    CheckpointedFunction,
    FilterFunction,
    FlatMapFunction,
    KeyedProcessFunction,
    ListStateDescriptor,
    MapFunction,
    MapStateDescriptor,
    Pipeline,
    ValueStateDescriptor,
    WatermarkGenerator,
)
from dagster_unified.graph.code import changed_by, changed_by_objects_of
from dagster_unified.testing import collect
from tests.support import Sale

LOG = logging.getLogger(__name__)
LOCK = threading.Lock()
SEEN = set()
CALLS = 0
TOTALS = defaultdict(int)


class Base(MapFunction[int, int]):
    """What the functions below have in common: what is set in `__init__` and `open` is set for each of them."""

    names: list[str] = []

    def __init__(self) -> None:
        self.n, self.cache, self.d = 0, [], {}

    def open(self, runtime_context) -> None:
        self.opened = deque()
        self.group = runtime_context.get_metrics_group()
        self.counter = self.group.counter("x")
        self._begin()

    def _begin(self) -> None:
        self.begun = True

    def map(self, value: int) -> int:
        return value


class Sets(Base):
    def map(self, value):
        self.n = value
        return value


class Augments(Base):
    def map(self, value):
        self.n += value
        return self.n


class Appends(Base):
    def map(self, value):
        self.cache.append(value)
        return len(self.cache)


class AppendsToWhatOpenMade(Base):
    def map(self, value):
        self.opened.appendleft(value)
        return value


class AppendsToTheClass(Base):
    def map(self, value):
        self.names.append("x")
        return value


class SetsItem(Base):
    def map(self, value):
        self.d[value] = 1
        return value


class AugmentsItem(Base):
    def map(self, value):
        self.d[value] += 1
        return value


class DeletesItem(Base):
    def map(self, value):
        del self.d[value]
        return value


class Deletes(Base):
    def map(self, value):
        del self.n
        return value


class Unpacks(Base):
    def map(self, value):
        self.n, rest = value, 0
        return rest


class ByHelper(Base):
    def map(self, value):
        return self._keep(value)

    def _keep(self, value):
        self.n = value
        return value


class InNested(Base):
    def map(self, value):
        def keep():
            self.cache.append(value)

        keep()
        return value


class AppendsToAlias(Base):
    def map(self, value):
        cache = self.cache
        cache.append(value)
        return len(cache)


class SetsItemOfAlias(Base):
    def map(self, value):
        d = self.d
        d[value] = 1
        return value


class ChangesGlobals(Base):
    def map(self, value):
        global CALLS
        CALLS += 1
        SEEN.add(value)
        TOTALS[value] += 1
        return value


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (Sets, ["self.n"]),
        (Augments, ["self.n"]),
        (Appends, ["self.cache"]),
        (AppendsToWhatOpenMade, ["self.opened"]),
        (AppendsToTheClass, ["self.names"]),
        (SetsItem, ["self.d"]),
        (AugmentsItem, ["self.d"]),
        (DeletesItem, ["self.d"]),
        (Deletes, ["self.n"]),
        (Unpacks, ["self.n"]),
        (ByHelper, ["self.n"]),
        (InNested, ["self.cache"]),
        (AppendsToAlias, ["self.cache"]),
        (SetsItemOfAlias, ["self.d"]),
        (ChangesGlobals, ["CALLS", "SEEN", "TOTALS"]),
    ],
)
def test_what_a_function_changes_as_records_come(function, kept):
    assert changed_by(function()) == kept


def remember(value):
    SEEN.add(value)


def closures():
    seen, count, records = set(), 0, Counter()

    def counts(value):
        nonlocal count
        count += 1
        return count

    def local(value):
        mine = []
        mine.append(value)
        for part in mine:
            mine[0] = part
        return mine

    return {
        "lambda": (lambda value: seen.add(value), ["seen"]),
        "nonlocal": (counts, ["count"]),
        "item": (lambda value: records.update([value]), ["records"]),
        "helper": (lambda value: remember(value), ["SEEN"]),
        "partial": (functools.partial(lambda other, value: seen.add(value), 1), ["seen"]),
        "bound method": (Appends().map, ["self.cache"]),
        "local": (local, []),
        "reads": (lambda value: value in seen or value in SEEN, []),
        "record": (lambda value: value.append(1), []),
        "logs": (lambda value: LOG.info("%s", value), []),
        "locks": (lambda value: LOCK.acquire(), []),
    }


@pytest.mark.parametrize("name", closures())
def test_what_a_plain_function_changes_outside_of_itself(name):
    function, kept = closures()[name]
    assert changed_by(function) == kept


class WithState(KeyedProcessFunction):
    def open(self, runtime_context):
        self.total = runtime_context.get_state(ValueStateDescriptor("total", int))
        self.names = runtime_context.get_map_state(MapStateDescriptor("names", str, int))
        group = runtime_context.get_metrics_group()
        self.unknown = group.add_group("currency").counter("unknown")
        self.sizes = group.distribution("sizes")

    def process_element(self, value, ctx) -> Iterable[int]:
        self.total.update((self.total.value() or 0) + 1)
        self.names.put("x", 1)
        self.names.remove("x")
        self.sizes.update(3)
        self.unknown.inc()
        self.total.clear()
        return []


class Pairs(FlatMapFunction, CheckpointedFunction):
    def initialize_state(self, context):
        self.state = context.get_operator_state_store().get_list_state(ListStateDescriptor("waiting", int))
        self.waiting = list(self.state.get())

    def snapshot_state(self, context):
        self.state.update(self.waiting)

    def flat_map(self, value) -> list[int]:
        self.waiting.append(value)
        found, self.waiting = self.waiting, []
        return found


class Client:
    def update(self, value):
        """What it does nobody knows."""


class Calls(MapFunction):
    def __init__(self):
        self.client = Client()

    def map(self, value) -> int:
        self.client.update(value)
        return value

    def close(self):
        self.client = None


class ChangesCopies(Base):
    def open(self, runtime_context):
        self.total = runtime_context.get_state(ValueStateDescriptor("total", int))

    def map(self, value):
        total, d = self.total, self.d
        total.update(value)
        state = self.total
        state.update(value)
        count = self.n
        count += value
        cache = self.cache
        cache = [*cache, value]
        cache.append(d)
        return count


@pytest.mark.parametrize("function", [Base, WithState, Pairs, Calls, ChangesCopies])
def test_state_metrics_and_what_is_made_before_records_are_not_lost(function):
    assert changed_by(function()) == []


class EveryThird(WatermarkGenerator):
    def __init__(self):
        self.count = 0

    def on_event(self, event, event_timestamp, output):
        self.count += 1
        if self.count % 3 == 0:
            output.emit_watermark(event_timestamp)


def test_what_a_class_keeps_without_an_object_of_it():
    assert changed_by_objects_of(EveryThird) == ["self.count"]


class Once(FilterFunction):
    def __init__(self):
        self.seen = set()

    def filter(self, value):
        if value in self.seen:
            return False
        self.seen.add(value)
        return True


def test_lint_and_explain_say_it_of_any_operator():
    pipeline = Pipeline("p")
    sales = pipeline.from_collection([Sale("north", 3)], Sale, "sales")
    sales.filter(Once()).name("once").key_by("shop").map(Appends(), int).name("appends").print()
    sentence = (
        "changes {} as records come: a function object lives for a micro-batch, and in BATCH for a task, and what it"
        " keeps otherwise than in state is gone then; keep what lasts in state"
    )
    for mode in ("BATCH", "STREAMING"):
        plan = pipeline.plan({"execution.runtime-mode": mode})
        said = [found.message for found in plan.findings if found.rule == "attributes"]
        assert said == [f"'once' {sentence.format('self.seen')}", f"'appends' {sentence.format('self.cache')}"]
        assert all(
            message in " ".join(pipeline.explain(options={"execution.runtime-mode": mode}).split()) for message in said
        )


def test_a_function_of_a_console_has_no_text():
    space = {}
    exec(
        "class F:\n    def __call__(self, v):\n        self.n = v\n        return v\n", space | {"__name__": "x"}, space
    )
    assert changed_by(space["F"]()) == ["self.n"]
    assert collect(Pipeline("p").from_collection([1]).map(space["F"](), int)) == [1]
