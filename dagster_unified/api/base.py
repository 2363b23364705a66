"""The base of all streams: where their records come from, and the checks of functions, keys and columns.

The fluent classes are in `stream.py`, since their methods return one another. What builds windows, connected streams
and broadcast state is below that file, in files of its own, and goes by the class here.
"""

from __future__ import annotations

import functools
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Self

import pyarrow as pa
from msgspec import inspect as mi

from dagster_unified.api.building import GraphBuilder, N, Upstream, stated_output, type_argument
from dagster_unified.arrow_types import has, is_number
from dagster_unified.errors import PipelineError, RecordTypeError, nearest
from dagster_unified.graph.code import field_of
from dagster_unified.graph.connectors import Source
from dagster_unified.graph.expressions import Column, alias_of, columns_read, is_unnamed, makes_column
from dagster_unified.graph.nodes import ExchangeKind, Key, Naming, Node, Partitioning
from dagster_unified.operators.functions.base import Function, OutputTag
from dagster_unified.operators.functions.type_variables import KeyOut, T
from dagster_unified.operators.layout import TIMESTAMP, ComputedKey
from dagster_unified.records import (
    RecordType,
    arrow_type,
    equal_by_more,
    inspected,
    is_column,
    not_in_a_key,
    return_type,
    type_name,
)
from dagster_unified.values import check_count


class BaseStream(ABC, Generic[T]):
    """A stream of a pipeline, or of the body of an iteration."""

    _key_selector: Key | None = None
    """The key, if the stream is keyed."""

    def __init__(self, pipeline: GraphBuilder, node: int | None, upstream: tuple[Upstream, ...] = ()) -> None:
        self._pipeline = pipeline
        self._last = node
        self._upstream = upstream or (Upstream(node),)  # type: ignore[arg-type]

    @abstractmethod
    def _over(self, upstream: tuple[Upstream, ...]) -> BaseStream[T]:
        """Return a stream of the same records from elsewhere."""

    @abstractmethod
    def map(self, function: Any, output_type: Any) -> BaseStream[Any]: ...
    @abstractmethod
    def process(self, function: Any, output_type: Any) -> BaseStream[Any]: ...
    @abstractmethod
    def union(self, *streams: Any) -> BaseStream[T]: ...
    @abstractmethod
    def key_by(self, *key: Any, key_type: Any) -> BaseStream[T]: ...

    # What surrounds it

    def _called(self, name: str, naming: Naming) -> Self:
        return self._set(name=name, naming=naming)

    def _set(self, **attributes: Any) -> Self:
        first = next(iter(attributes))
        self._pipeline._change(self._operator("chaining" if first == "chaining" else f"a {first}").id, **attributes)
        return self

    def _operator(self, what: str) -> Node:
        if self._last is None:
            first = self._upstream[0]
            before = f"'{self._pipeline._node(first.node).name}'"
            if first.tag is not None:
                raise PipelineError(
                    f"{self._pipeline.name}: {what} belongs to an operator or a sink, "
                    f"and this stream is the side output '{first.tag.name}' of {before}; "
                    "give it to what reads the side output: .sink_to(sink).name(...), .print().name(...), "
                    "or the next operator"
                )
            if len(self._upstream) > 1:
                kind = "a union"
            else:
                kind = f"{'keyed,' if self._key_selector is not None else 'an exchange'} behind {before}"
            raise PipelineError(
                f"{self._pipeline.name}: {what} belongs to an operator or a sink, and this stream is {kind}; "
                "call it on the operator before, or the one after"
            )
        return self._pipeline._node(self._last)

    def _where(self, operator: str | None = None) -> str:
        name = operator or (self._pipeline._node(self._last).name if self._last is not None else "stream")
        return f"{self._pipeline.name}: operator '{name}'"

    def _records(self, operator: str) -> RecordType:
        first = self._upstream[0]
        records = first.tag.output_type if first.tag is not None else self._pipeline._node(first.node).records
        if records is None:
            raise RecordTypeError(f"{self._where(operator)}: the stream before it has no record type")
        record_type: RecordType = records
        return record_type

    def _by_exchange(self, kinds: Sequence[ExchangeKind]) -> list[tuple[BaseStream[T], Partitioning | None]]:
        """Return the streams that it unites, without exchanges, each next to its exchange of one of `kinds`."""
        parts: list[tuple[list[Upstream], Partitioning | None]] = []
        for upstream in self._upstream:
            asked = upstream.partitioning
            exchange = asked if asked is not None and asked.kind in kinds else None
            plain = replace(upstream, partitioning=None)
            if parts and parts[-1][1] == exchange:
                parts[-1][0].append(plain)
            else:
                parts.append(([plain], exchange))
        return [(self._over(tuple(part)), exchange) for part, exchange in parts]

    def _node_by_key(self, kind: type[N], name: str, **attributes: Any) -> N:
        return self._pipeline._add(kind, list(self._upstream), name, key=self._key_selector, **attributes)

    def _over_exchange(self, kind: ExchangeKind, key: Key | None, partitioner: Any) -> tuple[Upstream, ...]:
        partitioning = Partitioning(kind, key, partitioner, explicit=True)
        return tuple(replace(u, partitioning=partitioning) for u in self._upstream)

    # Functions and what they return

    def _name_of(self, function: Any, kind: str) -> str:
        """Return the author's name of a function of records; raises for an expression on columns."""
        if makes_column(function):
            raise PipelineError(f"{self._where(kind)}: {_on_columns(function)}")
        if isinstance(function, str):
            raise PipelineError(
                f"{self._where(kind)}: {function!r} is a text, and no function of a record; a condition in SQL goes"
                " into where, expressions into select, with_columns or agg"
            )
        return name_of(function, kind)

    def _check_function(self, name: str, function: Any) -> None:
        if isinstance(function, type) and issubclass(function, Function):
            raise PipelineError(
                f"{self._where(name)}: {function.__name__} is a class; give an instance of it, {function.__name__}()"
            )
        if not callable(function):
            raise PipelineError(f"{self._where(name)}: expected a function or a function object, got {function!r}")

    def _check_combines(self, name: str) -> None:
        records = self._records(name)
        if records.shape == "value" and records.schema.field(0).nullable:
            raise PipelineError(
                f"{self._where(name)}: a record may be None ({type_name(records.python)}), which stands for no record"
                " where records are combined; filter such records out, or map them to a value"
            )

    def _output(self, name: str, function: Any, output_type: Any, unwrap: Callable[[Any], Any]) -> RecordType:
        """Return the record type that a function gives: `output_type`, its class and its annotation have to agree."""
        self._check_function(name, function)
        annotation = return_type(function)
        annotated = None if annotation is None else unwrap(annotation)
        if annotation is type(None) and annotated is None:
            annotation = None  # it emits to side outputs only, or in another method
        stated = stated_output(function)
        if output_type is None and annotation is not None and annotated is None:
            shown = type_name(annotation)
            raise RecordTypeError(
                f"{self._where(name)} is annotated to give {shown}, and has to give an iterable of records, "
                f"such as Iterable[{shown}]"
            )
        if output_type is None and stated is None and annotated is None:
            raise RecordTypeError(
                f"{self._where(name)} has no output type; annotate what the function returns, or give output_type="
            )
        if output_type is not None:
            records = self._pipeline._record_type(output_type, name)
            self._check_same(
                name, records, stated, f"output_type is {type_name(output_type)}, but the function's class"
            )
            says = f"output_type is {type_name(output_type)}, but the function"
        elif stated is not None:
            records = self._pipeline._record_type(stated, name)
            says = f"the function's class says that it gives {type_name(stated)}, but its method"
        else:
            return self._pipeline._record_type(annotated, name)
        self._check_same(name, records, annotated, says)
        return records

    def _check_same(self, name: str, records: RecordType, also: Any, says: str) -> None:
        """Raise where another type is given for an output; what is no record type says nothing."""
        if also is None or also is Any:
            return
        try:
            other = self._pipeline._record_type(also, name)
        except RecordTypeError:
            return
        if other.schema != records.schema:
            raise RecordTypeError(
                f"{self._where(name)}: {says} is annotated to give {type_name(also)}; make them the same"
            )

    def _check_late_tag(self, tag: OutputTag[Any], where: str) -> None:
        """Raise where late records do not fit a side output; else the first one would tell, after weeks perhaps."""
        if not isinstance(tag, OutputTag):
            raise PipelineError(f"{where}: expected an OutputTag for late data, got {tag!r}")
        declared = self._pipeline._record_type(tag.output_type, f"{where}, side output {tag.name}")
        wanted = self._records(where)
        if declared.python != wanted.python:
            raise RecordTypeError(
                f"{where}: late records are of {wanted.describe()}, and side output '{tag.name}' is declared"
                f" {declared.describe()}; declare it with the stream's type"
            )

    # Keys

    def _key(self, key: tuple[Any, ...], key_type: Any) -> Key:
        records = self._records("key_by")
        fields = [k for k in key if isinstance(k, (str, int))]
        if len(key) == 1 and not fields and records.shape != "value":
            read = field_of(key[0])
            if read is not None and all(
                f in records.names or (isinstance(f, int) and 0 <= f < len(records.names)) for f in read
            ):
                fields, key = list(read), read
        if len(fields) == len(key):
            names = [records.names[f] if isinstance(f, int) and 0 <= f < len(records.names) else str(f) for f in fields]
            for name in names:
                self._check_key_field(records, name)
            if key_type is not None:
                self._check_key_type(
                    key_type, [records.schema.field(name).type for name in names], f"the key is {', '.join(names)}"
                )
            return Key(fields=tuple(names))
        if len(key) != 1:
            raise PipelineError(f"{self._where('key_by')}: give either field names or one function, not both")
        return self._computed_key(key[0], key_type)

    def _check_key_field(self, records: RecordType, name: str) -> None:
        check_field(records, name, self._where("key_by"))
        kind = records.schema.field(name).type
        if pa.types.is_nested(kind):
            info = mi.type_info(records.type_of(name))
            _check_can_be_key(info, f"{self._where('key_by')}: field '{name}' is a {kind}, which cannot be a key")

    def _check_key_type(self, key_type: Any, key_types: list[pa.DataType], what: str) -> None:
        where = self._where("key_by")
        declared = arrow_type(inspected(key_type, where, "a key"), where)
        parts = [f.type for f in declared] if len(key_types) > 1 and pa.types.is_struct(declared) else [declared]
        if parts != key_types:
            raise RecordTypeError(
                f"{self._where('key_by')}: key_type is {type_name(key_type)}, "
                f"but {what} ({', '.join(map(str, key_types))}); make them the same, or leave key_type out"
            )

    def _computed_key(self, function: Any, key_type: Any) -> Key:
        if makes_column(function):
            raise PipelineError(f"{self._where('key_by')}: {_on_columns(function)}; or give the names of fields")
        check_not_opened(function, self._where("key_by"))
        annotated = return_type(getattr(function, "get_key", function)) or type_argument(type(function), KeyOut)
        python = key_type if key_type is not None else annotated
        if key_type is not None and annotated not in (None, Any):
            self._check_key_type(
                key_type,
                [arrow_type(mi.type_info(annotated), self._where("key_by"))],
                f"the function is annotated to give {type_name(annotated)}",
            )
        if python is None:
            raise RecordTypeError(
                f"{self._where('key_by')}: the key's type is not known; annotate the key function, or give key_type="
            )
        where = f"{self._pipeline.name}: key_by({name_of(function, 'function')})"
        info = inspected(python, where, "a key")
        if isinstance(info, (mi.UnionType, mi.NoneType)):
            raise RecordTypeError(
                f"{where}: a key of type {type_name(python)} may be None, and a None key is an error; "
                "give such records a key, or filter them out"
            )
        arrow = arrow_type(info, where)
        _check_can_be_key(info, f"{where}: a {type_name(python)} cannot be a key")
        return Key(computed=ComputedKey(function, python, arrow, where))

    # Columns

    def _check_columns(self, columns: Iterable[str | Column], operator: str, aliases: Sequence[str] = ()) -> None:
        """Raise where an expression reads a column that is not there.

        It may read what an earlier one gives: its alias, or one of `aliases`.
        """
        records = self._records(operator)
        known = {name.lower() for name in (*records.names, TIMESTAMP)}
        for place, column in enumerate(columns):
            if not isinstance(column, str) and not is_column(column):
                raise PipelineError(
                    f"{self._where(operator)}: it takes SQL text and expressions of dagster_unified.api.functions, and"
                    f" was given {column!r}; a Python function goes into filter, map or reduce"
                )
            for name in sorted(columns_read(column)):
                if name.lower() not in known:
                    shown = f" of {column!r}" if isinstance(column, str) and column != name else ""
                    raise PipelineError(
                        f"{self._where(operator)}: no column '{name}'{shown} in "
                        f"{records.describe()}{nearest(name, records.names)}"
                    )
            known.add((aliases[place] if aliases else alias_of(column) or "").lower())

    def _combined_field(self, kind: str, field: str | int) -> str | int | None:
        """Return the field that `sum` and its like combine, as operators read it; None for the record itself."""
        records = self._records(kind)
        if records.shape == "value":
            self._check_combines(kind)
            return None
        if is_column(field):
            raise PipelineError(
                f"{self._where(kind)}: it takes the name of a field, and was given {field!r}; agg takes expressions on"
                f" columns, such as F.{kind}('{records.names[0]}')"
            )
        name = records.names[field] if isinstance(field, int) and 0 <= field < len(records.names) else field
        if name not in records.names:
            raise PipelineError(
                f"{self._where(kind)}: no field '{field}' in {records.describe()}{nearest(str(field), records.names)}"
            )
        kind_of = records.schema.field(name).type
        enum = records.members().get(name)
        if enum is not None and (kind == "sum" or not issubclass(enum, (str, int))):
            raise PipelineError(
                f"{self._where(kind)}: field '{name}' is a {enum.__name__}, an enum, which has no {kind}; "
                "map it to a number, or use reduce"
            )
        if kind == "sum" and not (is_number(kind_of) or pa.types.is_duration(kind_of)):
            raise PipelineError(f"{self._where(kind)}: field '{name}' is a {kind_of}, which has no sum")
        if records.schema.field(name).nullable:
            raise PipelineError(
                f"{self._where(kind)}: field '{name}' may be None, which {kind} cannot combine; map it to a value, "
                "or use reduce"
            )
        return records.names.index(name) if records.shape == "tuple" else name

    def _aggregated(
        self, columns: tuple[str | Column, ...], output_type: Any, bounds: tuple[str, ...] = ()
    ) -> RecordType:
        """Return the record of column aggregates, with the bounds of a window where it names them.

        Raises where it does not fit.
        """
        keys = () if self._key_selector is None else self._key_selector.fields
        if not keys:
            raise PipelineError(f"{self._where('agg')}: agg needs a stream keyed by fields; use key_by('field')")
        self._check_columns(columns, "agg")
        records = self._pipeline._record_type(output_type, "agg")
        missing = [k for k in keys if k not in records.names]
        named = [b for b in bounds if b in records.names]
        if missing or len(records.names) != len(keys) + len(named) + len(columns):
            also = f" {', '.join(bounds)} where it names them," if bounds else ""
            raise RecordTypeError(
                f"{self._where('agg')}: the result has the key's fields ({', '.join(keys)}),{also} and {len(columns)} "
                f"aggregates, and output_type is {records.describe()}"
                + (f", which has no field '{missing[0]}'" if missing else "")
            )
        self._check_named(columns, records, [name for name in records.names if name not in (*keys, *named)])
        return records

    def _check_named(self, columns: tuple[str | Column, ...], records: RecordType, fields: Sequence[str]) -> None:
        """Raise where an aggregate has no name of a field of its own; Spark ignores case."""
        aliases, known = [alias_of(column) for column in columns], {name.lower() for name in fields}
        for column, name in zip(columns, aliases, strict=True):
            if name is None and is_unnamed(column):
                alias = f'.alias("{fields[0]}"), or AS {fields[0]} in SQL'
                raise RecordTypeError(
                    f"{self._where('agg')}: {column!r} has no name; name the field of {records.describe()} that it is,"
                    f" such as '{fields[0]}', with {alias}"
                )
            if name is not None and name.lower() not in known:
                what = "no field of its own" if name in records.names else "no field"
                raise RecordTypeError(
                    f"{self._where('agg')}: '{name}' is {what} of {records.describe()}; the aggregates are"
                    f" {', '.join(fields)}{nearest(name, fields)}"
                )
        missing = [
            name for name in fields if name.lower() not in {alias.lower() for alias in aliases if alias is not None}
        ]
        if missing and None not in aliases:
            raise RecordTypeError(
                f"{self._where('agg')}: no aggregate is named '{missing[0]}', which is a field of {records.describe()}"
            )


def check_parallelism(parallelism: int, where: str) -> None:
    """Raises where it is no number of subtasks."""
    check_count(f"{where}: parallelism", parallelism)


def plain_name(column: str | Column) -> str | None:
    """The name of a column that is one of the record's, as text or as `col(name)`; None for an expression."""
    if isinstance(column, str):
        return column
    return column.arguments[0] if column.target is None and column.name == "col" else None


def name_of(function: Any, default: str) -> str:
    """Return the author's name of a function; `default` for a lambda."""
    if isinstance(function, functools.partial):
        return name_of(function.func, default)
    name: str = getattr(function, "__name__", None) or type(function).__name__
    return default if name == "<lambda>" else name


def _on_columns(expression: Any) -> str:
    """Return why an expression on columns, or a function that makes one, does not fit, and where it goes."""
    is_one = is_column(expression)
    what = f"{expression!r} is an expression" if is_one else f"'{expression.__name__}' makes an expression"
    return (
        f"{what} on columns, and no function of a record; a condition goes into where, values into select,"
        " with_columns or agg"
    )


def naming_of(function: Any) -> Naming:
    """Return whether an operator is called after its function."""
    return Naming.FUNCTION if name_of(function, "") else Naming.LIBRARY


def check_not_opened(function: Any, where: str) -> None:
    """Raises where a key selector or a partitioner counts on `open` or `close`: it is called in many places."""
    overridden = (name for name in ("open", "close") if getattr(type(function), name, None) != getattr(Function, name))
    name = next(overridden, None) if isinstance(function, Function) else None
    if name is not None:
        raise PipelineError(
            f"{where}: {type(function).__name__} overrides {name}(), which is not called of a key selector or a"
            " partitioner; make what it needs in __init__, or when it is first called"
        )


def _check_can_be_key(info: mi.Type, what: str) -> None:
    part = not_in_a_key(info)
    if part is not None:
        raise RecordTypeError(
            f"{what}, since {part} can change or has no fixed length; use a scalar, a tuple, or a NamedTuple or frozen"
            " class of these"
        )
    kind = equal_by_more(info)
    if kind is not None:
        raise RecordTypeError(
            f"{what}, since {kind} is not equal by all its fields, and records are brought together by these; leave"
            " __eq__, eq=False and compare=False out, or give a function that makes the key"
        )


def check_field(records: RecordType, name: str, where: str) -> None:
    """Raises where records have no such field."""
    if name not in records.names:
        raise PipelineError(f"{where}: no field '{name}' in {records.describe()}{nearest(name, records.names)}")


def check_lookup_keys(before: RecordType, table: Source[Any], pairs: Mapping[str, str], where: str) -> None:
    """Raises where a field and the table's column that it is looked up by are not there, or are of two types."""
    for field, column in pairs.items():
        check_field(before, field, where)
        check_field(table.records, column, f"{where}: table '{table.name}'")
        kinds = before.schema.field(field).type, table.records.schema.field(column).type
        if kinds[0] != kinds[1]:
            raise RecordTypeError(
                f"{where}: field '{field}' is a {kinds[0]} and the table's '{column}' a {kinds[1]}; "
                "a lookup compares values of one type"
            )
        if has(kinds[0], pa.types.is_map):
            raise PipelineError(
                f"{where}: field '{field}' has a dict, which Spark does not compare; look up another field"
            )


def check_lookup_fields(
    before: RecordType,
    table: Source[Any],
    columns: Mapping[str, str],
    records: RecordType,
    how: str,
    where: str,
) -> None:
    """Raises where the fields of a lookup's result are not those of the stream and the table."""
    if not isinstance(columns, Mapping):
        raise PipelineError(
            f"{where}: columns= says which of the table's columns a new field is, such as {{'city': 'name'}}, and is"
            f" {columns!r}"
        )
    for field, column in columns.items():
        check_field(table.records, column, f"{where}: table '{table.name}'")
        if field in before.names:
            raise PipelineError(
                f"{where}: the stream has a field '{field}' already; give the table's column '{column}' another name"
            )
        if field not in records.names:
            raise RecordTypeError(
                f"{where}: field '{field}' is not in output_type, {records.describe()}; add it there, "
                "or leave it out of columns"
            )
    for field in records.names:
        if field not in columns:
            check_field(before, field, where)
        actual = table.records.schema.field(columns[field]) if field in columns else before.schema.field(field)
        declared = records.schema.field(field)
        if declared.type != actual.type:
            raise RecordTypeError(
                f"{where}: field '{field}' is a {actual.type}, and output_type says {declared.type}; make them the same"
            )
        if actual.nullable and not declared.nullable:
            raise RecordTypeError(
                f"{where}: field '{field}' may be None {'in the table' if field in columns else 'before'}, "
                "and output_type does not allow that; annotate it as '| None'"
            )
        if field in columns and how == "left" and not declared.nullable:
            raise RecordTypeError(
                f"{where}: field '{field}' is None where nothing is found, and output_type does not allow None; "
                "annotate it as '| None', or use how='inner'"
            )


def projection(records: RecordType, names: list[str]) -> RecordType:
    """A record type of some columns of another, under the same annotations."""
    if records.shape != "class":
        raise RecordTypeError("a projection of tuples or plain values needs output_type=")
    hints = typing.get_type_hints(records.python, include_extras=True)
    python = typing.NamedTuple(records.python.__name__, [(n, hints[n]) for n in names])  # type: ignore[misc]
    return RecordType(python, "class", pa.schema([records.schema.field(n) for n in names]))
