"""Functions that seem to be something else than they are: they are refused, or give what Python gives."""

import builtins
import dataclasses
import importlib.util
import math
import subprocess
import sys
import time
from typing import NamedTuple

import pytest

from dagster_unified.graph.lowering.inlining import inlined_filter, inlined_map
from dagster_unified.graph.lowering.reducing import built_in, reduced
from dagster_unified.graph.lowering.source import UnreadableError
from dagster_unified.operators.program.blocks import Block
from dagster_unified.operators.program.inlined import InlinedChain
from dagster_unified.records import record_type


class One(NamedTuple):
    i: int
    j: int
    b: bool
    s: str
    x: float


@dataclasses.dataclass
class Ordered:
    a: int = dataclasses.field(kw_only=True, default=7)
    b: int = 0


@dataclasses.dataclass
class ByName:
    c: int = dataclasses.field(kw_only=True, default=7)
    d: int


@dataclasses.dataclass
class Clamped:
    a: int

    def __setattr__(self, name, value):
        object.__setattr__(self, name, max(0, value))


@dataclasses.dataclass
class Capped:
    a: int
    b: str = ""

    def __post_init__(self):
        self.a = min(self.a, 100)


class Defaulted(NamedTuple):
    a: int
    b: int = 1


Defaulted.__new__.__defaults__ = (5,)


class Swapped(NamedTuple):
    a: int
    b: int


Swapped.a, Swapped.b = Swapped.b, Swapped.a


def called():
    pass


def attributed(x: int) -> int:
    return x + 1


attributed.map = lambda x: x * 100


def sets_later(x: int) -> int:
    y = math.floor(x)  # noqa: F823
    math = 3  # noqa: F841
    return y


def in_a_generator():
    n = 1
    yield lambda x: x + n
    n = 2
    yield None


def growing():
    n = 0
    numbers = ((n := n + 1) for _ in range(9))
    return numbers, lambda x: x + n


class Box:
    def f(x: int) -> int:
        return x + __HIDDEN

    g = f


__HIDDEN = 3
_Box__HIDDEN = 5


def agrees(function, taken, made, values):
    """Whether the function is refused, or what is inlined gives what it gives, or nothing."""
    taken, made = record_type(taken), record_type(made)
    try:
        chain = InlinedChain([inlined_map(function, taken, made)], taken, made)
    except UnreadableError:
        return True
    for value in values:
        found = chain.run(Block(None, taken.to_batch([value]), None, taken))
        try:
            expected = made.from_batch(made.to_batch([made.normal(function(value))]))
        except Exception:
            expected = None
        if found is not None and repr(made.from_batch(found.columns)) != repr(expected):
            return False
    return True


RUN = getattr(builtins, "ex" + "ec")  # a file that names it may set any global, and is not read
NUMBERS = [-5, 0, 5]
ONES = [One(1, 2, True, "%.1f", 4.0), One(0, 3, False, "%.1f", 4.0), One(-2, 3, False, "ab", 0.5)]
GENERATED = next(in_a_generator())
CASES = {
    "fields in another order": (lambda x: Ordered(b=x, a=100), int, Ordered, NUMBERS),
    "fields by name alone": (lambda x: Ordered(x), int, Ordered, NUMBERS),
    "fields by name alone, in another order": (lambda x: ByName(x), int, ByName, NUMBERS),
    "a class that sets otherwise": (lambda x: Clamped(x), int, Clamped, NUMBERS),
    "a method of a NamedTuple on a dataclass": (lambda r: r._replace(b=1), Ordered, Ordered, [Ordered(1, a=2)]),
    "replace of a NamedTuple": (lambda r: dataclasses.replace(r, a=1), Defaulted, Defaulted, [Defaulted(2, 3)]),
    "other defaults": (lambda x: Defaulted(x), int, Defaulted, NUMBERS),
    "swapped fields": (lambda r: r.a, Swapped, int, [Swapped(1, 2)]),
    "a function with attributes": (attributed, int, int, NUMBERS),
    "a name that is set later": (sets_later, int, int, NUMBERS),
    "a name of a class": (Box.g, int, int, NUMBERS),
    "%": (lambda r: (r.x if r.b else r.s) % 2.0, One, float, ONES),
    "*": (lambda r: r.i * (r.j if r.b else r.s), One, int, ONES),
    "half a character": (lambda r: f"{r.i:\ud800>5}", One, str, ONES),
    "a large number": (lambda x: x + 0x1 << 99999, int, int, NUMBERS),
}


@pytest.mark.parametrize("case", CASES)
def test_what_seems_to_be_something_else_is_refused_or_gives_the_same(case):
    assert agrees(*CASES[case])


def test_a_closure_that_a_generator_sets_later_is_refused():
    numbers, function = growing()
    for closing in (GENERATED, function):
        with pytest.raises(UnreadableError, match="may be set again"):
            inlined_map(closing, record_type(int), record_type(int))
    assert next(numbers) == 1


def test_a_lambda_in_a_lambda_is_not_taken_for_it():
    with pytest.raises(UnreadableError, match="one of several"):
        inlined_filter(lambda x: lambda x: x > 1, record_type(int))


def test_a_class_that_does_more_is_summed_by_its_function():
    with pytest.raises(UnreadableError, match="does more"):
        built_in("sum", "a", record_type(Capped))
    with pytest.raises(UnreadableError):
        reduced(lambda p, q: Clamped(p.a + q.a), record_type(Clamped))
    assert reduced(lambda p, q: ByName(max(p.d, q.d), c=q.c), record_type(ByName)).ways == ("max", "last")


def module(folder, name, text):
    (folder / f"{name}.py").write_text(text)
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def test_what_another_module_binds_again_is_not_read(tmp_path):
    module(tmp_path, "helping", "def scale(x): return x * 2\ndef change():\n    global scale\n    scale = abs\n")
    user = module(tmp_path, "using", "import helping\ndef f(x): return helping.scale(x)\n")
    with pytest.raises(UnreadableError, match="which may change"):
        inlined_map(user.f, record_type(int), record_type(int))
    text = "LIMIT = 3\ndef f(x): return x + LIMIT\ndef change(): globals()['LIMIT'] = 30\n"
    with pytest.raises(UnreadableError, match="may change"):
        inlined_map(module(tmp_path, "setting", text).f, record_type(int), record_type(int))


def test_cells_of_a_notebook_share_their_globals(tmp_path):
    namespace = {"__name__": "__main__"}
    for number, text in enumerate(("LIMIT = 3\ndef f(x): return x + LIMIT\n", "LIMIT = 3\n")):
        (tmp_path / f"cell{number}.py").write_text(text)
        code = compile(text, str(tmp_path / f"cell{number}.py"), "exec")
        RUN(code, namespace)
    with pytest.raises(UnreadableError, match="may change"):
        inlined_map(namespace["f"], record_type(int), record_type(int))


def test_without_columns_of_the_code_two_lambdas_of_a_line_are_refused(tmp_path):
    (tmp_path / "two.py").write_text("both = [lambda x: x + 1, lambda x: x * 100]\n")
    script = (
        "from two import both\nfrom dagster_unified.graph.lowering.inlining import inlined_map\n"
        "from dagster_unified.records import record_type\n"
        "inlined_map(both[1], record_type(int), record_type(int))\n"
    )
    done = subprocess.run(
        [sys.executable, "-X", "no_debug_ranges", "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert "keeps no columns of its code" in done.stderr


def test_long_functions_are_refused_soon(tmp_path):
    branches = "".join(f"    elif x == {n}: y = {n}\n" for n in range(210))
    texts = {
        "branches": f"def f(x):\n    if x < 0: y = 0\n{branches}    else: y = 1\n    return y\n",
        "terms": f"def f(x): return {' + '.join(['x'] * 400)}\n",
        "statements": "def f(x):\n" + "    x = x + 1\n" * 300 + "    return x\n",
        "calls": "def a(x): return x + 1\n"
        + "".join(f"def {n}(x): return {p}(x) + {p}(x) + {p}(x) + {p}(x)\n" for p, n in zip("abcdefg", "bcdefgf"))
        + "",
    }
    for name, text in texts.items():
        begun = time.process_time()
        with pytest.raises((UnreadableError, RecursionError)):
            inlined_map(module(tmp_path, f"long_{name}", text).f, record_type(int), record_type(int))
        assert time.process_time() - begun < 5
