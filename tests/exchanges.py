"""Pipelines with exchanges that choose a record's subtask, before and between keyed operators, and what they give.

All cases are one pipeline, so that a run of it holds all of them.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NamedTuple

from dagster_unified.api import (
    BroadcastProcessFunction,
    CoProcessFunction,
    DataStream,
    KeyedProcessFunction,
    MapStateDescriptor,
    OutputTag,
    Pipeline,
    ProcessFunction,
    TumblingEventTimeWindows,
    ValueStateDescriptor,
    WatermarkStrategy,
)


class Item(NamedTuple):
    key: str
    value: int


class Seen(NamedTuple):
    """What an instance saw, its subtask, and how many records it had seen before."""

    what: str
    subtask: int
    before: int


class Row(NamedTuple):
    case: str
    what: str
    subtask: int
    before: int


ITEMS = [Item("a", 1), Item("b", 2), Item("c", 3), Item("a", 4), Item("b", 5)]
OTHERS = [Item("x", 10), Item("y", 20), Item("z", 30)]
RULES = MapStateDescriptor("rules", str, int)
ODD = OutputTag("odd", Item)
IN_ORDER = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(milliseconds=1000)).with_timestamp_assigner("value")


class Where(ProcessFunction):
    """Which subtask sees a record."""

    def open(self, context):
        self.subtask = context.get_index_of_this_subtask()

    def process_element(self, value: Item, ctx) -> Iterable[Seen]:
        yield Seen(f"{value.key}{value.value}", self.subtask, 0)


class Numbered(ProcessFunction):
    """How many records an instance sees."""

    def open(self, context):
        self.subtask, self.before = context.get_index_of_this_subtask(), 0

    def process_element(self, value: Item, ctx) -> Iterable[Seen]:
        yield Seen("", self.subtask, self.before)
        self.before += 1


class NumberedAgain(Numbered):
    def process_element(self, value: Seen, ctx) -> Iterable[Seen]:
        return super().process_element(value, ctx)


class Odd(Numbered):
    """Numbers all records, and gives the odd ones to a side output."""

    def process_element(self, value: Item, ctx) -> Iterable[Item]:
        if value.value % 2:
            yield ODD, Item(str(self.before >= 0), self.subtask)
        self.before += 1


class First(CoProcessFunction):
    """Numbers the records of the first stream."""

    def open(self, context):
        self.subtask, self.before = context.get_index_of_this_subtask(), 0

    def process_element1(self, value: Item, ctx) -> Iterable[Seen]:
        yield Seen(value.key, self.subtask, self.before)
        self.before += 1

    def process_element2(self, value: Item, ctx) -> Iterable[Seen]:
        return []


class Ruled(BroadcastProcessFunction):
    """The rule of each record, in the subtask that sees it."""

    def open(self, context):
        self.subtask, self.before = context.get_index_of_this_subtask(), 0

    def process_element(self, value: Item, ctx) -> Iterable[Seen]:
        yield Seen(f"{value.key}{ctx.get_broadcast_state(RULES).get('x')}", self.subtask, self.before)
        self.before += 1

    def process_broadcast_element(self, value: Item, ctx) -> Iterable[Seen]:
        ctx.get_broadcast_state(RULES).put(value.key, value.value)
        yield Seen(f"rule {value.key}", 0, 0)


class Each(KeyedProcessFunction):
    """An operator with state that gives what it gets."""

    def open(self, context):
        self.count = context.get_state(ValueStateDescriptor("count", int))

    def process_element(self, value: Item, ctx) -> Iterable[Item]:
        self.count.update((self.count.value() or 0) + 1)
        yield value


class EachRow(Each):
    def process_element(self, value: Row, ctx) -> Iterable[Row]:
        return super().process_element(value, ctx)


def kept(items: DataStream[Item]) -> DataStream[Item]:
    return items.key_by("key").process(Each())


def by_letter(stream: DataStream[Item]) -> DataStream[Item]:
    """a to 0, b to 1, c to 2."""
    return stream.partition_custom(lambda key, count: (ord(key) - ord("a")) % count, "key")


def by_pair(item: Item) -> tuple[str, int]:
    return item.key, item.value


def same(item: Item) -> Item:
    return item


def larger(a: Item, b: Item) -> Item:
    return max(a, b, key=lambda item: item.value)


def from_others(seen: Seen) -> bool:
    return seen.what[0] in "xyz"


class Streams(NamedTuple):
    items: DataStream[Item]
    others: DataStream[Item]


def numbers(count: int, what: str = "", subtask: int = 0) -> list[tuple[str, int, int]]:
    """One instance has seen all records."""
    return [(what, subtask, before) for before in range(count)]


LETTERS = [("a1", 0, 0), ("a4", 0, 0), ("b2", 1, 0), ("b5", 1, 0), ("c3", 2, 0)]
IN_BOTH = [(what, subtask, 0) for what, _, _ in LETTERS for subtask in range(2)]


def branches(s: Streams) -> DataStream[Seen]:
    one = s.items.global_()
    return one.process(Numbered()).union(one.map(same).process(Numbered()), one.process(Where()))


CASES: dict[str, tuple[Callable[[Streams], DataStream[Seen]], list[tuple[str, int, int]]]] = {
    "global": (lambda s: s.items.global_().process(Numbered()), numbers(5)),
    "by a field": (lambda s: by_letter(s.items).process(Where()).set_parallelism(3), LETTERS),
    "by a function": (
        lambda s: s.items.partition_custom(lambda pair, n: pair[1] % n, by_pair).process(Where()).set_parallelism(2),
        [("a1", 1, 0), ("a4", 0, 0), ("b2", 0, 0), ("b5", 1, 0), ("c3", 1, 0)],
    ),
    "broadcast": (lambda s: s.items.broadcast().process(Where()).set_parallelism(2), IN_BOTH),
    "broadcast to one": (lambda s: s.items.broadcast().process(Numbered()), numbers(5)),
    "behind a keyed operator": (lambda s: kept(s.items).global_().process(Numbered()), numbers(5)),
    "behind two": (
        lambda s: (
            by_letter(kept(kept(s.items).broadcast().map(same).set_parallelism(2))).process(Where()).set_parallelism(3)
        ),
        [*LETTERS, *LETTERS],
    ),
    "behind windows": (
        lambda s: (
            by_letter(
                s.items.assign_timestamps_and_watermarks(IN_ORDER)
                .key_by("key")
                .window(TumblingEventTimeWindows.of(timedelta(milliseconds=3)))
                .reduce(larger)
            )
            .process(Where())
            .set_parallelism(3)
        ),
        LETTERS,
    ),
    "event time behind": (
        lambda s: (
            s.items.global_()
            .assign_timestamps_and_watermarks(IN_ORDER)
            .key_by("key")
            .window(TumblingEventTimeWindows.of(timedelta(seconds=1)))
            .reduce(larger)
            .global_()
            .process(Where())
        ),
        [("a4", 0, 0), ("b5", 0, 0), ("c3", 0, 0)],
    ),
    "one behind another": (
        lambda s: by_letter(s.items).process(Where()).set_parallelism(3).global_().process(NumberedAgain()),
        numbers(5),
    ),
    "chained": (lambda s: s.items.global_().map(same).filter(lambda i: i.value > 1).process(Numbered()), numbers(4)),
    "branches": (branches, [*numbers(5), *numbers(5), *[(what, 0, 0) for what, _, _ in LETTERS]]),
    "united with a plain stream": (
        lambda s: s.others.global_().union(s.items).process(Where()).set_parallelism(2).filter(from_others),
        [("x10", 0, 0), ("y20", 0, 0), ("z30", 0, 0)],
    ),
    "a plain stream united": (
        lambda s: s.items.union(s.others.broadcast()).process(Where()).set_parallelism(2).filter(from_others),
        [(f"{key}{value}", subtask, 0) for key, value in OTHERS for subtask in range(2)],
    ),
    "all united": (lambda s: s.items.union(s.others).global_().process(Numbered()), numbers(8)),
    "each united": (lambda s: s.items.global_().union(s.others.global_()).process(Numbered()), numbers(8)),
    "united behind": (
        lambda s: s.items.global_().map(same).union(s.others.global_().map(same)).process(Numbered()),
        numbers(8),
    ),
    "united over a level": (lambda s: kept(s.items).union(s.others).global_().process(Numbered()), numbers(8)),
    "united over an exchange": (
        lambda s: by_letter(s.items).map(same).set_parallelism(3).union(s.others).global_().process(Numbered()),
        numbers(8),
    ),
    "partitioners united": (
        lambda s: (
            by_letter(s.items)
            .union(s.others.partition_custom(lambda key, n: 2, "key"))
            .process(Where())
            .set_parallelism(3)
        ),
        [*LETTERS, ("x10", 2, 0), ("y20", 2, 0), ("z30", 2, 0)],
    ),
    "a side output": (
        lambda s: (
            by_letter(s.items.process(Odd()).get_side_output(ODD).map(lambda i: Item("c", 3), Item))
            .process(Where())
            .set_parallelism(3)
        ),
        [("c3", 2, 0)] * 3,
    ),
    "a side output's exchange": (
        lambda s: s.items.process(Odd()).get_side_output(ODD).global_().process(Numbered()),
        numbers(3),
    ),
    "side outputs of subtasks": (
        lambda s: by_letter(s.items).process(Odd()).set_parallelism(3).get_side_output(ODD).process(Where()),
        [("True0", 0, 0), ("True1", 1, 0), ("True2", 2, 0)],
    ),
    "native behind": (
        lambda s: by_letter(s.items).where("value < 5").set_parallelism(3).process(Where()),
        [row for row in LETTERS if row[0] != "b5"],
    ),
    "native between": (lambda s: kept(s.items).global_().where("value > 1").process(Numbered()), numbers(4)),
    "native copies": (
        lambda s: kept(s.items.broadcast().where("value > 0").set_parallelism(2)).global_().process(Numbered()),
        numbers(10),
    ),
    "native only": (
        lambda s: s.items.global_().where("value > 3").key_by("key").process(Each()).global_().process(Numbered()),
        numbers(2),
    ),
    "native and plain united": (
        lambda s: (
            s.items.where("value > 3").union(s.others.global_().where("value > 10")).global_().process(Numbered())
        ),
        numbers(4),
    ),
    "connected": (
        lambda s: s.items.map(lambda i: Item("", 0), Item).global_().connect(s.others).process(First()),
        numbers(5),
    ),
    "broadcast and connected": (
        lambda s: (
            s.others.broadcast()
            .connect(s.items)
            .process(First())
            .set_parallelism(2)
            .map(lambda seen: Seen(seen.what, seen.subtask, 0), Seen)
        ),
        [(key, subtask, 0) for key in "xyz" for subtask in range(2)],
    ),
    "partitioned and connected": (
        lambda s: (
            by_letter(s.items)
            .connect(s.others)
            .process(First())
            .set_parallelism(3)
            .map(lambda seen: Seen(seen.what, seen.subtask, 0), Seen)
        ),
        [("a", 0, 0), ("a", 0, 0), ("b", 1, 0), ("b", 1, 0), ("c", 2, 0)],
    ),
    "before broadcast state": (
        lambda s: by_letter(s.items).connect(s.others.broadcast(RULES)).process(Ruled()).set_parallelism(3),
        [
            *[("a10", 0, 0), ("a10", 0, 1), ("b10", 1, 0), ("b10", 1, 1), ("c10", 2, 0)],
            *[(f"rule {key}", 0, 0) for key in "xyz"],
        ],
    ),
    "behind broadcast state": (
        lambda s: (
            s.items.global_()
            .connect(s.others.broadcast(RULES))
            .process(Ruled())
            .filter(lambda seen: not seen.what.startswith("rule"))
            .process(NumberedAgain())
        ),
        numbers(5),
    ),
    "before key_by": (
        lambda s: kept(s.items.broadcast()).global_().process(Numbered()),
        numbers(5),
    ),
}


def pipeline(sink: Callable[[str], Any], cases: Iterable[str] = tuple(CASES)) -> Pipeline:
    """Cases before one operator with state, in one table; what stands before a sink only, in another."""
    made = Pipeline("exchanges")
    others = made.from_collection(OTHERS, Item, "others")  # rules, which come before other records in the harness too
    streams = Streams(made.from_collection(ITEMS, Item, "items"), others)
    numbered = streams.items.global_().process(Numbered())
    rows = [CASES[case][0](streams).map(_Labelled(case), Row) for case in cases]
    rows.append(numbered.map(_Labelled("before state"), Row))
    rows[0].union(*rows[1:]).key_by("case").process(EachRow()).sink_to(sink("cases"))
    numbered.process(NumberedAgain()).map(_Labelled("before a sink"), Row).sink_to(sink("branch"))
    return made


class _Labelled:
    def __init__(self, case: str) -> None:
        self.case = case

    def __call__(self, seen: Seen) -> Row:
        return Row(self.case, *seen)


def expected(cases: Iterable[str] = tuple(CASES)) -> dict[str, Counter[Row]]:
    """What the tables hold."""
    found = {case: CASES[case][1] for case in cases} | {"before state": numbers(5)}
    return {
        "cases": Counter(Row(case, *row) for case, rows in found.items() for row in rows),
        "branch": Counter(Row("before a sink", *row) for row in numbers(5)),
    }
