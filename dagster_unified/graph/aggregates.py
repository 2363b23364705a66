"""Column aggregates taken apart into partial aggregates that can be merged, such as a mean into a sum and a count.

Knows recorded expressions only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dagster_unified.errors import RecordTypeError, UnsupportedError
from dagster_unified.graph.expressions import Column, alias_of
from dagster_unified.values import TOO_LARGE

MEANS = ("avg", "mean")


@dataclass(frozen=True)
class Purpose:
    """What aggregates are taken apart for, as far as errors name it."""

    name: str
    """What asks for it, such as `carry_state`."""

    refusal: str
    """What it cannot do with an aggregate; `{}` stands for the aggregate."""

    merged_by: Mapping[str, str]
    """The aggregates that have partials, each with the one that merges its results over subsets."""


@dataclass
class Parts:
    """The partial aggregates of some columns, each by a name of its own, and the columns in terms of them."""

    partials: dict[str, tuple[Column, str]] = field(default_factory=dict)
    """The aggregate, and the one that merges its results over subsets."""

    results: list[Column] = field(default_factory=list)


def take_apart(where: str, columns: Sequence[object], purpose: Purpose, named: Callable[[Column], str] = repr) -> Parts:
    """The partial aggregates of some columns; raises `UnsupportedError` naming an aggregate that has none."""
    parts = Parts()
    splitting = _Splitting(where, purpose, named, parts)
    parts.results += [splitting.split(column) for column in columns]
    return parts


def fields_of(columns: Sequence[object]) -> list[str]:
    """What the columns of an operator are called."""
    return [alias_of(column) or repr(column) for column in columns]


def too_large(where: str, fields: Sequence[str]) -> RecordTypeError:
    """The error for a number that its column does not hold, such as a sum. `where` names the operator."""
    shown = ", ".join(f"'{field}'" for field in fields)
    subject = f"field {shown}" if len(fields) == 1 else f"one of the fields {shown}"
    return RecordTypeError(f"{where}: {subject} {TOO_LARGE}")


@dataclass
class _Splitting:
    where: str
    purpose: Purpose
    named: Callable[[Column], str]
    parts: Parts

    def split(self, expression: object) -> Column:
        """The expression over merged partials."""
        if not isinstance(expression, Column):
            raise UnsupportedError(
                f"{self.where}: {self.purpose.name} cannot take apart {expression!r}; write it with"
                " dagster_unified.api.functions"
            )
        merged_by = self.purpose.merged_by
        if expression.target is None and expression.name in merged_by:
            return self._partial(expression, merged_by[expression.name])
        if expression.target is None and expression.name in MEANS:
            total, count = (
                Column(None, name, expression.arguments, names=expression.names) for name in ("sum", "count")
            )
            return Column(
                self._partial(total, merged_by["sum"]), "__truediv__", (self._partial(count, merged_by["count"]),)
            )
        if expression.target is None and expression.name in ("lit", "expr", "col", "column"):
            if expression.name == "lit":
                return expression
            raise UnsupportedError(
                f"{self.where}: {self.purpose.name} cannot take apart {expression!r}, which stands outside of an"
                " aggregate"
            )
        if expression.target is None and not any(
            isinstance(a, Column) and self._aggregates(a) for a in expression.arguments
        ):
            known = ", ".join(sorted({*merged_by, *MEANS}))
            raise UnsupportedError(
                f"{self.where}: {self.purpose.name} {self.purpose.refusal.format(repr(expression))}; it can {known}, or"
                " use reduce or process"
            )
        target = None if expression.target is None else self.split(expression.target)
        arguments = tuple(self.split(a) if isinstance(a, Column) else a for a in expression.arguments)
        return Column(target, expression.name, arguments, expression.options)

    def _aggregates(self, expression: Column) -> bool:
        """Whether it contains an aggregate that has partials."""
        if expression.target is None and expression.name in (*self.purpose.merged_by, *MEANS):
            return True
        return any(self._aggregates(e) for e in (expression.target, *expression.arguments) if isinstance(e, Column))

    def _partial(self, expression: Column, by: str) -> Column:
        name = self.named(expression)
        self.parts.partials.setdefault(name, (expression, by))
        return Column(None, "col", (f"`{name.replace('`', '``')}`",), names=(name,))
