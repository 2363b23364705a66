"""A table of any origin, Arrow's or Spark's, as the state of an operator, and its rows as plain values."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import reduce
from itertools import repeat
from math import isnan
from operator import add, and_, or_
from typing import TYPE_CHECKING, Any, TypeGuard

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from dagster_unified.arrow_types import python_values
from dagster_unified.errors import StateError, nearest
from dagster_unified.operators.state.table import (
    ENCODED,
    EVENT_TIMERS,
    HELD,
    PROCESSING_TIMERS,
    ROLE,
    STATE,
    TIMERS,
    timer_lists,
)
from dagster_unified.operators.time import TimeDomain, to_millis
from dagster_unified.operators.windows.contents import CONTENTS
from dagster_unified.operators.windows.contents import TIMERS as WINDOW_TIMERS
from dagster_unified.state.manifest import from_spark, to_spark

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

Plain = Callable[[Any], Any]

_decode = msgspec.msgpack.Decoder(strict=False).decode


def plain_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """The rows of a table; null columns are left out, and msgpack is decoded."""
    names = [name for name in batch.schema.names if name != ENCODED]
    columns = [plain_values(batch.column(name)) for name in names]
    encoded: list[Any] = [None] * batch.num_rows
    if ENCODED in batch.schema.names:
        encoded = batch.column(ENCODED).to_pylist()
    for row, entries in zip(zip(*columns, strict=True), encoded, strict=True):
        plain_row = {name: value for name, value in zip(names, row, strict=True) if value is not None}
        for name, data in entries or ():
            plain_row[name] = decoded(name, data)
        yield plain_row


def decoded(name: str, data: bytes) -> Any:
    """A value that was kept as msgpack."""
    value = _decode(data)
    if name != HELD:
        return value
    return [{"timestamp": timestamp, "record": record} for timestamp, record in value]


def plain_values(column: pa.Array) -> list[Any]:
    """The values of a column, with maps as dicts."""
    convert = _plain(column.type)
    values = python_values(column)
    return values if convert is None else [None if v is None else convert(v) for v in values]


def timer_times(row: dict[str, Any]) -> dict[str, list[int]]:
    """The times of a row's timers, by the name of their column."""
    times = {}
    for name in (EVENT_TIMERS, PROCESSING_TIMERS):
        if row.get(name):
            times[name] = sorted(timer["timestamp"] for timer in row[name])
    return times


def _plain(kind: pa.DataType) -> Plain | None:
    """A function that turns the maps in values of a type into dicts; None where there are none."""
    if pa.types.is_struct(kind):
        fields = [(f.name, _plain(f.type)) for f in kind]
        if all(convert is None for _, convert in fields):
            return None
        return lambda v: {n: v[n] if c is None or v[n] is None else c(v[n]) for n, c in fields}
    if pa.types.is_list(kind):
        element = _plain(kind.value_type)
        return None if element is None else lambda v: [None if x is None else element(x) for x in v]
    if pa.types.is_map(kind):
        item = _plain(kind.item_type)
        return lambda v: {hashable(k): x if item is None or x is None else item(x) for k, x in v}
    return None


def hashable(value: Any) -> Any:
    """An Arrow value as a key: a record is the tuple of its fields."""
    if isinstance(value, dict):
        return tuple(map(hashable, value.values()))
    return tuple(map(hashable, value)) if isinstance(value, (list, tuple)) else value


DOMAINS = {"event": EVENT_TIMERS, "processing": PROCESSING_TIMERS}


def is_frame(table: object) -> TypeGuard[DataFrame]:
    """Whether a table is a DataFrame of Spark's, classic or of Connect."""
    return type(table).__module__.startswith("pyspark.sql.")


def arrow_table(where: str, table: object) -> pa.Table:
    """A table of Arrow, pandas, Polars, DuckDB or another library that hands out Arrow's columns."""
    if isinstance(table, pa.Table):
        return table
    if hasattr(table, "__arrow_c_stream__") or hasattr(table, "__arrow_c_array__"):
        return pa.table(table)
    raise StateError(f"{where}: expected an Arrow table or a DataFrame, and was given {type(table).__name__}")


def to_state_table(where: str, table: pa.Table, key: Sequence[str], timers: pa.Table | None) -> pa.Table:
    """The rows of an operator's state; raises `StateError` where the table is no state."""
    schema = state_schema(where, table.schema, key)
    try:
        rows = table.select(schema.names).cast(schema)
    except (pa.ArrowException, OverflowError) as error:
        raise StateError(f"{where}: a value does not fit the state's column: {error}") from error
    rows = _with_plain_keys(where, rows, key)
    keys = _keys(rows, key)
    if None in keys and not any(field.metadata[ROLE] == b"broadcast" for field in schema if field.metadata):
        raise StateError(f"{where}: a row has no key; fill in {', '.join(key)}, or leave the row out")
    if len(set(keys)) < len(keys):
        [(twice, _)] = Counter(keys).most_common(1)
        raise _doubled_key(where, twice)
    return rows if timers is None else _with_timers(where, rows, keys, key, timers)


def _with_plain_keys(where: str, rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """The rows with 0.0 for the key -0.0, as records have it; raises `StateError` for nan, which equals nothing."""
    for name in key:
        column = rows[name]
        if pa.types.is_floating(column.type):
            if pc.any(pc.is_nan(column)).as_py():
                raise _nan_key(where, name)
            place = rows.schema.get_field_index(name)
            rows = rows.set_column(place, rows.schema.field(place), pc.add(column, pa.scalar(0.0)))
    return rows


def to_state_frame(where: str, frame: DataFrame, key: Sequence[str], timers: DataFrame | None) -> DataFrame:
    """As `to_state_table`, for a DataFrame; Spark computes it once more to look for rows that are no state."""
    from pyspark.sql import functions as F

    schema = from_spark(frame.schema.json())
    for field in schema:
        if pa.types.is_decimal(field.type) and not _keeps_digits(field.type):
            raise StateError(
                f"{where}: column '{field.name}' is a {field.type}, and state has decimal128(38, 18): cast it, and so"
                " say what becomes of digits that it has no place for"
            )
    rows = _cast_frame(frame, state_schema(where, schema, key), key)
    _check_keys(where, rows, key)
    if timers is None:
        return rows
    times = from_spark(timers.schema.json())
    _check_timers(where, times.names, key)
    _check_moments(where, times.field("timestamp").type, 0)
    domain = F.col("domain") if "domain" in times.names else F.lit("event")
    generation = F.col("generation") if "generation" in times.names else F.lit(0)
    if "generation" in times.names and not pa.types.is_integer(times.field("generation").type):
        raise _no_generation(where)
    _check_rows_of_timers(where, timers.withColumns({"domain": domain, "generation": generation}), key)
    declared = {name: rows.schema[name].dataType for name in key}
    moment = F.unix_millis("timestamp") if pa.types.is_timestamp(times.field("timestamp").type) else F.col("timestamp")
    timer = F.struct(moment.cast("long").alias("timestamp"), generation.cast("long").alias("generation"))
    keys = [F.col(name).cast(declared[name]).alias(name) for name in key]
    lists = (
        timers.select(*keys, domain.alias("__domain"), timer.alias("__timer"))
        .groupBy(*key)
        .agg(
            *[
                F.array_sort(F.collect_list(F.when(F.col("__domain") == name, F.col("__timer")))).alias(column)
                for name, column in DOMAINS.items()
            ]
        )
    )
    return rows.drop(EVENT_TIMERS, PROCESSING_TIMERS).join(lists, list(key), "full")


def _keeps_digits(kind: pa.Decimal128Type) -> bool:
    """Whether state can hold each decimal of a type."""
    return bool(kind.scale <= 18 and kind.precision - kind.scale <= 20)


def _check_keys(where: str, rows: DataFrame, key: Sequence[str]) -> None:
    """Raise `StateError` where a row has no key, nan, or the key of another row."""
    from pyspark.sql import functions as F

    broadcast = any((field.metadata or {}).get(ROLE.decode()) == "broadcast" for field in rows.schema)
    columns = [F.col(f"`{name}`") for name in key]
    floats = [name for name in key if rows.schema[name].dataType.typeName() == "double"]
    wrong = [F.col("count") > 1, *[F.isnan(f"`{name}`") for name in floats]]
    if not broadcast:
        wrong.append(reduce(and_, [column.isNull() for column in columns]))
    bad_row = rows.groupBy(*columns).count().where(reduce(or_, wrong)).first()
    if bad_row is None:
        return
    parts = tuple(bad_row[name] for name in key)
    if not broadcast and set(parts) == {None}:
        raise StateError(f"{where}: a row has no key; fill in {', '.join(key)}, or leave the row out")
    for name in floats:
        if isnan(bad_row[name]):
            raise _nan_key(where, name)
    raise _doubled_key(where, parts[0] if len(parts) == 1 else parts)


def _check_rows_of_timers(where: str, timers: DataFrame, key: Sequence[str]) -> None:
    """Raise `StateError` where a timer lacks a value, or has an unknown domain."""
    from pyspark.sql import functions as F

    required = (*key, "timestamp", "domain")
    lacking = reduce(or_, [F.col(name).isNull() for name in required])
    ungenerated = F.col("generation").isNull() | (F.col("generation") < 0)
    bad_timer = timers.where(lacking | ungenerated | ~F.col("domain").isin(list(DOMAINS))).first()
    if bad_timer is None:
        return
    if bad_timer["generation"] is None or bad_timer["generation"] < 0:
        raise _no_generation(where)
    if bad_timer["domain"] not in DOMAINS:
        raise _no_domain(where, bad_timer["domain"])
    name = next(name for name in required if bad_timer[name] is None)
    raise StateError(f"{where}: a timer has no {name}; fill it in, or leave the timer out")


def _doubled_key(where: str, key: object) -> StateError:
    return StateError(f"{where}: several rows have the key {key!r}; give each key one row")


def _nan_key(where: str, name: str) -> StateError:
    return StateError(f"{where}: the key '{name}' of a row is nan, which equals nothing; leave the row out")


def _no_domain(where: str, domain: object) -> StateError:
    return StateError(f"{where}: a timer has the domain '{domain}', and it is 'event' or 'processing'")


def _no_generation(where: str) -> StateError:
    return StateError(
        f"{where}: the generation of a timer is a whole number of at least 0; leave the column out, or give it one"
    )


def _cast_frame(frame: DataFrame, schema: pa.Schema, key: Sequence[str]) -> DataFrame:
    """The columns in their types; -0.0 as a key becomes 0.0, as everywhere in Spark."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructType

    wanted = StructType.fromJson(json.loads(to_spark(schema)))
    columns = {f.name: F.col(f"`{f.name}`").cast(f.dataType) for f in wanted.fields}
    for name in key:
        if wanted[name].dataType.typeName() == "double":
            columns[name] = columns[name] + F.lit(0.0)
    return frame.select(*[column.alias(name) for name, column in columns.items()])


def state_schema(where: str, schema: pa.Schema, key: Sequence[str]) -> pa.Schema:
    """The columns of an operator's table, with their roles, for a table with these columns."""
    doubled = [name for name, count in Counter(schema.names).items() if count > 1]
    if doubled:
        raise StateError(f"{where}: several columns have the name '{doubled[0]}'; give each another")
    for name in key:
        if name not in schema.names:
            raise StateError(
                f"{where}: there is no column '{name}' for its key; there are"
                f" {', '.join(schema.names)}{nearest(name, schema.names)}"
            )
    fields = []
    for field in [schema.field(name) for name in key] + [f for f in schema if f.name not in key]:
        kind = canonical(field.type)
        if field.name in _OWN:
            if not _OWN[field.name](kind):
                raise StateError(
                    f"{where}: column '{field.name}' is of type {kind}, and its name is one of the library's own; give"
                    " it another"
                )
            fields.append(pa.field(field.name, kind))
            continue
        if field.name in key:
            metadata = {ROLE: b"key", STATE: field.name.encode()}
            kind = pa.timestamp("us", "UTC") if pa.types.is_timestamp(kind) else kind
        else:
            known_metadata = field.metadata or {}
            known = known_metadata.get(ROLE)
            role = known if known in (b"broadcast", b"list", b"union") else b"state"
            metadata = {ROLE: role, STATE: known_metadata.get(STATE, field.name.removesuffix(" (state)").encode())}
        fields.append(pa.field(field.name, kind, metadata=metadata))
    result = pa.schema(fields)
    to_spark(result)  # raises for a type that no state has
    return result


def canonical(kind: pa.DataType) -> pa.DataType:
    """The type in which the library writes values of a type; the type itself where it has none."""
    if pa.types.is_dictionary(kind):
        return canonical(kind.value_type)
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, canonical(f.type)) for f in kind])
    if pa.types.is_map(kind):
        return pa.map_(canonical(kind.key_type), canonical(kind.item_type))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(pa.field("element", canonical(kind.value_type)))
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    for matches, wanted in _CANONICAL:
        if matches(kind):
            return wanted
    return kind


_CANONICAL = [
    (pa.types.is_integer, pa.int64()),
    (pa.types.is_floating, pa.float64()),
    (pa.types.is_large_string, pa.string()),
    (pa.types.is_string_view, pa.string()),
    (pa.types.is_large_binary, pa.binary()),
    (pa.types.is_binary_view, pa.binary()),
    (pa.types.is_fixed_size_binary, pa.binary()),
    (pa.types.is_date, pa.date32()),
    (pa.types.is_decimal, pa.decimal128(38, 18)),
    (pa.types.is_duration, pa.duration("us")),
]


_OWN: Mapping[str, Callable[[pa.DataType], bool]] = {
    **dict.fromkeys((EVENT_TIMERS, PROCESSING_TIMERS), lambda kind: bool(kind == canonical(TIMERS))),
    HELD: lambda kind: bool(pa.types.is_list(kind)),
    ENCODED: lambda kind: bool(pa.types.is_map(kind)),
}
"""The library's own columns, and whether a type is theirs."""


# Keys and timers


def _keys(table: pa.Table, key: Sequence[str]) -> list[Hashable]:
    """The key of each row: a value, or a tuple of several; None where there is none."""
    columns = [[hashable(v) for v in table[name].to_pylist()] for name in key]
    if len(columns) == 1:
        return columns[0]
    return [None if all(part is None for part in row) else row for row in zip(*columns, strict=True)]


def _check_timers(where: str, names: Sequence[str], key: Sequence[str]) -> None:
    for name in (*key, "timestamp"):
        if name not in names:
            raise StateError(
                f"{where}: its timers have no column '{name}'; give {', '.join(key)} and timestamp, and where it is not"
                " event time a domain, 'event' or 'processing'"
            )


def _with_timers(
    where: str, rows: pa.Table, keys: Sequence[Hashable], key: Sequence[str], timers: pa.Table
) -> pa.Table:
    _check_timers(where, timers.schema.names, key)
    fields = [rows.schema.field(name) for name in key]
    try:
        timer_keys = pa.Table.from_arrays([timers[f.name].cast(f.type) for f in fields], schema=pa.schema(fields))
    except pa.ArrowException as error:
        raise StateError(f"{where}: the key of a timer does not fit the state's: {error}") from error
    timer_keys = _with_plain_keys(where, timer_keys, key)
    owners, size = _keys(timer_keys, key), timers.num_rows
    domains = timers["domain"].to_pylist() if "domain" in timers.schema.names else ["event"] * size
    if None in owners:
        raise StateError(f"{where}: a timer has no key; fill in {', '.join(key)}, or leave the timer out")
    generations = _generations(where, timers) if "generation" in timers.schema.names else [0] * size
    wrong = sorted({str(domain) for domain in domains} - DOMAINS.keys())
    if wrong:
        raise _no_domain(where, wrong[0])
    by_column: Mapping[str, list[tuple[int, Hashable, int]]] = {column: [] for column in DOMAINS.values()}
    for owner, domain, moment, generation in zip(owners, domains, _moments(where, timers), generations, strict=True):
        by_column[DOMAINS[domain]].append((moment, owner, generation))
    known = set(keys)
    fresh = {owner: place for place, owner in reversed(list(enumerate(owners))) if owner not in known}
    places = sorted(fresh.values())
    if places:
        rows = pa.concat_tables([rows, timer_keys.take(pa.array(places, pa.int64()))], promote_options="default")
    order = [*keys, *(owners[place] for place in places)]
    for column, lists in by_column.items():
        if column in rows.schema.names:
            rows = rows.drop_columns(column)
        rows = rows.append_column(pa.field(column, TIMERS), timer_lists(order, lists))
    return rows


def _check_moments(where: str, kind: pa.DataType, missing: int) -> None:
    if missing or not (pa.types.is_timestamp(kind) or pa.types.is_integer(kind)):
        what = "None" if missing else f"of type {kind}"
        raise StateError(
            f"{where}: the timestamp of a timer is {what}; give a timestamp, or whole milliseconds since the epoch"
        )


def _moments(where: str, timers: pa.Table) -> list[int]:
    column = timers["timestamp"]
    _check_moments(where, column.type, column.null_count)
    if pa.types.is_timestamp(column.type):  # which rounds down, also before 1970
        column = pc.floor_temporal(column, unit="millisecond").cast(pa.timestamp("ms", column.type.tz))
    return _whole(where, "timestamp", column)


def _generations(where: str, timers: pa.Table) -> list[int]:
    column = timers["generation"]
    if column.null_count or not pa.types.is_integer(column.type) or pc.any(pc.less(column, 0)).as_py():
        raise _no_generation(where)
    return _whole(where, "generation", column)


def _whole(where: str, name: str, column: pa.ChunkedArray) -> list[int]:
    try:
        numbers: list[int] = column.cast(pa.int64()).to_pylist()
    except pa.ArrowException as error:
        raise StateError(f"{where}: the {name} of a timer is no int of 64 bits: {error}") from error
    return numbers


def millis(moment: datetime | int) -> int:
    """A moment in milliseconds since the epoch; a datetime without a time zone is in UTC."""
    if not isinstance(moment, (int, datetime)) or isinstance(moment, bool):
        raise StateError(f"expected a datetime or milliseconds since the epoch, and was given {moment!r}")
    return to_millis(moment)


_TIMERS = {TimeDomain.EVENT_TIME: EVENT_TIMERS, TimeDomain.PROCESSING_TIME: PROCESSING_TIMERS}


def check_windows(where: str, rows: pa.Table | DataFrame, schema: pa.Schema, key: Sequence[str]) -> None:
    """Raise `StateError` where nothing would close a window; `schema` is the states' schema.

    Each window of time has a timer, and the table says whose it is. A window of another kind may have none: its trigger
    may count, and the window may stay for ever.
    """
    names = set(schema.names)
    if CONTENTS not in names:
        return
    if not names & set(WINDOW_TIMERS.values()):
        raise StateError(
            f"{where}: the table has '{CONTENTS}', and not which timers close them; give it the column"
            f" '{WINDOW_TIMERS[TimeDomain.EVENT_TIME]}' as well, a map from times to lists of windows"
        )
    if not set(rows.columns if is_frame(rows) else rows.schema.names) & set(_TIMERS.values()):
        raise StateError(f"{where}: the table has '{CONTENTS}', and no timers, which close them; give timers= as well")
    if not _is_of_time(schema.field(CONTENTS).type):
        return
    unclosed_key = _first_unclosed_of_frame(rows, key) if is_frame(rows) else _first_unclosed(rows, key)
    if unclosed_key is not None:
        shown = unclosed_key[0] if len(unclosed_key) == 1 else unclosed_key
        columns = " or ".join(f"'{name}'" for name in WINDOW_TIMERS.values() if name in names)
        raise StateError(
            f"{where}: nothing would close the windows of key {shown!r}; each moment in its {columns} needs a timer of"
            " that key in timers=, and there has to be one"
        )


def _is_of_time(contents: pa.DataType) -> bool:
    """Whether a column holds windows of time; for another type the start of a job reports the problem."""
    window = contents.key_type if pa.types.is_map(contents) else contents
    return pa.types.is_struct(window) and {field.name for field in window} == {"start", "end"}


def _first_unclosed(rows: pa.Table, key: Sequence[str]) -> tuple[Any, ...] | None:
    """The key of the first row with windows that lacks one of their timers."""
    empty = repeat(None, rows.num_rows)

    def column(name: str) -> Any:
        return rows[name].to_pylist() if name in rows.schema.names else empty

    waiting = [zip(column(WINDOW_TIMERS[domain]), column(_TIMERS[domain]), strict=True) for domain in TimeDomain]
    keys = zip(*[rows[name].to_pylist() for name in key], strict=True)
    row_key: tuple[Any, ...]
    for row_key, windows, *domains in zip(keys, rows[CONTENTS], *waiting, strict=True):
        if not windows.is_valid or not len(windows):
            continue
        moments = [{moment for moment, _ in waiting or ()} for waiting, _ in domains]
        timers = [{timer["timestamp"] for timer in timers or ()} for _, timers in domains]
        if not any(moments) or any(wanted - registered for wanted, registered in zip(moments, timers, strict=True)):
            return row_key
    return None


def _first_unclosed_of_frame(rows: DataFrame, key: Sequence[str]) -> tuple[Any, ...] | None:
    from pyspark.sql import functions as F

    def size(column: Column) -> Column:
        return F.when(column.isNull(), 0).otherwise(F.size(column))

    moments, missing = [], []
    for domain in TimeDomain:
        if WINDOW_TIMERS[domain] not in rows.columns:
            continue
        waiting = F.map_keys(F.col(f"`{WINDOW_TIMERS[domain]}`"))
        none = F.array().cast("array<long>")
        timers = F.col(f"`{_TIMERS[domain]}`")["timestamp"] if _TIMERS[domain] in rows.columns else none
        moments.append(size(waiting))
        missing.append(size(F.array_except(waiting, F.coalesce(timers, none))) > 0)
    unclosed = (reduce(add, moments) == 0) | reduce(or_, missing)
    row = rows.where((size(F.col(f"`{CONTENTS}`")) > 0) & unclosed).select(*[f"`{name}`" for name in key]).first()
    return None if row is None else tuple(row)
