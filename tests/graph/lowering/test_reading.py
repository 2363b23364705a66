"""Which functions are read, and why others are not: strangers' functions, and such as do more than they seem to."""

import ast
import dataclasses
import datetime as dt
import functools
import importlib.util
import json
import linecache
import math
import random
import sys
import time
from types import FunctionType, SimpleNamespace
from typing import NamedTuple

import pytest

from dagster_unified.graph.lowering import source
from dagster_unified.graph.lowering.inlining import inlined_filter, inlined_map
from dagster_unified.graph.lowering.source import UnreadableError
from dagster_unified.records import record_type


class Sale(NamedTuple):
    shop: str
    amount: int
    rate: float | None
    at: dt.datetime
    tags: list[str]


@dataclasses.dataclass(frozen=True)
class Order:
    id: int
    name: str = "none"


class WithProperty(NamedTuple):
    amount: int

    @property
    def twice(self):
        return self.amount * 2


class Patched(NamedTuple):
    amount: int


Patched.__new__ = staticmethod(lambda cls, amount: tuple.__new__(cls, (amount + 1,)))


class PatchedLater(NamedTuple):
    amount: int


PatchedLater._replace = lambda self, **fields: self


@dataclasses.dataclass
class Counted:
    id: int

    def __post_init__(self):
        self.id += 1


class Answer(int):
    def __add__(self, other):
        return 42


class Own(dt.tzinfo):
    def utcoffset(self, moment):
        return dt.timedelta(0)


LIMIT, TWICE, LISTED = 3, 1, [1, 2]
TWICE = 2
ONCE = 3
DERIVED = ONCE * 2
COUNT = 0
PLACES = {"north": 1}


def counts(s):
    global COUNT
    COUNT += 1
    return s.amount > COUNT


def reads_count(s):
    return s.amount > COUNT


def remembers(s, seen=[]):
    seen.append(s)
    return True


@functools.lru_cache
def cached(s):
    return s.amount > 1


def helper(amount):
    return amount + ONCE


def noisy(amount):
    print(amount)
    return amount


def closing_over(bound):
    return lambda s: s.amount + 1 > bound


def rebinding():
    value = 1

    def change():
        nonlocal value
        value += 1

    return lambda s: s.amount > value


def loops(s):
    total = 0
    for number in range(s.amount):
        total += number
    return total > 3


def tries(s):
    try:
        return s.amount > 1
    except ValueError:
        return False


def branches(s):
    if s.rate is None:
        return False
    if s.rate > 1.5:
        big = s.amount > 2
        far = s.shop == "far"
    else:
        big, far = s.amount > 4, False
    return big and not far and s.shop != ""


def parts(s):
    name, place = s.shop.split("-")
    return name > place


def unset(s):
    if s.amount > 1:
        late = 1
    return late > 0


def unpacks(pair):
    name, value = pair
    return value > 1 and name in ("a", "b")


READ = {
    "a global that is set once, to a literal": lambda s: s.amount > ONCE,
    "a global that is computed of such": lambda s: s.amount > DERIVED,
    "a closure over what cannot change": closing_over(3),
    "a function of the module": lambda s: helper(s.amount) > 5,
    "branches": branches,
    "a condition that raises for None": lambda s: s.rate > 1,
    "a chain of comparisons": lambda s: 1 < s.amount <= 7,
    "text": lambda s: (s.shop.strip().lower().startswith(("n", "s")) and len(s.shop) > 2) or "x" in s.shop,
    "split": lambda s: s.shop.split("-")[0] == "north",
    "a written collection": lambda s: s.shop in {"north", "south"} and s.amount not in [1, s.amount + 1],
    "a written dict": lambda s: {"north": 1, "south": 2}.get(s.shop, 0) > 1,
    "f-strings": lambda s: f"{s.shop!r}: {s.amount:>5}" == "x",
    "Python's numbers": lambda s: round(abs(s.amount - 3) / 2, 1) ** 2 > math.floor(s.rate or 0.5),
    "moments": lambda s: s.at.year == 2024 and s.at.date().weekday() < 5,
    "spans and days": lambda s: s.at - dt.timedelta(hours=1) > dt.datetime(2024, 1, 1, tzinfo=None),
    "parts of a text": parts,
    "a default": lambda s, least=3: s.amount > least,
    "what a list is not": lambda s: s.tags is not None,
}
NOT_READ = {
    "is no plain function": functools.partial(lambda n, s: s.amount > n, 3),
    "the global 'LIMIT' may change": lambda s: s.amount > LIMIT,
    "the global 'TWICE' may change": lambda s: s.amount > TWICE,
    "the global 'LISTED' may change": lambda s: s.amount in LISTED,
    "PLACES": lambda s: PLACES.get(s.shop) is None,
    "global is not read": counts,
    "the global 'COUNT' may change": reads_count,
    "a default may change": remembers,
    "it takes other arguments": lambda s, other: s.amount > 1,
    "it calls json.loads": lambda s: json.loads(s.shop) is None,
    "bound may change": closing_over(dt.datetime(2024, 1, 1, tzinfo=Own())),
    "a _lru_cache_wrapper is no plain function": cached,
    "[1] may change, or is of a class that is not known": closing_over([1]),
    "is of a class that is not known": closing_over(Answer(1)),
    "'value' may be set again": rebinding(),
    "a loop is not read": loops,
    "try is not read": tries,
    "'late' may not be set there": unset,
    "it calls random.random": lambda s: random.random() < 0.5,
    "it calls time.time": lambda s: time.time() > s.amount,
    "it calls dt.datetime.now": lambda s: dt.datetime.now() > s.at,
    "what str makes of s": lambda s: str(s) == "",
    "it calls noisy: a call whose result is not used": lambda s: noisy(s.amount) > 1,
    "what is in s.tags": lambda s: "x" in s.tags,
    ":= is not read": lambda s: (n := s.amount) > 1 and n < 5,
    "'is' is read for None": lambda s: s.amount is s.amount,
    "a comprehension is not read": lambda s: [x + x for x in s.shop] == [],
    "it is not known what s.at.tzinfo is": lambda s: s.at.tzinfo is None,
    "it calls s.shop.encode": lambda s: s.shop.encode() == b"",
    "it may return None": lambda s: s.rate,
}


@pytest.mark.parametrize("function", READ.values(), ids=READ)
def test_functions_that_are_read(function):
    inlined_filter(function, record_type(Sale))


@pytest.mark.parametrize("why", NOT_READ)
def test_functions_that_are_not_read_and_why(why):
    with pytest.raises(UnreadableError) as raised:
        inlined_filter(NOT_READ[why], record_type(Sale))
    text = str(raised.value)
    assert why.removeprefix("[1] ") in text or why in text


def test_a_record_is_made_by_place_by_name_with_defaults_and_of_another():
    order, sale = record_type(Order), record_type(Sale)
    assert inlined_map(lambda o: Order(o.id + 1), order, order).fields == ("L0", "R1")
    assert inlined_map(lambda o: Order(name=o.name, id=o.id), order, order).fields == ("F0", "F1")
    assert inlined_map(lambda o: dataclasses.replace(o, id=-o.id), order, order).fields == ("L0", "F1")
    assert inlined_map(lambda s: s._replace(amount=s.amount), sale, sale).fields == ("F0", "F1", "F2", "F3", "F4")
    assert inlined_map(lambda s: Order(s.amount, s.shop), sale, order).fields == ("F1", "F0")
    assert inlined_map(lambda s: (s.shop, 1), sale, record_type(tuple[str, int])).fields == ("F0", "R1")
    assert inlined_map(lambda p: p[1], record_type(tuple[str, int]), record_type(int)).fields == ("F1",)
    assert inlined_filter(unpacks, record_type(tuple[str, int])).reads == (0, 1)


def test_each_value_is_of_its_fields_own_type():
    """Where the normal form of what a function returns is another value, the function makes it."""
    order, ratio = record_type(Order), record_type(tuple[float, int])
    for function, taken, made in (
        (lambda o: (o.id, o.id), order, ratio),
        (lambda o: (1.5, o.id > 1), order, ratio),
        (lambda s: s.at - s.at, record_type(Sale), record_type(dt.timedelta)),
    ):
        with pytest.raises(UnreadableError, match="another type than its own"):
            inlined_map(function, taken, made)


@pytest.mark.parametrize("python", [WithProperty, Patched, PatchedLater, Counted])
def test_classes_that_do_more_than_hold_their_fields(python):
    kind = record_type(python)
    functions = {WithProperty: lambda r: r.twice > 1, Counted: lambda r: r.id > 1}
    with pytest.raises(UnreadableError, match=r"does more than hold its fields|not known what r\.twice is"):
        inlined_filter(functions.get(python, lambda r: r.amount > 1), kind)


def loaded(folder, text, name):
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_a_file_that_was_edited_does_not_say_what_runs(tmp_path):
    module = loaded(tmp_path, "def f(n):\n    return n > 1\n", "edited")
    (tmp_path / "edited.py").write_text("def f(n):\n    return n > 2\n")
    linecache.checkcache()
    with pytest.raises(UnreadableError, match="not what runs"):
        inlined_filter(module.f, record_type(int))


def test_two_functions_in_one_line_are_told_apart():
    first, second = (lambda n: n > 1), (lambda n: n > 2)
    assert [inlined_filter(f, record_type(int)).constants for f in (first, second)] == [{"C0": 1}, {"C0": 2}]


def test_what_has_no_source_or_other_source_is_not_read(tmp_path):
    made = FunctionType(compile("def f(n):\n    return n > 1", "<string>", "exec").co_consts[0], {})
    with pytest.raises(UnreadableError, match="not there"):
        inlined_filter(made, record_type(int))
    text = "def double(f):\n    return lambda n: f(n) * 2\n\n@double\ndef f(n):\n    return n > 1\n"
    with pytest.raises(UnreadableError, match=r"may change|it calls f"):
        inlined_filter(loaded(tmp_path, text, "decorated").f, record_type(int))


def test_a_global_that_another_module_has_set_is_not_read(tmp_path):
    module = loaded(tmp_path, "LIMIT = 1\ndef f(n):\n    return n > LIMIT\n", "patched")
    assert inlined_filter(module.f, record_type(int)).constants == {"C0": 1}
    module.LIMIT = 2
    with pytest.raises(UnreadableError, match="'LIMIT' may change"):
        inlined_filter(module.f, record_type(int))


def test_a_file_is_parsed_once(monkeypatch):
    inlined_filter(READ["branches"], record_type(Sale))
    parsed = []

    def parse(text, *how, **more):
        parsed.append(text)
        return ast.parse(text, *how, **more)

    monkeypatch.setattr(source, "ast", SimpleNamespace(**{**vars(ast), "parse": parse}))
    for function in READ.values():
        inlined_filter(function, record_type(Sale))
    assert not parsed
