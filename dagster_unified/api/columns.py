"""`functions`: Spark's column functions, for use while a pipeline is built, with no Spark session and no JVM.

The names and arguments are those of `pyspark.sql.functions`; calls are recorded, and the engine replays them there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

from dagster_unified.errors import PipelineError, nearest
from dagster_unified.graph.expressions import Column


@cache
def _names() -> frozenset[str]:
    """Return the functions of the installed pyspark, read from its source, since its import takes long."""
    defined = re.findall(r"^def ([a-zA-Z]\w*)\(", _source(), re.MULTILINE)
    exported = re.findall(r'^    "(\w+)",$', _source("__init__.py"), re.MULTILINE)
    return frozenset([*defined, *exported])


@cache
def _source(file: str = "builtin.py") -> str:
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / "sql" / "functions" / file).read_text()


class _Functions:
    """Spark's column functions, recorded while a pipeline is built and run by Catalyst in both modes.

    Names and arguments are those of `pyspark.sql.functions`; a name that the installed Spark has not, and arguments
    that a function does not take, raise `PipelineError`.

    Examples:
        >>> from dagster_unified.api import functions as F
        >>> [sale.amount for sale in collect(sales.where(F.col("amount") + F.length("shop") > 9))]
        [5]
    """

    def __getattr__(self, name: str) -> Callable[..., Column]:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in _names():
            raise PipelineError(f"pyspark.sql.functions has no function '{name}'{nearest(name, _names())}")

        def record(*arguments: Any, **options: Any) -> Column:
            _check_call(name, arguments, options)
            return Column(None, name, arguments, options, _columns_named(name, arguments, options))

        record.__name__ = name
        return record


def _check_call(function: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Raise `PipelineError` where Spark's function cannot be called like this."""
    parameters = _signature(function)
    if parameters is None:
        return
    try:
        _callable(parameters).bind(*arguments, **options)
    except TypeError as error:
        raise PipelineError(
            f"pyspark.sql.functions.{function}: {error}; its arguments are ({ast.unparse(parameters)})"
        ) from None


def _callable(parameters: ast.arguments) -> Signature:
    positional = [*parameters.posonlyargs, *parameters.args]
    needed = len(positional) - len(parameters.defaults)
    bound = []
    for number, parameter in enumerate(positional):
        kind = Parameter.POSITIONAL_ONLY if parameter in parameters.posonlyargs else Parameter.POSITIONAL_OR_KEYWORD
        bound.append(Parameter(parameter.arg, kind, default=Parameter.empty if number < needed else None))
    if parameters.vararg is not None:
        bound.append(Parameter(parameters.vararg.arg, Parameter.VAR_POSITIONAL))
    for parameter, default in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True):
        bound.append(
            Parameter(parameter.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if default is None else None)
        )
    if parameters.kwarg is not None:
        bound.append(Parameter(parameters.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(bound)


def _columns_named(function: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[str, ...]:
    """Return the texts among a call's arguments that name columns."""
    texts = [value for value in (*arguments, *options.values()) if isinstance(value, (str, list, tuple))]
    if not texts:
        return ()
    if function in ("col", "column"):
        return tuple(value for value in texts if isinstance(value, str))
    signature = _signature(function)
    if signature is None:
        return ()
    named = [p.arg for p in signature.args if _names_column(p)]
    values: list[Any] = [v for p, v in zip(signature.args, arguments, strict=False) if p.arg in named]
    values += [v for name, v in options.items() if name in named]
    if signature.vararg is not None and _names_column(signature.vararg):
        values += arguments[len(signature.args) :]
    several = [v if isinstance(v, (list, tuple)) else [v] for v in values]
    return tuple(value for some in several for value in some if isinstance(value, str) and value != "*")


@cache
def _signature(function: str) -> ast.arguments | None:
    """Return the parameters of a function, from the installed pyspark's source.

    Of overloads it takes the one that is implemented.
    """
    begin = _source().rfind(f"\ndef {function}(") + 1
    header = re.compile(r"def .*?\) -> [^\n]*:(?=\n)", re.DOTALL).match(_source(), begin) if begin else None
    if header is None:
        return None
    defined = ast.parse(f"{header.group()} ...").body[0]
    assert isinstance(defined, ast.FunctionDef)
    return defined.args


def _names_column(parameter: ast.arg) -> bool:
    return parameter.annotation is not None and "ColumnOrName" in ast.unparse(parameter.annotation)


functions = _Functions()
"""Spark's column functions, by the names and with the arguments of `pyspark.sql.functions`.

They are recorded while a pipeline is built, with no Spark session and no JVM, and run by Catalyst in both modes: see
`DataStream.where`, `select`, `with_columns` and `agg`.
"""
