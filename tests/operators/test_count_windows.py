"""Windows of so many elements: PyFlink's count window assigners, and `count_window`, which says the same."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.api import (
    CountSlidingWindowAssigner,
    CountTrigger,
    CountTumblingWindowAssigner,
    Pipeline,
    ProcessWindowFunction,
    WindowFunction,
)
from dagster_unified.api.windows import CountWindow
from dagster_unified.errors import PipelineError
from dagster_unified.operators.program.step import KeyedStep
from dagster_unified.operators.windows.contents import Windowing
from dagster_unified.operators.windows.operator import WindowOperator
from tests.operators.support import TEXTS, Memory, ran
from tests.operators.support import Row as Element
from tests.support import MODES, results


class Row(NamedTuple):
    key: str
    amount: int


class Dump(ProcessWindowFunction):
    def process(self, key, context: ProcessWindowFunction.Context[CountWindow], elements) -> Iterable[str]:
        yield f"{key} {context.window().id} {[e.amount for e in elements]}"


class Amounts(WindowFunction):
    def apply(self, key, window, inputs) -> Iterable[str]:
        yield f"{key} {[e.amount for e in inputs]}"


def keyed(rows):
    return Pipeline("p").from_collection(rows, Row).key_by("key")


ROWS = [Row("a", 1), Row("a", 2), Row("b", 9), Row("a", 3), Row("a", 4), Row("a", 5)]


@MODES
def test_tumbling_windows_have_so_many_elements_and_what_is_left_gives_nothing(mode):
    made = keyed(ROWS).window(CountTumblingWindowAssigner.of(2)).process(Dump())
    assert results(made, mode, seed=None) == ["a 0 [1, 2]", "a 1 [3, 4]"]


@MODES
def test_sliding_windows_overlap(mode):
    made = keyed(ROWS).window(CountSlidingWindowAssigner.of(3, 1)).process(Dump())
    assert results(made, mode, seed=None) == ["a 0 [1, 2, 3]", "a 1 [2, 3, 4]", "a 2 [3, 4, 5]"]


@MODES
def test_with_a_slide_that_is_longer_than_the_window_elements_are_left_out(mode):
    made = keyed(ROWS).window(CountSlidingWindowAssigner.of(1, 2)).process(Dump())
    assert sorted(results(made, mode, seed=None)) == ["a 0 [1]", "a 1 [3]", "a 2 [5]", "b 0 [9]"]


@MODES
def test_another_trigger_gives_windows_before_they_are_full(mode):
    made = keyed(ROWS[:2]).window(CountTumblingWindowAssigner.of(3)).trigger(CountTrigger.of(1))
    assert results(made.reduce(lambda a, b: Row(a.key, a.amount + b.amount)), mode, seed=None) == [
        Row("a", 1),
        Row("a", 3),
    ]


@given(
    st.lists(st.builds(Row, st.sampled_from("ab"), st.integers(0, 9)), max_size=20),
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from(["BATCH", "STREAMING"]),
)
def test_the_assigners_say_the_same_as_count_window(rows, size, slide, mode):
    sliding = keyed(rows).window(CountSlidingWindowAssigner.of(size, slide)).apply(Amounts())
    tumbling = keyed(rows).window(CountTumblingWindowAssigner.of(size)).apply(Amounts())
    assert results(sliding, mode) == results(keyed(rows).count_window(size, slide).apply(Amounts()), mode)
    assert results(tumbling, mode) == results(keyed(rows).count_window(size).apply(Amounts()), mode)


def test_the_count_and_the_open_windows_outlive_a_restart_and_full_windows_leave_nothing():
    assigner = CountTumblingWindowAssigner.of(3)
    spec = Windowing(assigner, assigner.get_default_trigger(), Element, function=Dump())
    step = KeyedStep("op", spec, uid="op", output=TEXTS.records, operator=WindowOperator)
    stores = defaultdict(Memory)
    rows = [Element("a", i, i) for i in range(300)]
    assert ran(step, [(rows[:2], None)], stores=stores) == []
    assert ran(step, [(rows[2:4], None)], stores=stores) == ["a 0 [0, 1, 2]"]
    sizes = {len(store.index) for store in stores.values()}
    assert len(ran(step, [(rows[4:], None)], stores=stores)) == 99
    assert max(len(store.index) for store in stores.values()) <= max(sizes)


@pytest.mark.parametrize(
    "wrong", [lambda: CountTumblingWindowAssigner.of(0), lambda: CountSlidingWindowAssigner.of(2, 0)]
)
def test_a_size_or_slide_below_one_is_an_error(wrong):
    with pytest.raises(PipelineError, match=r"Count\w+WindowAssigner: size and slide have to be at least 1"):
        wrong()


def test_the_lint_warns_that_the_elements_of_a_window_depend_on_the_mode():
    made = keyed(ROWS).window(CountSlidingWindowAssigner.of(3, 1)).sum("amount")
    made.print()
    findings = [f.message for f in made._pipeline.plan().findings if f.severity == "warning"]
    assert any("closes its windows by the elements that have come" in message for message in findings)
    assert "CountSlidingWindowAssigner of 3 every 1, reduced" in made._pipeline.explain()
