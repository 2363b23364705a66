"""Reads a function: from its text to the language, or to the reason why not.

What is read is what the function computes for any record. Whatever could do more is refused: a clock, a random number,
state, a class whose code is not known, an operation whose meaning depends on a class that is not.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import math
import operator
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from itertools import count
from types import NoneType
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from dagster_unified.graph.fingerprint import is_installed
from dagster_unified.graph.lowering.language import (
    ANY,
    ATTRIBUTES,
    BOOL,
    FLOAT,
    INT,
    METHODS,
    NONE,
    NOTHING,
    PLAIN,
    TEXT,
    Bound,
    Built,
    Conditional,
    Constant,
    Each,
    Expression,
    Field,
    Kept,
    Kinds,
    Local,
    Operation,
    Texts,
    elements_of,
    of_pair,
)
from dagster_unified.graph.lowering.module_globals import globals_of
from dagster_unified.graph.lowering.record_classes import check_class, fields_of, kinds_of_attribute
from dagster_unified.graph.lowering.source import (
    UnreadableError,
    definition_of,
    may_change_outside,
    method_of,
)
from dagster_unified.operators.functions.base import Function
from dagster_unified.operators.program.inlined import exactly

_DEPTH, _PATHS, _STEPS = 8, 100, 1000
"""How deep functions may call others, how many ways there may be through one, and how many expressions are read."""

_BITS = 1000
"""Of the largest number that is a constant."""

_BINARY: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
}
_COMPARED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.Is: "is",
    ast.IsNot: "is not",
}
_SIGNS: dict[type[ast.unaryop], str] = {ast.USub: "-", ast.UAdd: "+", ast.Invert: "~"}

_OF_CONSTANTS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}
"""What is done once with numbers that are the same for all records."""

_SIGNED: dict[type, type] = {bool: int, int: int, float: float}


class _Function(NamedTuple):
    """A function of Python's own."""

    at_least: int
    at_most: int
    gives: Callable[[Sequence[Kinds]], Kinds]
    """Says of which classes the results are."""

    takes: Kinds


def _gives(kinds: Kinds) -> Callable[[Sequence[Kinds]], Kinds]:
    return lambda _: kinds


def _union(given: Iterable[Kinds]) -> Kinds:
    return frozenset(kind for kinds in given for kind in kinds)


def _signed(given: Sequence[Kinds]) -> Kinds:
    return frozenset(_SIGNED.get(kind, kind) for kind in given[0])


def _rounded(given: Sequence[Kinds]) -> Kinds:
    return INT if len(given) == 1 else _signed(given)


_NUMBERS: Kinds = frozenset([bool, int, float])
_SIZED: Kinds = frozenset([str, bytes, Texts])

_FUNCTIONS: dict[Any, _Function] = {
    len: _Function(1, 1, _gives(INT), _SIZED),
    abs: _Function(1, 1, _signed, _NUMBERS),
    min: _Function(2, 9, _union, PLAIN),
    max: _Function(2, 9, _union, PLAIN),
    round: _Function(1, 2, _rounded, _NUMBERS),
    int: _Function(1, 1, _gives(INT), _NUMBERS | TEXT),
    float: _Function(1, 1, _gives(FLOAT), _NUMBERS | TEXT),
    str: _Function(1, 1, _gives(TEXT), PLAIN),
    bool: _Function(1, 1, _gives(BOOL), PLAIN),
    **{f: _Function(1, 1, _gives(INT), _NUMBERS) for f in (math.floor, math.ceil, math.trunc)},
    **{f: _Function(1, 1, _gives(FLOAT), _NUMBERS) for f in (math.sqrt, math.log, math.log2, math.log10, math.exp)},
    **{f: _Function(1, 1, _gives(BOOL), _NUMBERS) for f in (math.isnan, math.isinf, math.isfinite)},
}


_CONSTANTS = (timedelta, datetime, date, Decimal)
"""Classes of Python's own whose objects are the same for the same arguments."""


def read(function: Any, method: str, *arguments: Expression, emits: bool = False) -> Expression:
    """Return what a function, or this method of a function object, computes or emits; raises `UnreadableError`.

    Of an object, only methods are read that do not use it, and that nothing can replace before they are called.
    """
    if not isinstance(function, Function):
        return Reader().read(function, *arguments, emits=emits)
    found = method_of(function, method)
    if type(function).open is not Function.open:
        raise UnreadableError("its open() may change it")
    return Reader().read(found, Operation(ANY, "", ()), *arguments, emits=emits)


class Reader:
    """Reads functions; the locals that it numbers are of one operator."""

    def __init__(self) -> None:
        self._numbers = count()
        self._paths, self._steps = _PATHS, _STEPS

    def read(self, function: Any, *arguments: Expression, depth: int = 0, emits: bool = False) -> Expression:
        """Return what a function computes of these arguments, or what it emits; raises `UnreadableError`."""
        if depth > _DEPTH:
            raise UnreadableError("functions call each other too deeply")
        definition = definition_of(function, emits)
        taken = definition.args
        names = [argument.arg for argument in (*taken.posonlyargs, *taken.args)]
        missing = len(names) - len(arguments)
        defaults = (function.__defaults__ or ())[-missing:] if missing > 0 else ()
        if taken.vararg or taken.kwarg or taken.kwonlyargs or len(defaults) != missing:
            raise UnreadableError(f"it takes other arguments than {len(arguments)}")
        body = _Body(self, function, depth)
        by_default = [body.fixed(definition, value) for value in defaults]
        given = dict(zip(names, [*arguments, *by_default], strict=True))
        if isinstance(definition, ast.Lambda):
            return (body.each_of if emits else body.value)(definition.body, given)
        if emits:
            yields = function.__code__.co_flags & inspect.CO_GENERATOR
            return (body.yielded if yields else body.returned)(definition.body, given)
        return body.block(definition.body, given)

    def bind(self, value: Expression, then: Callable[[Expression], Expression]) -> Expression:
        """Compute a value once, before what is made of it."""
        if isinstance(value, Bound):
            return Bound(ANY, value.number, value.value, self.bind(value.body, then))
        if isinstance(value, Built):
            return self._bind_fields(value, list(value.fields.items()), {}, then)
        if isinstance(value, (Field, Local, Constant)):
            return then(value)
        local = Local(value.kinds, next(self._numbers))
        return Bound(ANY, local.number, value, then(local))

    def _bind_fields(
        self,
        value: Built,
        fields: list[tuple[str, Expression]],
        bound: dict[str, Expression],
        then: Callable[[Expression], Expression],
    ) -> Expression:
        if not fields:
            return then(Built(ANY, value.python, bound))
        name, field = fields[0]
        return self.bind(field, lambda known: self._bind_fields(value, fields[1:], {**bound, name: known}, then))

    def each(self, found: Expression, emitted: Callable[[Local], Expression]) -> Expression:
        """Return what is emitted for each element of a list."""
        local = Local(elements_of(_result(found).kinds) or ANY, next(self._numbers))
        return Each(ANY, local.number, found, emitted(local))

    def path(self) -> None:
        """Count a way through a function."""
        self._paths -= 1
        if not self._paths:
            raise UnreadableError("there are too many ways through it")

    def step(self) -> None:
        """Count an expression."""
        self._steps -= 1
        if not self._steps:
            raise UnreadableError("it is too long")

    def choose(self, test: Expression, yes: Expression, no: Expression) -> Expression:
        """Return one of two values; of records each field is chosen."""
        if not isinstance(_result(yes), Built) and not isinstance(_result(no), Built):
            return Conditional(_result(yes).kinds | _result(no).kinds if _known(yes, no) else ANY, test, yes, no)
        return self.bind(test, lambda known: self._choose_records(known, yes, no))

    def _choose_records(self, test: Expression, yes: Expression, no: Expression) -> Expression:
        if isinstance(yes, Bound):
            value = Conditional(yes.value.kinds, test, yes.value, Constant(NONE, None))
            return Bound(ANY, yes.number, value, self._choose_records(test, yes.body, no))
        if isinstance(no, Bound):
            value = Conditional(no.value.kinds, test, Constant(NONE, None), no.value)
            return Bound(ANY, no.number, value, self._choose_records(test, yes, no.body))
        refused = UnreadableError("it returns records of several kinds")
        if not isinstance(yes, Built) or not isinstance(no, Built):
            raise refused
        if yes.python is not no.python or yes.fields.keys() != no.fields.keys():
            raise refused
        pairs = {name: (value, no.fields[name]) for name, value in yes.fields.items()}
        fields = {name: one if one is other else self.choose(test, one, other) for name, (one, other) in pairs.items()}
        return Built(ANY, yes.python, fields)


def _result(value: Expression) -> Expression:
    while isinstance(value, Bound):
        value = value.body
    return value


def _known(*values: Expression) -> bool:
    return all(_result(value).kinds for value in values)


class _Body:
    """Reads the body of one function."""

    def __init__(self, reader: Reader, function: types.FunctionType, depth: int) -> None:
        self._reader, self._function, self._depth = reader, function, depth
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self._closed = dict(cells)

    # Statements

    def block(self, statements: Sequence[ast.stmt], known: Mapping[str, Expression]) -> Expression:
        self._reader.path()
        if not statements:
            return Constant(NONE, None)
        first, rest = statements[0], statements[1:]
        if isinstance(first, ast.Return):
            return Constant(NONE, None) if first.value is None else self.value(first.value, known)
        if isinstance(first, ast.Pass) or (isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)):
            return self.block(rest, known)
        if isinstance(first, ast.Assign) and len(first.targets) == 1:
            return self._assigned(first.targets[0], first.value, rest, known)
        if isinstance(first, ast.AnnAssign) and first.value is not None:
            return self._assigned(first.target, first.value, rest, known)
        if isinstance(first, ast.AugAssign) and isinstance(first.target, ast.Name):
            whole = ast.BinOp(ast.Name(first.target.id, ast.Load()), first.op, first.value)
            return self._assigned(first.target, ast.copy_location(whole, first), rest, known)
        if isinstance(first, ast.If):
            test = self.scalar(first.test, known)
            return self._reader.choose(
                test, self.block([*first.body, *rest], known), self.block([*first.orelse, *rest], known)
            )
        raise self._refused(first, f"{_words(first)} is not read")

    # What a function emits

    def returned(self, statements: Sequence[ast.stmt], known: Mapping[str, Expression]) -> Expression:
        """Return what a function emits that returns a list of it."""
        self._reader.path()
        first, rest = (statements[0], statements[1:]) if statements else (ast.Pass(), ())
        if isinstance(first, ast.Return) and first.value is not None:
            return self.each_of(first.value, known)
        return self._before(first, rest, known, self.returned)

    def yielded(self, statements: Sequence[ast.stmt], known: Mapping[str, Expression]) -> Expression:
        """Return what a generator emits: for a record one value at most, or for each element of a list."""
        self._reader.path()
        if not statements:
            return NOTHING
        first, rest = statements[0], statements[1:]
        if isinstance(first, ast.Return) and first.value is None:
            return NOTHING
        if isinstance(first, ast.For) and not rest and not first.orelse and isinstance(first.target, ast.Name):
            name = first.target.id
            stored = {each.id for each in _names(first.body) if not isinstance(each.ctx, ast.Load)}
            again = sorted(stored & (known.keys() - {name}))
            if again:
                raise self._refused(first, f"a loop that sets '{again[0]}' again is not read")
            return self._reader.each(
                self._list(first.iter, known), lambda element: self._of_element(first.body, {**known, name: element})
            )
        emitted = first.value if isinstance(first, ast.Expr) and not rest else None
        if isinstance(emitted, ast.YieldFrom):
            return self.each_of(emitted.value, known)
        if isinstance(emitted, ast.Yield) and emitted.value is not None:
            return self.value(emitted.value, known)
        return self._before(first, rest, known, self.yielded)

    def _of_element(self, statements: Sequence[ast.stmt], known: Mapping[str, Expression]) -> Expression:
        """Return what the body of a loop emits."""
        self._reader.path()
        if not statements or isinstance(statements[0], ast.Continue):
            return NOTHING
        first, rest = statements[0], statements[1:]
        emitted = first.value if isinstance(first, ast.Expr) and not rest else None
        if isinstance(emitted, ast.Yield) and emitted.value is not None:
            return self.value(emitted.value, known)
        return self._before(first, rest, known, self._of_element)

    def _before(
        self,
        first: ast.stmt,
        rest: Sequence[ast.stmt],
        known: Mapping[str, Expression],
        read: Callable[[Sequence[ast.stmt], Mapping[str, Expression]], Expression],
    ) -> Expression:
        """Return what is emitted after a statement that emits nothing itself, or by one of its branches."""
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            return read(rest, known)
        if isinstance(first, ast.Assign) and len(first.targets) == 1 and isinstance(first.targets[0], ast.Name):
            name = first.targets[0].id
            return self._reader.bind(self.value(first.value, known), lambda v: read(rest, {**known, name: v}))
        if not isinstance(first, ast.If):
            raise self._refused(first, f"{_words(first)} is not read")
        test = self.scalar(first.test, known)
        yes, no = read([*first.body, *rest], known), read([*first.orelse, *rest], known)
        if yes is NOTHING and no is NOTHING:
            raise self._refused(first, "a condition with nothing in either branch is not read")
        if no is NOTHING:
            return Kept(ANY, test, yes)
        if yes is NOTHING:
            return Kept(ANY, Operation(BOOL, "(not {})", (test,)), no)
        raise self._refused(first, "it emits other records in either branch")

    def each_of(self, node: ast.expr, known: Mapping[str, Expression]) -> Expression:
        """Return what is emitted of a list, or by a comprehension over one."""
        if isinstance(node, (ast.List, ast.Tuple)) and len(node.elts) < 2:
            return self.value(node.elts[0], known) if node.elts else NOTHING
        if not isinstance(node, (ast.ListComp, ast.GeneratorExp)):
            return self._reader.each(self._list(node, known), lambda element: element)
        loop = node.generators[0]
        if len(node.generators) > 1 or loop.is_async or not isinstance(loop.target, ast.Name):
            raise self._refused(node, "a comprehension over several lists is not read")
        name = loop.target.id

        def emitted(element: Local) -> Expression:
            inner = {**known, name: element}
            result = self.value(node.elt, inner)
            for test in reversed(loop.ifs):
                result = Kept(ANY, self.scalar(test, inner), result)
            return result

        return self._reader.each(self._list(loop.iter, known), emitted)

    def _list(self, node: ast.expr, known: Mapping[str, Expression]) -> Expression:
        found = self.scalar(node, known)
        if not elements_of(_result(found).kinds):
            raise self._refused(node, f"it is not known what is in {ast.unparse(node)}")
        return found

    # Assignments

    def _assigned(
        self, target: ast.expr, value: ast.expr, rest: Sequence[ast.stmt], known: Mapping[str, Expression]
    ) -> Expression:
        if isinstance(target, ast.Name):
            name = target.id
            return self._reader.bind(self.value(value, known), lambda v: self.block(rest, {**known, name: v}))
        if isinstance(target, ast.Tuple) and all(isinstance(each, ast.Name) for each in target.elts):
            names = [each.id for each in target.elts if isinstance(each, ast.Name)]

            def unpacked(whole: Expression) -> Expression:
                if whole.kinds == frozenset([Texts]):
                    return self._parts(whole, names, rest, known)
                is_tuple = isinstance(whole, Built) and issubclass(whole.python, tuple)
                if not isinstance(whole, Built) or not is_tuple or len(whole.fields) != len(names):
                    raise self._refused(target, "it unpacks what is not known to have as many fields")
                return self.block(rest, {**known, **dict(zip(names, whole.fields.values(), strict=True))})

            return self._reader.bind(self.value(value, known), unpacked)
        raise self._refused(target, f"it sets {ast.unparse(target)}")

    def _parts(
        self, whole: Expression, names: Sequence[str], rest: Sequence[ast.stmt], known: Mapping[str, Expression]
    ) -> Expression:
        """Read what follows a list of texts that is unpacked into names."""
        exact = Operation(whole.kinds, "{}({}, {})", (Constant(ANY, exactly), whole, Constant(INT, len(names))))

        def named(texts: Expression, number: int, found: Mapping[str, Expression]) -> Expression:
            if number == len(names):
                return self.block(rest, {**known, **found})
            part = Operation(TEXT, "{}[{}]", (texts, Constant(INT, number)))
            return self._reader.bind(part, lambda text: named(texts, number + 1, {**found, names[number]: text}))

        return self._reader.bind(exact, lambda texts: named(texts, 0, {}))

    # Expressions

    def scalar(self, node: ast.expr, known: Mapping[str, Expression]) -> Expression:
        """Return a value whose class is known, and is no record."""
        value = self.value(node, known)
        if isinstance(_result(value), Built):
            raise self._refused(node, f"it uses a whole record, {ast.unparse(node)}")
        kinds = _result(value).kinds
        if not kinds or not (kinds <= PLAIN or elements_of(kinds) is not None):
            raise self._refused(node, f"it is not known what {ast.unparse(node)} does")
        return value

    def value(self, node: ast.expr, known: Mapping[str, Expression]) -> Expression:
        self._reader.step()
        read = getattr(self, f"_{type(node).__name__.lower()}", None)
        if read is None:
            raise self._refused(node, f"{_words(node)} is not read")
        found: Expression = read(node, known)
        return found

    def _constant(self, node: ast.Constant, known: Mapping[str, Expression]) -> Expression:
        return self.fixed(node, node.value)

    def fixed(self, node: ast.AST, value: object) -> Expression:
        """Return a value that is the same for all records; raises `UnreadableError` for one that may change."""
        members = value if isinstance(value, (tuple, frozenset)) else (value,)
        if not all((type(member) in PLAIN and _zone(member) in _ZONES) or type(member) in _ZONES for member in members):
            raise self._refused(node, f"{_shown(node)} may change, or is of a class that is not known")
        if not all(_is_whole(member) for member in members if isinstance(member, str)):
            raise self._refused(node, "a text with half a character is not read")
        if any(member.bit_length() > _BITS for member in members if isinstance(member, int)):
            raise self._refused(node, "a number of so many digits is not read")
        return Constant(frozenset([type(value)]), value)

    def _name(self, node: ast.Name, known: Mapping[str, Expression]) -> Expression:
        return known[node.id] if node.id in known else self.fixed(node, self._outside(node))

    def _outside(self, node: ast.Name, is_called: bool = False) -> object:
        """Return what a name stands for that the function does not bind."""
        name, function = node.id, self._function
        code = function.__code__
        if name in code.co_varnames or name in code.co_cellvars:
            raise self._refused(node, f"'{name}' may not be set there")
        if name not in _names_of(code) and name not in code.co_freevars:
            raise self._refused(node, f"'{name}' is another name there")
        if name in self._closed:
            if may_change_outside(function, name):
                raise self._refused(node, f"'{name}' may be set again")
            try:
                return self._closed[name].cell_contents
            except ValueError:
                raise self._refused(node, f"'{name}' is not set yet") from None
        if name in function.__globals__:
            known = globals_of(function)
            if not (known.binds_once(name) if is_called else known.is_constant(name)):
                raise self._refused(node, f"the global '{name}' may change")
            return function.__globals__[name]
        found = getattr(builtins, name, None)
        if found is None or getattr(function, "__builtins__", {}).get(name) is not found:
            raise self._refused(node, f"'{name}' is not Python's own")
        return found

    def _attribute(self, node: ast.Attribute, known: Mapping[str, Expression]) -> Expression:
        name = node.value if isinstance(node.value, ast.Name) and node.value.id not in known else None
        if name is not None and node.attr == "utc" and self._outside(name, is_called=True) is timezone:
            return self.fixed(node, timezone.utc)
        owner = self.value(node.value, known)

        def of(whole: Expression) -> Expression:
            if isinstance(whole, Built) and whole.python is not tuple and node.attr in whole.fields:
                return whole.fields[node.attr]
            made = [
                ATTRIBUTES.get((kind, node.attr)) or kinds_of_attribute(kind, node.attr) for kind in whole.kinds - NONE
            ]
            if isinstance(whole, Built) or not made or None in made:
                raise self._refused(node, f"it is not known what {ast.unparse(node)} is")
            kinds = _union(each for each in made if each is not None)
            return Operation(kinds, f"{{}}.{node.attr}", (whole,))

        return self._reader.bind(owner, of) if isinstance(_result(owner), Built) else of(owner)

    def _binop(self, node: ast.BinOp, known: Mapping[str, Expression]) -> Expression:
        if isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant) and isinstance(node.left.value, str):
            return self._formatted(node, known)
        left, right = self.scalar(node.left, known), self.scalar(node.right, known)
        constant = self._of_constants(node, node.op, left, right)
        if constant is not None:
            return constant
        kinds = _result(left).kinds, _result(right).kinds
        if isinstance(node.op, ast.Pow):
            power = right.value if isinstance(right, Constant) else None
            if type(power) is not int or not 0 <= power <= 9 or not kinds[0] <= _NUMBERS:
                raise self._refused(node, "** is read for numbers and small constant powers")
            return Operation(frozenset(_SIGNED[kind] for kind in kinds[0]), "({} ** {})", (left, right))
        sign = _BINARY.get(type(node.op))
        found = of_pair(sign, *kinds) if sign is not None else ANY
        if not found:
            raise self._refused(node, f"it is not known what {ast.unparse(node)} is")
        return Operation(found, f"({{}} {sign} {{}})", (left, right))

    def _of_constants(self, node: ast.AST, done: ast.AST, *operands: Expression) -> Expression | None:
        """Return the result of an operation on constant numbers; None for others, and where it raises, or is large."""
        values = [
            value.value for value in operands if isinstance(value, Constant) and type(value.value) in (int, float)
        ]
        if len(values) < len(operands) or type(done) not in _OF_CONSTANTS:
            return None
        if isinstance(done, ast.Pow) and not (0 <= values[1] <= _BITS and abs(values[0]) <= 10):
            return None
        try:
            return self.fixed(node, _OF_CONSTANTS[type(done)](*values))
        except ArithmeticError:
            return None

    def _formatted(self, node: ast.BinOp, known: Mapping[str, Expression]) -> Expression:
        """Return a text with values in it, by `%`."""
        parts = node.right.elts if isinstance(node.right, ast.Tuple) else [node.right]
        values = [self.scalar(part, known) for part in parts]
        if not all(_result(value).kinds <= PLAIN for value in values):
            raise self._refused(node, f"it is not known how {ast.unparse(node.right)} is written")
        return Operation(TEXT, f"({{}} % ({'{}, ' * len(values)}))", (self.value(node.left, known), *values))

    def _unaryop(self, node: ast.UnaryOp, known: Mapping[str, Expression]) -> Expression:
        value = self.scalar(node.operand, known)
        if isinstance(node.op, ast.Not):
            return Operation(BOOL, "(not {})", (value,))
        constant = self._of_constants(node, node.op, value)
        if constant is not None:
            return constant
        kinds = _result(value).kinds - NONE
        whole = _NUMBERS - FLOAT if isinstance(node.op, ast.Invert) else _NUMBERS
        if not kinds or not kinds <= whole:
            raise self._refused(node, f"it is not known what {ast.unparse(node)} is")
        return Operation(frozenset(_SIGNED[kind] for kind in kinds), f"({_SIGNS[type(node.op)]}{{}})", (value,))

    def _boolop(self, node: ast.BoolOp, known: Mapping[str, Expression]) -> Expression:
        values = tuple(self.scalar(value, known) for value in node.values)
        word = " and " if isinstance(node.op, ast.And) else " or "
        kinds = _union(_result(value).kinds for value in values)
        if isinstance(node.op, ast.Or):  # None is not true, so that only the last one may be the result
            kinds = _union(_result(value).kinds - NONE for value in values) | (_result(values[-1]).kinds & NONE)
        return Operation(kinds, f"({word.join(['{}'] * len(values))})", values)

    def _compare(self, node: ast.Compare, known: Mapping[str, Expression]) -> Expression:
        operators = [_COMPARED[type(op)] for op in node.ops]
        if operators in (["is"], ["is not"]):
            return self._compared_with_none(node, operators[0], known)
        operands = [self.scalar(node.left, known)]
        for compared, operand in zip(operators, node.comparators, strict=True):
            if compared in ("is", "is not"):
                raise self._refused(node, f"'{compared}' is read for None")
            operands.append(self._container(operand, known) if "in" in compared else self.scalar(operand, known))
        for value in operands:
            elements = elements_of(_result(value).kinds)
            if elements is not None and not (elements and elements <= PLAIN):
                raise self._refused(node, "it compares lists of records")
        text = "{}" + "".join(f" {compared} {{}}" for compared in operators)
        return Operation(BOOL, f"({text})", tuple(operands))

    def _compared_with_none(self, node: ast.Compare, compared: str, known: Mapping[str, Expression]) -> Expression:
        other = node.comparators[0]
        if not isinstance(other, ast.Constant) or other.value is not None:
            raise self._refused(node, f"'{compared}' is read for None")
        value = self.value(node.left, known)
        if isinstance(_result(value), Built):
            raise self._refused(node, f"it uses a whole record, {ast.unparse(node.left)}")
        return Operation(BOOL, f"({{}} {compared} None)", (value,))

    def _container(self, node: ast.expr, known: Mapping[str, Expression]) -> Expression:
        """Return what `in` looks into: a text, a constant collection, or values that are written there."""
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            values = tuple(self.scalar(value, known) for value in node.elts)
            if all(isinstance(value, Constant) for value in values):
                members = tuple(value.value for value in values if isinstance(value, Constant))
                held = frozenset(members) if isinstance(node, ast.Set) else members
                return Constant(frozenset([type(held)]), held)
            if isinstance(node, ast.Set):
                raise self._refused(node, "a set of values that are not constant is not read")
            return Operation(frozenset([tuple]), f"({'{}, ' * len(values)})", values)
        if isinstance(node, ast.Dict):
            return self._dict(node, known)
        value = self.value(node, known)
        if isinstance(value, Constant) and isinstance(value.value, (tuple, frozenset)):
            return value
        kinds = _result(value).kinds
        if isinstance(_result(value), Built) or not kinds or not kinds <= TEXT | {Texts, dict}:
            raise self._refused(node, f"it is not known what is in {ast.unparse(node)}")
        return value

    def _ifexp(self, node: ast.IfExp, known: Mapping[str, Expression]) -> Expression:
        test = self.scalar(node.test, known)
        return self._reader.choose(test, self.value(node.body, known), self.value(node.orelse, known))

    def _tuple(self, node: ast.Tuple, known: Mapping[str, Expression]) -> Expression:
        values = [self.value(value, known) for value in node.elts]
        return self._built(tuple, {f"f{number}": value for number, value in enumerate(values)})

    def _built(self, python: Any, fields: Mapping[str, Expression]) -> Expression:
        """Return a record; the values are computed in the order in which they are given."""
        if any(isinstance(_result(value), Built) for value in fields.values()):
            raise UnreadableError("it puts a record into another one")
        return self._reader._bind_fields(Built(ANY, python, {}), list(fields.items()), {}, lambda built: built)

    def _dict(self, node: ast.Dict, known: Mapping[str, Expression]) -> Expression:
        entries = [
            (None if key is None else self.value(key, known), self.value(v, known))
            for key, v in zip(node.keys, node.values, strict=True)
        ]
        if not all(isinstance(key, Constant) and isinstance(value, Constant) for key, value in entries):
            raise self._refused(node, "a dict whose entries are not constant is not read")
        return Constant(
            frozenset([dict]),
            {k.value: v.value for k, v in entries if isinstance(k, Constant) and isinstance(v, Constant)},
        )

    def _joinedstr(self, node: ast.JoinedStr, known: Mapping[str, Expression]) -> Expression:
        operands: list[Expression] = []
        text = ""
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                spec = part.format_spec
                if spec is not None and not all(isinstance(each, ast.Constant) for each in getattr(spec, "values", [])):
                    raise self._refused(node, "a format that depends on the record is not read")
                written = "".join(str(each.value) for each in getattr(spec, "values", []))
                self.fixed(node, written)
                value = self.scalar(part.value, known)
                if not _result(value).kinds <= PLAIN:
                    raise self._refused(part, f"it is not known how {ast.unparse(part.value)} is written")
                called = {-1: None, 115: str, 114: repr}.get(part.conversion, ascii)
                operands += [Constant(ANY, format)]
                if called is not None:
                    operands += [Constant(ANY, called)]
                operands += [value, Constant(TEXT, written)]
                text += "{}({}, {}), " if called is None else "{}({}({}), {}), "
            else:
                operands.append(self.value(part, known))
                text += "{}, "
        return Operation(TEXT, f"''.join(({text}))", tuple(operands))

    def _subscript(self, node: ast.Subscript, known: Mapping[str, Expression]) -> Expression:
        owner = self.value(node.value, known)

        def of(whole: Expression) -> Expression:
            if isinstance(whole, Built):
                index = node.slice.value if isinstance(node.slice, ast.Constant) else None
                values = list(whole.fields.values())
                if type(index) is not int or not issubclass(whole.python, tuple) or not 0 <= index < len(values):
                    raise self._refused(node, f"it is not known what {ast.unparse(node)} is")
                return values[index]
            if isinstance(whole, Constant) and isinstance(whole.value, dict):
                kinds = frozenset(type(value) for value in whole.value.values())
                return Operation(kinds, "{}[{}]", (whole, self.scalar(node.slice, known)))
            kinds = whole.kinds - NONE
            elements = TEXT if kinds == TEXT else elements_of(kinds)
            if not elements:
                raise self._refused(node, f"it is not known what {ast.unparse(node)} is")
            if not isinstance(node.slice, ast.Slice):
                return Operation(elements, "{}[{}]", (whole, self.scalar(node.slice, known)))
            parts = [node.slice.lower, node.slice.upper, node.slice.step]
            bounds = [Constant(NONE, None) if part is None else self.scalar(part, known) for part in parts]
            return Operation(kinds, "{}[{}:{}:{}]", (whole, *bounds))

        return self._reader.bind(owner, of) if isinstance(_result(owner), Built) else of(owner)

    # Calls

    def _call(self, node: ast.Call, known: Mapping[str, Expression]) -> Expression:
        if any(isinstance(argument, ast.Starred) for argument in node.args) or any(
            k.arg is None for k in node.keywords
        ):
            raise self._refused(node, "a call with * is not read")
        called = node.func
        if isinstance(called, ast.Attribute):
            module = self._module(called.value, known)
            if module is not None:
                return self._called(node, self._of_module(node, module, called.attr), known)
            root: ast.expr = called.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id not in known:
                raise self._refused(node, f"it calls {ast.unparse(called)}")
            return self._method(node, called, known)
        if isinstance(called, ast.Name) and called.id not in known:
            return self._called(node, self._outside(called, is_called=True), known)
        raise self._refused(node, f"it calls {ast.unparse(called)}, which is not known")

    def _module(self, node: ast.expr, known: Mapping[str, Expression]) -> types.ModuleType | None:
        code = self._function.__code__
        bound = (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
        if not isinstance(node, ast.Name) or node.id in known or node.id in bound:
            return None
        found = self._function.__globals__.get(node.id)
        if not isinstance(found, types.ModuleType) or not globals_of(self._function).binds_once(node.id):
            return None
        return found

    def _of_module(self, node: ast.Call, module: types.ModuleType, name: str) -> object:
        """Return what a module has under a name: something of Python's own, or a function that it binds once."""
        found = vars(module).get(name)
        is_once = (
            isinstance(found, types.FunctionType)
            and found.__globals__ is vars(module)
            and globals_of(found).binds_once(name)
        )
        if not is_once and not is_installed(module.__name__):
            raise self._refused(node, f"it calls {ast.unparse(node.func)}, which may change")
        return found

    def _called(self, node: ast.Call, called: Any, known: Mapping[str, Expression]) -> Expression:
        if called is dataclasses.replace:
            return self._replaced(node, node.args, known)
        if called in _CONSTANTS:
            return self._computed(node, called, known)
        if isinstance(called, type) and called not in _FUNCTIONS:
            return self._made(node, called, known)
        values = [self.value(argument, known) for argument in node.args]
        known_one = _FUNCTIONS.get(called) if isinstance(called, Hashable) else None
        if known_one is None:
            return self._read(node, called, values)
        if node.keywords or not known_one.at_least <= len(values) <= known_one.at_most:
            raise self._refused(node, f"{ast.unparse(node)} is not read")
        for argument, value in zip(node.args, values, strict=True):
            kinds = _result(value).kinds
            if called is len and elements_of(kinds) is not None:
                continue
            if isinstance(_result(value), Built) or not kinds or not kinds <= known_one.takes | NONE:
                raise self._refused(
                    node, f"it is not known what {ast.unparse(node.func)} makes of {ast.unparse(argument)}"
                )
        if called is round and len(values) == 2 and _result(values[1]).kinds != INT:
            raise self._refused(node, f"{ast.unparse(node)} is not read")
        text = f"{{}}({', '.join(['{}'] * len(values))})"
        takes_none = called in (str, bool, min, max)
        kinds = known_one.gives([k if takes_none else k - NONE for k in (_result(value).kinds for value in values)])
        if not kinds:
            raise self._refused(node, f"{ast.unparse(node)} raises for each record")
        return Operation(kinds, text, (Constant(ANY, called), *values))

    def _computed(self, node: ast.Call, called: Callable[..., Any], known: Mapping[str, Expression]) -> Expression:
        """Return what Python's own class makes of constants."""
        given = [self.value(argument, known) for argument in node.args]
        named = {str(keyword.arg): self.value(keyword.value, known) for keyword in node.keywords}
        values = [value.value for value in given if isinstance(value, Constant)]
        by_name = {name: value.value for name, value in named.items() if isinstance(value, Constant)}
        if len(values) < len(given) or len(by_name) < len(named):
            return self._moment(node, called, given, named)
        try:
            return self.fixed(node, called(*values, **by_name))
        except (TypeError, ValueError, ArithmeticError):
            raise self._refused(node, f"{ast.unparse(node)} raises for each record") from None

    def _moment(
        self, node: ast.Call, called: Any, given: Sequence[Expression], named: Mapping[str, Expression]
    ) -> Expression:
        """Return a time, a day or a span, of numbers and of a constant zone."""
        zone = named.get("tzinfo")
        numbers = [*given, *(value for name, value in named.items() if name != "tzinfo")]
        takes = _NUMBERS if called is timedelta else _NUMBERS - FLOAT
        is_known = zone is None or (called is datetime and isinstance(zone, Constant))
        if called is Decimal or not is_known or not all(_result(value).kinds - NONE <= takes for value in numbers):
            raise self._refused(node, f"{ast.unparse(node)} is read for constants only")
        if not all(_known(value) for value in numbers):
            raise self._refused(node, f"it is not known what {ast.unparse(node)} is")
        arguments = ["{}" for _ in given] + [f"{name}={{}}" for name in named]
        operands = (Constant(ANY, called), *given, *named.values())
        return Operation(frozenset([called]), f"{{}}({', '.join(arguments)})", operands)

    def _read(self, node: ast.Call, called: Any, values: Sequence[Expression]) -> Expression:
        """Return what another function makes of its arguments."""
        if node.keywords:
            raise self._refused(node, f"it calls {ast.unparse(node.func)} with arguments by name")
        try:
            return self._with_arguments(called, list(values), [])
        except UnreadableError as error:
            if not isinstance(called, types.FunctionType) or is_installed(called.__module__):
                raise self._refused(node, f"it calls {ast.unparse(node.func)}") from None
            raise UnreadableError(f"it calls {called.__name__}: {error}") from None

    def _with_arguments(self, called: Any, pending: list[Expression], bound: list[Expression]) -> Expression:
        if not pending:
            return self._reader.read(called, *bound, depth=self._depth + 1)
        first, *rest = pending
        return self._reader.bind(first, lambda value: self._with_arguments(called, rest, [*bound, value]))

    def _method(self, node: ast.Call, called: ast.Attribute, known: Mapping[str, Expression]) -> Expression:
        owner = self.value(called.value, known)
        if isinstance(_result(owner), Built):
            if called.attr == "_replace" and not node.args:
                return self._replaced(node, [called.value], known, of_tuple=True)
            raise self._refused(node, f"it calls {ast.unparse(called)}, which is not known")
        if isinstance(owner, Constant) and isinstance(owner.value, dict) and called.attr == "get":
            values = [self.scalar(argument, known) for argument in node.args]
            if not 1 <= len(values) <= 2 or node.keywords:
                raise self._refused(node, f"{ast.unparse(node)} is not read")
            otherwise = _result(values[1]).kinds if len(values) == 2 else NONE
            kinds = frozenset(type(value) for value in owner.value.values()) | otherwise
            return Operation(kinds, f"{{}}.get({', '.join(['{}'] * len(values))})", (owner, *values))
        kinds = _result(owner).kinds - NONE
        made = [METHODS.get((kind, called.attr)) for kind in kinds]
        if not made or None in made or node.keywords:
            raise self._refused(node, f"it calls {ast.unparse(called)}, which is not known")
        values = [self._argument(argument, known) for argument in node.args]
        if any(_result(value).kinds & _OF_ZONES for value in values) and called.attr != "astimezone":
            raise self._refused(node, f"{ast.unparse(node)} is not read")
        results = _union(each for each in made if each is not None)
        return Operation(results, f"{{}}.{called.attr}({', '.join(['{}'] * len(values))})", (owner, *values))

    def _argument(self, node: ast.expr, known: Mapping[str, Expression]) -> Expression:
        """Return an argument of a method: a plain value, or a constant tuple, which `startswith` takes."""
        if isinstance(node, ast.Tuple):
            return self._container(node, known)
        value = self.value(node, known)
        return value if isinstance(value, Constant) and value.kinds <= _OF_ZONES else self.scalar(node, known)

    def _made(self, node: ast.Call, python: type, known: Mapping[str, Expression]) -> Expression:
        check_class(python)
        names, by_place, defaults = fields_of(python)
        if len(node.args) > len(by_place):
            raise self._refused(node, f"{python.__name__} takes {len(by_place)} fields by their place")
        fields = {name: self.value(argument, known) for name, argument in zip(by_place, node.args, strict=False)}
        for keyword in node.keywords:
            if keyword.arg is None or keyword.arg in fields or keyword.arg not in names:
                raise self._refused(node, f"{python.__name__} has no further field '{keyword.arg}'")
            fields[keyword.arg] = self.value(keyword.value, known)
        for name in names:
            if name not in fields:
                if name not in defaults:
                    raise self._refused(node, f"{python.__name__} needs '{name}'")
                fields[name] = self.fixed(node, defaults[name])
        built = self._built(python, fields)
        return self._in_order(built, names)

    def _replaced(
        self, node: ast.Call, whole: Sequence[ast.expr], known: Mapping[str, Expression], of_tuple: bool = False
    ) -> Expression:
        """Return a record with other values: of a NamedTuple by its method, of a dataclass by `replace`."""
        if len(whole) != 1:
            raise self._refused(node, f"{ast.unparse(node)} is not read")

        def of(record: Expression) -> Expression:
            is_record = isinstance(record, Built) and record.python is not tuple
            if not isinstance(record, Built) or not is_record or issubclass(record.python, tuple) is not of_tuple:
                raise self._refused(node, f"it is not known what {ast.unparse(node)} is")
            new = {keyword.arg or "": self.value(keyword.value, known) for keyword in node.keywords}
            if not new.keys() <= record.fields.keys():
                raise self._refused(node, f"{record.python.__name__} has other fields")
            return self._in_order(self._built(record.python, {**record.fields, **new}), tuple(record.fields))

        return self._reader.bind(self.value(whole[0], known), of)

    def _in_order(self, value: Expression, names: Sequence[str]) -> Expression:
        if isinstance(value, Bound):
            return Bound(ANY, value.number, value.value, self._in_order(value.body, names))
        assert isinstance(value, Built)
        return Built(ANY, value.python, {name: value.fields[name] for name in names})

    def _refused(self, node: ast.AST, why: str) -> UnreadableError:
        line = getattr(node, "lineno", None)
        return UnreadableError(why if line is None else f"{why} (line {line})")


def _names(statements: Sequence[ast.stmt]) -> Iterator[ast.Name]:
    """Return the names in some statements."""
    return (each for statement in statements for each in ast.walk(statement) if isinstance(each, ast.Name))


def _names_of(code: types.CodeType) -> set[str]:
    """Return the names that a function looks up outside of it, those of its comprehensions included."""
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType) and each.co_name in _COMPREHENSIONS]
    return {*code.co_names, *(name for each in inner for name in _names_of(each))}


_COMPREHENSIONS = ("<listcomp>", "<genexpr>")


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_ZONES = (NoneType, timezone, ZoneInfo)
"""Classes of time zones that are not an author's."""

_OF_ZONES: Kinds = frozenset([timezone, ZoneInfo])


def _zone(value: object) -> type:
    return type(value.tzinfo) if isinstance(value, datetime) else NoneType


def _shown(node: ast.AST) -> str:
    return "a default" if isinstance(node, (ast.Lambda, ast.FunctionDef)) else ast.unparse(node)


def _words(node: ast.AST) -> str:
    """Return what a piece of syntax is called."""
    name = type(node).__name__
    known = {
        "For": "a loop",
        "While": "a loop",
        "Try": "try",
        "With": "with",
        "Raise": "raise",
        "Assert": "assert",
        "ListComp": "a comprehension",
        "GeneratorExp": "a comprehension",
        "NamedExpr": ":=",
        "List": "a list",
        "Expr": "a call whose result is not used",
    }
    return known.get(name, name.lower())
