"""How a source reads only a partition of itself: by the names of its files, or by the values of columns.

Knows slices and columns; not which source it is.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from datetime import date, datetime, timedelta
from string import Formatter
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

from dagster_unified.connectors import patterns
from dagster_unified.connectors.base import MALFORMED, fitting, opaque
from dagster_unified.connectors.texts import moment_of
from dagster_unified.errors import PipelineError, nearest
from dagster_unified.graph.slices import Dimensions, Slice, TimeRange
from dagster_unified.operators.layout import PARTITION_INDEX
from dagster_unified.operators.time import to_millis

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

_PLAIN = re.compile(r"[\w.=+@:-][\w .=+@:-]*")
_DIRECTIVES = frozenset("aAbBcCdDeFfgGhHIjklmMpPrRsSTuUVwWxXyYzZ%")
"""The letters of `strftime`; a `-` before one leaves out leading zeros."""


class PathTemplate:
    """A path with `{start:%Y-%m-%d}`, `{end:…}`, `{key}` or, of several dimensions, `{name}` or `{name:%Y}` in it.

    Raises `PipelineError` where the path is no template, or a field's format is none of a time.
    """

    def __init__(self, path: str, where: str) -> None:
        self.path, self.where = path, where
        try:
            pieces = list(Formatter().parse(path))
        except ValueError as error:
            raise PipelineError(
                f"{where}: {path!r} is not a path template: {error}; write {{start:%Y-%m-%d}} or {{key}}"
            ) from None
        self._pieces = [(text, name, form or "") for text, name, form, _ in pieces]
        for _, name, form, conversion in pieces:
            if name is not None and not name.isidentifier():
                raise self._error(
                    f"has {{{name}}}, which no partition has; write {{{{ and }}}} for braces that are part of a name"
                )
            if conversion:
                raise self._error(
                    f"has the conversion '!{conversion}' for {{{name}}}; write {{start:%Y-%m-%d}} or {{key}}"
                )
            if form:
                self._check_format(name or "", form)

    def check(self, known: Dimensions) -> None:
        """Raises `PipelineError` where a field is none that partitions with these dimensions have."""
        times = {*known.in_time, *(("start", "end") if known.in_time else ())} - {""}
        names = {*times, *known.names, "key"} - {""}
        for _, name, form in self._pieces:
            if name is None:
                continue
            if name not in names:
                listed = ", ".join(f"{{{n}}}" for n in sorted(names))
                raise self._error(f"asks for '{name}', and a partition has {listed}{nearest(name, names)}")
            if form and name not in times:
                raise self._error(f"formats {{{name}}} as a time, '{form}', and it is a text; write {{{name}}}")

    def _check_format(self, name: str, form: str) -> None:
        advice = f"write {{{name or 'start'}:%Y-%m-%d}}"
        directives = re.findall(r"%-?.?", form)
        if all(directive == "%%" for directive in directives):
            raise self._error(f"has the format '{form}' for {{{name}}}, which is the same at every time; {advice}")
        for directive in directives:
            if directive[-1] not in _DIRECTIVES or directive == "%":
                raise self._error(
                    f"has the format '{form}' for {{{name}}}, in which '{directive}' is no directive of strftime;"
                    f" {advice}"
                )

    def _error(self, problem: str) -> PipelineError:
        return PipelineError(f"{self.where}: the path template '{self.path}' {problem}")

    def has_fields(self) -> bool:
        """Whether partitions have paths of their own."""
        return any(name is not None for _, name, _ in self._pieces)

    def everything(self) -> str:
        """The pattern that all partitions' paths match."""
        return self._filled(lambda _name, form: "/".join("*" for _ in form.split("/")))

    def of(self, slice_: Slice) -> str:
        """The path of one partition."""
        return self._filled(lambda name, form: self._value(name, form, slice_))

    def names(self, dimensions: Set[str]) -> bool:
        """Whether a field of the path is of one of these dimensions in time."""
        return any(name in {*dimensions, "start", "end", "key"} for _, name, _ in self._pieces)

    def tells_no_time(self) -> str | None:
        """Why the paths of files do not tell which partitions in time they are of; None where they do."""
        return self._times if isinstance(self._times, str) else None

    def ends_by(self, name: str, moment: datetime) -> bool:
        """Whether a file is of a partition that ends by a moment, told as the partitions' time zone tells it.

        `name` is the path of the file below the folder before the first field.
        """
        return not isinstance(self._times, str) and self._times.end_by(name, moment)

    @functools.cached_property
    def _times(self) -> PathTimes | str:
        names = [name for _, name, _ in self._pieces if name is not None]
        field = next((name for name in ("start", "end", "key") if name in names), None)
        if field is None:
            return f"the path template '{self.path}' has no {{start:%Y-%m-%d}}, which would tell a file's partition"
        folders = self._pieces[0][0].split("/")
        below = next((n for n, folder in enumerate(folders) if patterns.has_star(folder)), len(folders) - 1)
        pieces = [("/".join(folders[below:]), *self._pieces[0][1:]), *self._pieces[1:]]
        try:
            return PathTimes(field, pieces)
        except KeyError as unknown:
            return f"the path template '{self.path}' has %{unknown.args[0]}, which cannot be read back from a path"

    def _filled(self, value: Callable[[str, str], str]) -> str:
        """The path, with each field replaced."""
        return "".join(text + (value(name, form) if name is not None else "") for text, name, form in self._pieces)

    def _value(self, name: str, form: str, slice_: Slice) -> str:
        time = slice_.time()
        known: dict[str, datetime | str] = {
            "key": slice_.key,
            **({"start": time.start, "end": time.end} if time is not None else {}),
        }
        known |= {n: p.start if isinstance(p, TimeRange) else p for n, p in slice_.dimensions.items() if n}
        value = known[name]
        text = value.strftime(form or "%Y-%m-%d") if isinstance(value, datetime) else str(value)
        if not all(
            segment not in (".", "..") and _PLAIN.fullmatch(segment)
            for segment in (text.split("/") if isinstance(value, datetime) else [text])
        ):
            raise PipelineError(
                f"{self.where}: partition '{slice_.key}' gives {text!r} for {{{name}}}, which cannot be part of a path"
            )
        return text


class PathTimes:
    """The times that one field of a path template has in the paths of files: its start, its end or its key.

    Raises `KeyError` with a directive that cannot be read back.
    """

    def __init__(self, field: str, pieces: Sequence[tuple[str, str | None, str]]) -> None:
        self.field = field
        self._directives: list[str] = []
        pattern = ""
        for text, name, form in pieces:
            pattern += patterns.as_regex(text)
            if name == field == "key":
                pattern += "([^/]+)"
            elif name == field:
                pattern += self._pattern(form or "%Y-%m-%d")
            elif name is not None:
                pattern += "/".join("[^/]*" for _ in form.split("/"))
        self._matcher = re.compile(f"{pattern}(?:/.*)?")

    def end_by(self, name: str, moment: datetime) -> bool:
        """Whether the file of this path is of a partition that ends by a moment, on the clock of the partitions' zone.

        The moment is written as the path writes its time, which may be less: the day of a partition that begins at
        01:00, since the clock skips the hour before.
        """
        match = self._matcher.fullmatch(name)
        if match is None:
            return False
        texts = "/".join(match.groups())
        forms = _KEYS if self.field == "key" else ["/".join(f"%{directive}" for directive in self._directives)]
        for form in forms:
            with contextlib.suppress(ValueError):
                time, limit = (datetime.strptime(text, form) for text in (texts, moment.strftime(form)))
                return time <= limit if self.field == "end" else time < limit
        return False

    def _pattern(self, form: str) -> str:
        """A format as a regular expression, with a group for each directive where it is first."""
        for short, long in _SHORT.items():
            form = form.replace(short, long)
        pattern = ""
        for literal, directive in re.findall(r"([^%]+)|%-?(.)", form):
            if literal or directive == "%":
                pattern += re.escape(literal or "%")
                continue
            text = _READABLE[directive]
            pattern += f"(?:{text})" if directive in self._directives else f"({text})"
            self._directives += [directive] if directive not in self._directives else []
        return pattern


_READABLE = {
    **dict.fromkeys("mdHIMSyVUW", r"\d{1,2}"),
    **dict.fromkeys("YG", r"\d{4}"),
    **dict.fromkeys("aAbBp", r"[^/\d]+"),
    **dict.fromkeys("uw", r"\d"),
    "j": r"\d{1,3}",
    "f": r"\d{1,6}",
}
"""The directives that `strptime` reads, as regular expressions."""

_SHORT = {"%F": "%Y-%m-%d", "%T": "%H:%M:%S", "%R": "%H:%M", "%h": "%b"}

_KEYS = ("%Y-%m-%d", "%Y-%m-%d-%H:%M")
"""How Dagster writes the keys of days, weeks and months, and of hours."""


def checked_columns(columns: Mapping[str, str], names: tuple[str, ...], where: str) -> dict[str, str]:
    """Dimension to column; raises where there is no such column."""
    for column in columns.values():
        if column not in names:
            raise PipelineError(
                f"{where}: cannot be partitioned by '{column}': there is no such field{nearest(column, names)}"
            )
    return dict(columns)


def check_partition_columns(columns: Mapping[str, str], schema: pa.Schema, known: Dimensions, where: str) -> None:
    """Raises `PipelineError` where a field is given for a dimension that there is not, or holds no time."""
    for dimension, column in columns.items():
        if dimension not in known.names:
            given = f"dimension '{dimension}'" if dimension else "its only dimension"
            raise PipelineError(
                f"{where}: is partitioned by '{column}' as {given}, and the partitions have"
                f" {known.describe()}{nearest(dimension, known.names)}"
            )
        kind = schema.field(column).type
        if dimension not in known.in_time and not any(is_key(kind) for is_key in _KEY_TYPES):
            raise PipelineError(
                f"{where}: field '{column}' of type {kind} cannot be compared with the keys of {known.describe()};"
                " a text, a whole number or a date can"
            )
        if dimension in known.in_time and not any(is_time(kind) for is_time in _TIMES):
            raise PipelineError(
                f"{where}: cannot be partitioned in time by field '{column}' of type {kind}; a datetime, a date,"
                " milliseconds since the epoch or an ISO text can"
            )


_KEY_TYPES = (pa.types.is_string, pa.types.is_int64, pa.types.is_date)
"""What is written in one way only."""

_TIMES = (pa.types.is_timestamp, pa.types.is_date, pa.types.is_int64, pa.types.is_string)


_DAY, _TICK = timedelta(days=1), timedelta(microseconds=1)

Hull: TypeAlias = Mapping[str, "TimeRange | frozenset[str]"]
"""Of columns, the time or the keys that partitions cover: no row of theirs has a value beyond."""


def hull(columns: Mapping[str, str], slices: Sequence[Slice]) -> Hull:
    """What partitions cover, so that a server may leave out what is surely of none; Spark looks closer."""
    found: dict[str, TimeRange | frozenset[str]] = {}
    for dimension, column in columns.items():
        bounds = [slice_.dimensions[dimension] for slice_ in slices if dimension in slice_.dimensions]
        times = [bound for bound in bounds if isinstance(bound, TimeRange)]
        if not bounds or len(bounds) < len(slices):
            continue
        if len(times) == len(bounds):
            # by moments: datetimes of one zone are compared by the clock, which may show an hour twice
            start = min((bound.start for bound in times), key=to_millis)
            found[column] = TimeRange(start, max((bound.end for bound in times), key=to_millis))
        elif not times:
            found[column] = frozenset(bound for bound in bounds if isinstance(bound, str))
    return found


def in_any_zone(bounds: TimeRange) -> TimeRange:
    """What may be meant by bounds where values have no time zone: dates and times are then those of some zone."""
    return TimeRange(bounds.start - _DAY, bounds.end + _DAY)


def in_folder(column: str, kind: DataType, bounds: TimeRange | frozenset[str]) -> Column:
    """Whether a text that a folder's name has, for a field of this type, may be one that partitions cover."""
    from pyspark.sql import functions as F

    text = F.col(column)
    if not isinstance(bounds, TimeRange):
        key = text.try_cast(kind).cast("string")  # 7 for 007, where that is a number
        return key.isNull() | key.isin(sorted(bounds))
    meant = in_any_zone(bounds)
    first, last = meant.start.date().isoformat(), (meant.end - _TICK).date().isoformat()
    day = F.substring(text, 1, 10)
    return text.isNull() | ~day.rlike(r"^\d{4}-\d{2}-\d{2}$") | day.between(first, last)


def whole_numbers(keys: Collection[str]) -> list[int]:
    """The numbers that these keys name as Spark writes them; no row has the others."""
    numbers = (int(key) for key in keys if re.fullmatch(r"-?[0-9]{1,19}", key))
    return sorted(number for number in numbers if str(number) in keys and -(1 << 63) <= number < 1 << 63)


def within(frame: DataFrame, columns: Mapping[str, str], slices: Sequence[Slice], source: str) -> DataFrame:
    """The rows of a partition or, of several, with the place of each row's own in the column `PARTITION_INDEX`.

    A row whose partition is not known is malformed: put with the others, for every partition that it may belong to,
    or an error.
    """
    where = f"source '{source}'"
    tests = [
        (column, [_test(frame, dimension, column, slice_, where) for slice_ in slices])
        for dimension, column in columns.items()
    ]
    return _kept(frame, tests, len(slices), source)


def beyond(frame: DataFrame, column: str, until: datetime, source: str) -> DataFrame:
    """The rows of the partitions that begin at a moment or later.

    A row whose partition cannot be told is treated as in a run for a partition.
    """
    from pyspark.sql import functions as F

    test = _in_time(F.col(column), frame.schema[column].dataType, until, None, column, f"source '{source}'")
    return _kept(frame, [(column, [test])], 1, source)


def _kept(
    frame: DataFrame, tests: Sequence[tuple[str, Sequence[tuple[Column, Column]]]], slices: int, source: str
) -> DataFrame:
    """The rows that pass the tests of some columns for one of the slices, or whose column does not say it."""
    from pyspark.sql import functions as F

    diverts = MALFORMED in frame.columns
    text = F.to_json(F.struct(*[c for c in frame.columns if c != MALFORMED]))
    problem = F.col(MALFORMED) if diverts else F.lit(None)
    kept = [problem.isNotNull() if diverts else F.lit(False)] * slices
    known = [F.lit(True)] * slices
    for column, outcomes in tests:
        unknown = outcomes[0][0].isNull()
        row = F.struct(
            F.lit("").alias("file"),
            text.alias("row"),
            opaque(F.lit(f"field '{column}' does not say the partition")).alias("reason"),
        )
        problem = F.coalesce(problem, F.when(unknown, row.cast(frame.schema[MALFORMED].dataType) if diverts else row))
        known = [so_far & (inside | unknown) for so_far, (_, inside) in zip(known, outcomes, strict=True)]
    kept = [bad | belongs for bad, belongs in zip(kept, known, strict=True)]
    found = frame.where(functools.reduce(lambda one, other: one | other, kept))
    if slices > 1:
        places = F.array_compact(F.array(*[F.when(belongs, F.lit(place)) for place, belongs in enumerate(kept)]))
        found = found.withColumn(PARTITION_INDEX, F.explode(places))
    found = found.withColumn(MALFORMED, problem)
    return found if diverts else found.where(fitting(source)).drop(MALFORMED)


def _test(frame: DataFrame, dimension: str, column: str, slice_: Slice, where: str) -> tuple[Column, Column]:
    """What a column says of the partition, and whether it is this one."""
    from pyspark.sql import functions as F

    bounds = slice_.dimensions[dimension]
    if isinstance(bounds, TimeRange):
        return _in_time(F.col(column), frame.schema[column].dataType, bounds.start, bounds.end, column, where)
    return _equal(F.col(column), bounds)


def _equal(value: Column, key: str) -> tuple[Column, Column]:
    return value, value.cast("string") == key


def _in_time(
    value: Column, kind: DataType, start: datetime, end: datetime | None, column: str, where: str
) -> tuple[Column, Column]:
    """The moment in a column, and a condition that it is within bounds, the latter of which may be open.

    The condition is written so that a Parquet reader can skip row groups that are outside.
    """
    import pendulum
    from pyspark.sql import functions as F
    from pyspark.sql.types import DateType, LongType, StringType, TimestampNTZType, TimestampType

    def between(moment: Column, bound: Callable[[pendulum.DateTime], date | int]) -> Column:
        inside = moment >= F.lit(bound(pendulum.instance(start)))
        return inside if end is None else inside & (moment < F.lit(bound(pendulum.instance(end))))

    if isinstance(kind, TimestampType):
        return value, between(value, lambda moment: moment.in_timezone("UTC"))
    if isinstance(kind, StringType):
        moment = moment_of(value)
        return moment, between(moment, lambda moment: moment.in_timezone("UTC"))
    if isinstance(kind, LongType):
        return value, between(value, to_millis)
    if isinstance(kind, TimestampNTZType):
        return value, between(value, lambda moment: moment.naive())
    if isinstance(kind, DateType):
        bounds = [pendulum.instance(moment) for moment in (start, end) if moment is not None]
        if any(moment.date() == (moment - _TICK).date() for moment in bounds):  # a day may begin at 01:00
            raise PipelineError(
                f"{where}: field '{column}' is a date, which cannot separate partitions that are shorter than a day;"
                " partition it by a field with a time"
            )
        return value, between(value, lambda moment: moment.date())
    raise TypeError(
        f"{where}: field '{column}' of type {kind.simpleString()} holds no time"
    )  # `check_partition_columns` has been there
