"""Functions in the language that is read, made at random, and records of awkward values for them."""

import importlib.util
import math
import random
import sys

HEAD = """
from typing import NamedTuple

class Taken(NamedTuple):
    i: int
    j: int
    ni: int | None
    x: float
    y: float
    nx: float | None
    s: str
    t: str
    ns: str | None
    b: bool
    c: bool

class Made(NamedTuple):
    i: int
    n: int | None
    x: float
    s: str
    b: bool
"""

FORMS = (
    "def f{k}(p):\n    return Made({int}, {maybe}, {float}, {str}, {bool})",
    "f{k} = lambda p: Made(i={int}, n=p.ni, x=p.x, s={str}, b={bool})",
    "def f{k}(p):\n    a = {int}\n    if {bool}:\n        return Made(a, None, {float}, p.s, True)\n"
    "    return Made({int2}, a, p.y, {str}, {bool2})",
    "def f{k}(p):\n    a = {float}\n    b = {str}\n    return Made(len(b), p.i, a, b, a > {float2})",
    "def f{k}(p):\n    a = {int}\n    if a > 3:\n        a += {int2}\n    elif {bool}:\n        a = {int3}\n"
    "    return Made(a, p.ni, {float}, {str}, p.b)",
)
FILTERS = ("def g{k}(p):\n    return {bool}", "g{k} = lambda p: {bool} or {bool2}")
KEPT = "def h{k}(p):\n    return p._replace(i={int}, x={float}, s={str})"


class Generator:
    """Makes the text of expressions, by their type and depth."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def pick(self, *choices):
        return self.random.choice(choices)

    def of(self, kind, depth):
        if depth <= 0:
            return self.pick(*LEAVES[kind])
        text = self.pick(*GROWN[kind])
        depth = min(depth, 1) if text.startswith("f") else depth  # until Python 3.12 none is in another one
        for other in ("INT", "FLOAT", "STR", "BOOL"):
            while other in text:
                text = text.replace(other, self.of(other.lower(), depth - 1), 1)
        return text

    def filled(self, form, number):
        depth = self.pick(1, 1, 2, 2, 3)
        kinds = ("int", "int2", "int3", "float", "float2", "str", "bool", "bool2")
        parts = {name: self.of(name.rstrip("23"), depth) for name in kinds}
        maybe = self.pick("p.ni", "None", parts["int2"])
        return form.format(k=number, maybe=maybe, **parts)


LEAVES = {
    "int": ("p.i", "p.j", "p.ni", "p.i", "p.j", "0", "1", "2", "-3", "7", "1000", str(2**53 + 1), str(2**62)),
    "float": ("p.x", "p.y", "p.nx", "p.x", "p.y", "0.0", "1.5", "-0.0", "1e308", "2.5"),
    "str": ("p.s", "p.t", "p.ns", "p.s", "p.t", "''", "'a'", "'É'", "' 12 '", "'12'"),
    "bool": ("p.b", "p.c", "True", "p.ni is None", "p.nx is not None", "p.ns is None"),
}
GROWN = {
    "int": (
        *(f"(INT {operator} INT)" for operator in ("+", "-", "*", "//", "%")),
        *("(-INT)", "abs(INT)", "(INT if BOOL else INT)", "min(INT, INT)", "max(INT, INT)", "len(STR)", "int(STR)"),
        *("int(FLOAT)", "(p.ni or INT)", "INT ** 2", "round(FLOAT)", "STR.find('a')", "{'a': 1, '12': 7}[STR]"),
    ),
    "float": (
        *("(FLOAT + FLOAT)", "(FLOAT + INT)", "(FLOAT - FLOAT)", "(INT * FLOAT)", "(FLOAT / INT)", "(INT / INT)"),
        *("(-FLOAT)", "abs(FLOAT)", "(FLOAT if BOOL else FLOAT)", "min(FLOAT, FLOAT)", "max(FLOAT, FLOAT)"),
        *("float(INT)", "float(STR)", "(FLOAT // FLOAT)", "(FLOAT % INT)", "round(FLOAT, 2)"),
    ),
    "str": (
        *("(STR + STR)", "STR.lower()", "STR.upper()", "STR.strip()", "STR.title()", "(STR if BOOL else STR)"),
        *("STR[1:]", "STR[:3]", "STR[1:2]", "STR[INT]", "STR.replace('a', 'bb')", "STR.split(' ')[0]", "str(INT)"),
        *('f"{INT}-{p.t}"', 'f"{FLOAT:.2f}{STR!r}"', "(p.ns or STR)", "max(STR, STR)", "str(FLOAT)", "(STR * 2)"),
    ),
    "bool": (
        *("(BOOL and BOOL)", "(BOOL or BOOL)", "(not BOOL)", "(not INT)", "(not STR)", "(INT < INT)", "(INT >= FLOAT)"),
        *("(STR == STR)", "(FLOAT != FLOAT)", "(STR <= STR)", "(INT < INT <= INT)", "(INT in (1, 2, 7, -3))"),
        *("(STR not in ('a', 'É', ''))", "STR.startswith('a')", "STR.endswith(('É', ''))", "('a' in STR)"),
        *("(BOOL if BOOL else BOOL)", "(p.ni == p.i)", "(INT == STR)", "bool(STR)", "(INT in [p.i, p.j])"),
    ),
}

INTS = [0, 1, -1, 2, 7, -3, 1000, 2**31, 2**53, 2**53 + 1, -(2**53) - 1, 2**62, 2**63 - 1, -(2**63), 12]
FLOATS = [0.0, -0.0, 1.0, -1.5, 2.5, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf, 2.0**53, 2.0**63, 0.1]
TEXTS = ["", "a", "A", " a ", "É", "é", "ß", "ǅ", "Σ", "İ", "12", "-7", " 12 ", "1_0", "\uff11\uff12", "1.5", "nan"]
TEXTS += ["1e5", "\u00a0x\u2003", "\U0001f600", "e\u0301", "a\x00b", "\x1c\x85", "z" * 30, "aaa", "%_\\", "\n", "{}"]
TAME = [0, 1, 2, 3, -3, 12, 7, -8], [0.5, 1.0, -2.25, 3.0, 100.0], ["a", "b", "12", "abc", " a"]


def module(folder, seed, count):
    """Some functions of each kind, in a module of their own: those that make records, filters, and those that keep."""
    generator = Generator(seed)
    lines = [HEAD]
    for number in range(count):
        lines += [generator.filled(generator.pick(*FORMS), number), generator.filled(generator.pick(*FILTERS), number)]
        lines.append(generator.filled(KEPT, number))
    path = folder / f"generated_{seed}.py"
    path.write_text("\n".join(lines) + "\n")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    made = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = made
    spec.loader.exec_module(made)
    return made


def records(taken, seed, count):
    """Records, half of them of awkward values."""
    chance = random.Random(seed)
    made = []
    for number in range(count):
        ints, floats, texts = (INTS, FLOATS, TEXTS) if number % 2 else TAME
        pick = chance.choice

        def maybe(value):
            return None if chance.random() < 0.2 else value

        made.append(
            taken(
                pick(ints), pick(ints), maybe(pick(ints)), pick(floats), pick(floats), maybe(pick(floats)),
                pick(texts), pick(texts), maybe(pick(texts)), pick((True, False)), pick((True, False)),
            )
        )  # fmt: skip
    return made


def same(one, other):
    """Whether two values are equal and of one type, not-a-number and the sign of zero included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if type(one) is float:
        return repr(one) == repr(other)
    return one == other
