"""Column expressions that need no Spark to be written down: recorded here, replayed on Spark's functions by an engine.

`F.col("distance") / F.col("air_time")` builds a tree of calls. Replaying it on `pyspark.sql.functions` gives a Column,
classic or Connect, when there is a session; replaying it on another library with the same functions runs it without a
JVM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from types import FunctionType
from typing import TYPE_CHECKING, Any

from dagster_unified.records import is_column

if TYPE_CHECKING:
    from sqlglot.expressions import Expr


class Column:
    """A recorded column expression: a call of a function, or of a method or operator of another expression.

    `names` are the arguments of a function that are texts and name columns, as in `F.sum("amount")`.
    """

    __slots__ = ("arguments", "name", "names", "options", "target")
    __hash__ = object.__hash__

    def __init__(
        self,
        target: Column | None,
        name: str,
        arguments: tuple[Any, ...] = (),
        options: dict[str, Any] | None = None,
        names: tuple[str, ...] = (),
    ) -> None:
        self.target = target
        self.name = name
        self.arguments = arguments
        self.options = options or {}
        self.names = names

    def __getattr__(self, name: str) -> Callable[..., Column]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments, **options: Column(self, name, arguments, options)

    def __bool__(self) -> bool:
        raise TypeError("a column has no truth value while a pipeline is being built; combine conditions with & | ~")

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("a column cannot be iterated")

    def __repr__(self) -> str:
        arguments = ", ".join([*map(_show, self.arguments), *(f"{k}={_show(v)}" for k, v in self.options.items())])
        if self.target is None:
            return _show(self.arguments[0]).strip("'") if self.name == "col" else f"{self.name}({arguments})"
        symbol = SYMBOLS.get(self.name)
        if symbol and self.arguments:
            left, right = (
                (arguments, repr(self.target)) if self.name.startswith("__r") else (repr(self.target), arguments)
            )
            return f"({left} {symbol} {right})"
        return f"{symbol}{self.target!r}" if symbol else f"{self.target!r}.{self.name}({arguments})"

    def replay(self, functions: Any) -> Any:
        """Return the same expression, built with `functions` (such as `pyspark.sql.functions`)."""
        holder = functions if self.target is None else self.target.replay(functions)
        arguments = [replay(a, functions) for a in self.arguments]
        return getattr(holder, self.name)(*arguments, **{k: replay(v, functions) for k, v in self.options.items()})

    def references(self) -> set[str]:
        """Return the columns that are read, as far as their names are known."""
        references = set(self.target.references()) if self.target is not None else set()
        references |= {name.split(".")[0].strip("`") for name in self.names}
        if self.target is None and self.name == "expr" and self.arguments and isinstance(self.arguments[0], str):
            references |= read_by_sql(self.arguments[0])
        for value in (*self.arguments, *self.options.values()):
            if isinstance(value, Column):
                references |= value.references()
        return references


SYMBOLS = {
    "__add__": "+", "__radd__": "+", "__sub__": "-", "__rsub__": "-", "__mul__": "*", "__rmul__": "*", "__truediv__":
    "/",
    "__rtruediv__": "/", "__mod__": "%", "__rmod__": "%", "__pow__": "**", "__rpow__": "**", "__eq__": "==", "__ne__":
    "!=",
    "__lt__": "<", "__le__": "<=", "__gt__": ">", "__ge__": ">=", "__and__": "&", "__rand__": "&", "__or__": "|",
    "__ror__": "|",
    "__invert__": "~", "__neg__": "-", "__getitem__": "[]",
}  # fmt: skip


def _recorder(name: str) -> Callable[..., Column]:
    def record(self: Column, *arguments: Any) -> Column:
        return Column(self, name, arguments)

    record.__name__ = name
    return record


for _name in SYMBOLS:
    setattr(Column, _name, _recorder(_name))


def makes_column(value: object) -> bool:
    """Return whether it is an expression on columns, or one of the functions that make one."""
    module = getattr(value, "__module__", None)
    return is_column(value) or (
        isinstance(value, FunctionType)
        and isinstance(module, str)
        and module.startswith(("pyspark.sql.", "dagster_unified.api.columns"))
    )


def columns_read(expression: object) -> set[str]:
    """The columns that an expression reads, as far as their names are known: of SQL as text, or of a recorded one."""
    if isinstance(expression, Column):
        return expression.references()
    return read_by_sql(expression) if isinstance(expression, str) else set()


def alias_of(expression: object) -> str | None:
    """Return the name that an expression gives its column with `alias` or `AS`, which expressions after it may read."""
    if isinstance(expression, Column):
        name = expression.arguments[0] if expression.name in ("alias", "name") and expression.arguments else None
        return name if isinstance(name, str) else None
    parsed = _parsed(expression) if isinstance(expression, str) and " " in expression else None
    return parsed.alias or None if parsed is not None else None


def is_unnamed(expression: object) -> bool:
    """Return whether an expression certainly gives its column no name.

    One of Spark's, and SQL that only Spark parses, may give one.
    """
    if isinstance(expression, Column):
        target: Column | None = expression
        while target is not None and target.name not in ("alias", "name"):
            target = target.target
        return target is None
    parsed = _parsed(expression) if isinstance(expression, str) else None
    return parsed is not None and not parsed.alias


def read_by_sql(text: str) -> set[str]:
    """Return the columns that a SQL expression reads; none where only Spark can parse it."""
    if text.isidentifier():
        return {text} - _CONSTANTS
    parsed = _parsed(text)
    if parsed is None:
        return set()
    from sqlglot import exp

    columns = [c for c in parsed.find_all(exp.Column) if c.find_ancestor(exp.Query) is None]
    return {c.parts[0].name for c in columns if not isinstance(c.this, exp.Star)} - _CONSTANTS


_CONSTANTS = {
    "true",
    "false",
    "null",
    "current_date",
    "current_time",
    "current_timestamp",
    "current_user",
    "session_user",
    "user",
    "*",
}
"""Words that are written as names and are none."""


def _parsed(text: str) -> Expr | None:
    import sqlglot  # takes as long to import as all of `explain`, and few pipelines need it

    try:
        return sqlglot.parse_one(text, read="spark")
    except sqlglot.errors.SqlglotError:
        return None


def _show(value: Any) -> str:
    return f"{type(value).__name__}.{value.name}" if isinstance(value, Enum) else repr(value)


def replay(value: Any, functions: Any) -> Any:
    """`value` with every recorded expression in it replayed."""
    if isinstance(value, Column):
        return value.replay(functions)
    if isinstance(value, (list, tuple)):
        return type(value)(replay(v, functions) for v in value)
    if isinstance(value, Enum):
        return value.value  # as its column has it
    return value
