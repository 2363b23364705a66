"""A kind of state is one descriptor and its handle: everything that holds, stores and shows state takes it from there.

`Counter` below is all that a new kind is.
"""

from collections import defaultdict
from collections.abc import Iterable
from datetime import timedelta

import pytest

from dagster_unified.api import (
    EventTimeSessionWindows,
    KeyedProcessFunction,
    ListStateDescriptor,
    Pipeline,
    ProcessWindowFunction,
    StateTtlConfig,
    TumblingEventTimeWindows,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from dagster_unified.api.windows import Trigger, TriggerResult
from dagster_unified.errors import StateError, UnsupportedError
from dagster_unified.operators.drivers.key_groups import GroupInput, KeyGroups, MicroBatch
from dagster_unified.operators.state.chunks import SpilledMap
from dagster_unified.operators.state.descriptors import OneTypeDescriptor
from dagster_unified.operators.state.handles import Collection, State
from tests.operators.support import TEXTS, Memory, Row, batch, process, program, ran
from tests.support import MODES, results


class CounterState(State):
    """A number that counts up."""

    def increment(self, by: int = 1) -> None:
        self._put((self._get(give_expired=False) or 0) + by)

    def count(self) -> int:
        return self._get() or 0

    def merge(self, entries) -> None:
        self._merge_values(entries, lambda a, b: a + b)


class Counter(OneTypeDescriptor[CounterState]):
    kind = "counter"
    handle_type = CounterState

    def __init__(self, name, ttl=None):
        super().__init__(name, int, ttl)


class SetState(Collection):
    """Many entries: what is large of it is kept in chunks, as a map's."""

    def _live(self, entries):
        return {value: moment for value, moment in entries.items() if not self._expired(moment)}

    def add(self, value) -> None:
        self._backend.current.setdefault(self._name, {})[value] = True

    def size(self) -> int:
        return len(self._backend.current.get(self._name) or ())


class SetOf(OneTypeDescriptor[SetState]):
    kind = "set"
    handle_type = SetState
    spilled = SpilledMap

    @property
    def stored_type(self):
        return dict[self.type, bool]


class Counting(KeyedProcessFunction):
    def open(self, context):
        self.seen = context.get_state(Counter("seen"))
        self.amounts = context.get_state(SetOf("amounts", int, None))

    def process_element(self, value: Row, ctx) -> Iterable[str]:
        self.seen.increment()
        self.amounts.add(value.amount)
        yield f"{value.key} {self.seen.count()} {self.amounts.size()}"


def rows_of(amounts):
    return [Row("a", at, amount) for at, amount in enumerate(amounts)]


def stream(rows):
    by_at = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
    return Pipeline("p").from_collection(rows, Row).assign_timestamps_and_watermarks(by_at)


@MODES
def test_a_function_uses_a_new_kind(mode):
    found = results(stream(rows_of([5, 5, 7])).key_by("key").process(Counting()), mode, watermark_interval=1)
    assert found == ["a 1 1", "a 2 1", "a 3 2"]


def test_a_new_kind_lives_on_in_the_pages_of_its_key_group():
    stores = defaultdict(Memory)
    assert ran(process(Counting()), [(rows_of([5]), None), (rows_of([7]), None)], stores=stores) == ["a 1 1", "a 2 2"]
    assert ran(process(Counting()), [(rows_of([7]), None)], stores=stores) == ["a 3 2"]


def test_a_new_kind_that_is_large_is_kept_in_chunks():
    stores = defaultdict(Memory)
    ran(process(Counting()), [(rows_of(range(3000)), None)], groups=1, stores=stores)
    assert len(stores[0].pages) > 1
    found = ran(process(Counting()), [(rows_of([2999, 3000]), None)], groups=1, stores=stores)
    assert found == ["a 3001 3000", "a 3002 3001"]


def test_a_value_of_another_type_is_an_error_that_names_the_state():
    class Wrong(Counting):
        def process_element(self, value, ctx) -> Iterable[str]:
            self.seen.increment(0.5)
            return ()

    with pytest.raises(StateError, match=r"state 'seen' of key 'a' is declared int, and was given 0.5 \(float\)"):
        ran(process(Wrong()), [(rows_of([1]), None)])


class Fleeting(KeyedProcessFunction):
    def open(self, context):
        self.seen = context.get_state(Counter("seen", StateTtlConfig(timedelta(milliseconds=10))))

    def process_element(self, value: Row, ctx) -> Iterable[str]:
        self.seen.increment()
        yield f"{self.seen.count()}"


def test_a_new_kind_has_a_time_to_live():
    out, now, store = [], [0], Memory()
    driver = KeyGroups(
        program(process(Fleeting())), lambda number, b: out.extend(TEXTS.records.from_batch(b)), lambda: now[0]
    )
    for now[0] in (0, 9, 18, 28):
        driver.run(store, MicroBatch(GroupInput([batch(rows_of([1]))])))
    assert out == ["1", "2", "3", "1"]


class Fired(ProcessWindowFunction):
    """How often each window has fired, and all windows of the key."""

    def process(self, key, context, elements) -> Iterable[str]:
        here, everywhere = context.window_state().get_state(Counter("fired")), context.global_state()
        here.increment()
        everywhere.get_state(Counter("all")).increment()
        yield f"{context.window().start}: {here.count()} of {everywhere.get_state(Counter('all')).count()}"

    def clear(self, context):
        context.window_state().get_state(Counter("fired")).clear()


class Every(Trigger):
    """Fires at every second element, which it counts in a state of a new kind."""

    seen = Counter("seen")

    def on_element(self, element, timestamp, window, ctx):
        count = ctx.get_partitioned_state(self.seen)
        count.increment()
        return TriggerResult.CONTINUE if count.count() % 2 else TriggerResult.FIRE

    def on_event_time(self, time, window, ctx):
        return TriggerResult.CONTINUE

    def on_processing_time(self, time, window, ctx):
        return TriggerResult.CONTINUE

    def can_merge(self):
        return True

    def on_merge(self, window, ctx):
        ctx.merge_partitioned_state(self.seen)

    def clear(self, window, ctx):
        ctx.get_partitioned_state(self.seen).clear()


@MODES
def test_a_window_and_its_trigger_have_state_of_a_new_kind(mode):
    rows = [Row("a", at, 1) for at in (0, 1, 2, 3, 10, 11)]
    tumbling = stream(rows).key_by("key").window(TumblingEventTimeWindows.of(timedelta(milliseconds=10)))
    assert results(tumbling.trigger(Every()).process(Fired()), mode) == ["0: 1 of 1", "0: 2 of 2", "10: 1 of 3"]


@MODES
def test_windows_that_merge_merge_state_of_a_new_kind(mode):
    rows = [Row("a", at, 1) for at in (0, 10)]
    sessions = stream(rows).key_by("key").window(EventTimeSessionWindows.with_gap(timedelta(milliseconds=11)))
    assert len(results(sessions.trigger(Every()).process(Fired()), mode)) == 1


def test_state_that_cannot_be_merged_says_so():
    class Last(Every):
        seen = ValueStateDescriptor("last", int)

        def on_element(self, element, timestamp, window, ctx):
            ctx.get_partitioned_state(self.seen).update(element.amount)
            return TriggerResult.CONTINUE

    rows = [Row("a", at, 1) for at in (0, 5)]
    sessions = stream(rows).key_by("key").window(EventTimeSessionWindows.with_gap(timedelta(milliseconds=11)))
    with pytest.raises(
        UnsupportedError, match="value state 'last' cannot be merged; use reducing, aggregating or list"
    ):
        results(sessions.trigger(Last()).process(Fired()), "STREAMING")


ANSWERS = ListStateDescriptor("answers", int)


class Inherited(Counting):
    def open(self, context):
        super().open(context)
        self.answers = context.get_list_state(ANSWERS)


def test_explain_shows_a_new_kind_and_what_a_base_class_or_a_global_declares():
    pipeline = Pipeline("p")
    pipeline.from_collection(rows_of([1]), Row).key_by("key").process(Inherited()).print()
    text = pipeline.explain()
    assert "; counter state 'seen'; set state 'amounts'; list state 'answers'" in text


def test_a_descriptor_that_says_the_same_has_the_same_handle():
    assert Counter("a").same_as(Counter("a"))
    assert not Counter("a").same_as(Counter("a", StateTtlConfig(timedelta(1))))
    assert not Counter("a").same_as(ValueStateDescriptor("a", int))
