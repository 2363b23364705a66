"""Compiles a chain of stateless functions into one function over a list of records.

`map → filter → map` becomes a single list comprehension, so that a record costs only its functions' calls:

    [f2(v1) for v0 in records for v1 in (f0(v0),) if f1(v1)]

Each clause stands on a line of its own. So a failure is traced back to its operator and its record, at no cost to the
records that do not fail. Knows no graph, no driver, no Arrow.
"""

from __future__ import annotations

import dis
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

if TYPE_CHECKING:
    from dagster_unified.records import Copy
    from dagster_unified.values import Fit

MARK = "<fused chain>"

Fused = Callable[[Sequence[Any], "Sequence[int | None] | None"], "tuple[list[Any], Sequence[int | None] | None]"]


@dataclass(frozen=True)
class Clause(ABC):
    """One stateless operator, as the code that it becomes."""

    function: Callable[..., Any]

    copy: Copy | None = None
    """Copies the function's results, where they are mutable: the function may have kept them."""

    normal: Copy | None = None
    """Makes the normal form of the function's results, where another function of the chain takes them."""

    fit: Fit | None = None
    """The type of the function's results, where there is `normal`."""

    method: ClassVar[str]
    """The method of a function object that is called."""

    one_to_one: ClassVar[bool] = False
    """Whether each record becomes what the function returns for it."""

    gives_records: ClassVar[bool] = True
    """Whether the function's results go on, not its argument."""

    iterates: ClassVar[bool] = False
    """Whether the code iterates the function's result."""

    assigns: ClassVar[bool] = False
    """Whether it assigns event times, to the variable `t`."""

    @abstractmethod
    def lines(self, call: str, value: str, result: str) -> list[str]:
        """Clauses of a comprehension; `call` names the function, `value` the record, `result` what it becomes."""


@dataclass(frozen=True)
class ChainCode:
    """The code of a chain, whatever its functions, and what is needed to find where it failed."""

    code: CodeType
    constants: dict[str, Any]
    """Names of the code that stand for no function."""

    origin: dict[int, tuple[int, str]]
    """Source line to (clause, variable that holds the clause's input)."""

    loops: list[tuple[int, str] | None]
    """For each loop in the compiled code, in order, the clause whose result it iterates, if it is one's.

    A result that fails while it is iterated (a generator's), or that cannot be iterated, is reported at no clause's
    line, but at its loop's instruction.
    """

    formed: dict[int, int]
    """Source line where a normal form is made, to the clause whose function gave the record."""

    def bind(self, clauses: Sequence[Clause], seen: Callable[[int, list[int]], None]) -> FusedChain:
        """Return the chain of these clauses, whose code this is.

        `seen` is called with the event times that each assigning clause has assigned.
        """
        functions = {f"f{i}": clause.function for i, clause in enumerate(clauses)}
        namespace: dict[str, Any] = {**self.constants, **functions, "seen": seen}
        exec(self.code, namespace)
        return FusedChain(namespace["fused"], self)


@dataclass(frozen=True)
class FusedChain:
    """A chain of functions as one function."""

    run: Fused
    code: ChainCode

    def made_by(self, trace: TracebackType | None) -> int | None:
        """The clause whose function returned a record that does not fit, where that was raised."""
        while trace is not None and trace.tb_frame.f_code.co_filename != MARK:
            trace = trace.tb_next
        while trace is not None and trace.tb_next is not None and trace.tb_next.tb_frame.f_code.co_filename == MARK:
            trace = trace.tb_next  # the comprehension
        return None if trace is None else self.code.formed.get(trace.tb_lineno)

    def locate(self, trace: TracebackType | None) -> tuple[int, Any] | None:
        """The clause that was running when an exception with this traceback was raised, and its input record."""
        while trace is not None:
            frame = trace.tb_frame
            if frame.f_code.co_filename == MARK:
                located = self._iterating(trace) or self.code.origin.get(trace.tb_lineno) or self._answering(trace)
                if located is not None and located[1] in frame.f_locals:
                    return located[0], frame.f_locals[located[1]]
            trace = trace.tb_next
        return None

    def _iterating(self, trace: TracebackType) -> tuple[int, str] | None:
        """The clause whose result was being iterated; the first loop starts where the comprehension is called."""
        instructions = list(dis.get_instructions(trace.tb_frame.f_code))
        for name, loops in (("FOR_ITER", self.code.loops), ("GET_ITER", self.code.loops[1:])):
            offsets = [i.offset for i in instructions if i.opname == name]
            if trace.tb_lasti in offsets and len(offsets) == len(loops):
                return loops[offsets.index(trace.tb_lasti)]
        return None

    def _answering(self, trace: TracebackType) -> tuple[int, str] | None:
        """The clause of the code before: Python tests a condition at the line where the comprehension starts."""
        if trace.tb_lineno in self.code.formed:
            return None
        before = [i for i in dis.get_instructions(trace.tb_frame.f_code) if i.offset <= trace.tb_lasti]
        lines = (i.positions.lineno for i in reversed(before) if i.positions is not None)
        return next((self.code.origin[line] for line in lines if line in self.code.origin), None)


def compile_chain(clauses: Sequence[Clause], timestamped: bool) -> ChainCode:
    """Compile clauses into the code of one function; `timestamped` says whether records come with timestamps."""
    assigns = [i for i, clause in enumerate(clauses) if clause.assigns]
    track = bool(assigns) or (timestamped and not all(clause.one_to_one for clause in clauses))
    lines: list[str] = ["def fused(records, timestamps):"]
    origin: dict[int, tuple[int, str]] = {}
    if track:
        lines += ["    times = []", "    keep = times.append"]
    for i in assigns:
        lines += [f"    assigned{i} = []", f"    note{i} = assigned{i}.append"]
    body: list[str] = [
        "        for v0, t in zip(records, timestamps)" if timestamped and track else "        for v0 in records"
    ]
    if assigns and not timestamped:
        body.append("        for t in (None,)")
    where: dict[int, tuple[int, str]] = {}
    formed: dict[int, int] = {}
    constants: dict[str, Any] = {f"c{i}": c.copy for i, c in enumerate(clauses)}
    loops: list[tuple[int, str] | None] = [None] * len(body)
    current = 0
    last = len(clauses) - 1
    element = "v0"
    for i, clause in enumerate(clauses):
        value = f"v{current}"
        if clause.one_to_one and i == last and not track:
            where[-1] = (i, value)
            element = f"f{i}({value})" if clause.copy is None else f"c{i}(f{i}({value}))"
            break
        where[len(body)] = (i, value)
        current += clause.gives_records
        element = f"v{current}"
        body += [f"        {line}" for line in clause.lines(f"f{i}", value, element)]
        if clause.iterates:
            loops.append((i, value))
        if clause.normal is not None:
            formed[len(body)] = i
            body.append(f"        for {element} in ({_formed(clause, i, element, constants)},)")
        if clause.copy is not None:
            body.append(f"        for {element} in (c{i}({element}),)")
        if clause.assigns:
            body.append(f"        if not note{i}(t)")
    if track:
        body.append("        if not keep(t)")
    lines.append("    out = [")
    first = len(lines) + 1
    lines += [f"        {element}", *body, "    ]"]
    lines += [f"    seen({i}, assigned{i})" for i in assigns]
    lines.append(f"    return out, {'times' if track else 'timestamps'}")
    for position, clause_input in where.items():
        origin[first + 1 + position] = clause_input
    constants |= {"no_answer": _no_answer, "no_records": _no_records}
    at = {first + 1 + position: i for position, i in formed.items()}
    return ChainCode(compile("\n".join(lines), MARK, "exec"), constants, origin, loops, at)


def _formed(clause: Clause, i: int, element: str, names: dict[str, Any]) -> str:
    """The code of a record's normal form, which calls nothing for a plain value that is in it."""
    names[f"n{i}"] = clause.normal
    test = "False" if clause.fit is None else clause.fit.clause_test(element, names)
    return f"n{i}({element})" if test == "False" else f"{element} if {test} else n{i}({element})"


def _no_answer() -> NoReturn:
    raise TypeError("it returned None, and a filter returns True or False; add the missing return, or use bool(...)")


def _no_records(returned: object) -> NoReturn:
    if returned is None:
        raise TypeError("it returned None, and a flat_map returns records; yield them, or return a list, [] for none")
    raise TypeError(f"it returned the text {returned!r}, whose letters would be the records; return [text]")
