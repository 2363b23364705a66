"""Folds runs of records by field: what a function that combines records would make of them, on columns.

    h1 = before[1]
    for _, v1 in zip(range(start, end), column_1[start:end]):
        w0 = h1 + v1
        h1 = w0

Fields that are those of the first or the last record of a run are taken in Arrow. Where an operation raises, or a value
has no plain place in its column, the result is None, and the function runs on the records instead; so all errors are
its own. Knows no graph, and no author's function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, overload

import pyarrow as pa

from dagster_unified.operators.program.inlined import FIRST, LAST, NAME, Inlined, alike
from dagster_unified.records import RecordType

Way = Literal["first", "last", "sum", "min", "max", "computed"]
"""How a field is combined. All but `computed` are the same however a run is cut.

A sum is of integers, and the smallest and the largest are of integers or texts.
"""

LARGEST = 1 << 62
"""A sum whose parts, taken together, are no larger has 64 bits at each step."""

_COMBINE: dict[Way, Callable[[list[Any]], Any]] = {"sum": sum, "min": min, "max": max}


@dataclass(frozen=True)
class Fold:
    """What a function makes of a value and of a record that comes after it, by the fields of the value.

    A reduce function has records for values, an `AggregateFunction` has accumulators.
    """

    ways: tuple[Way, ...]
    """How each field is combined."""

    inlined: Inlined
    """The function as text. In it the fields of the value come first, and then those of the record."""

    @property
    def combines(self) -> bool:
        """Whether each field is combined with itself alone, and nothing else is computed."""
        made = [way for way in self.ways if way not in ("first", "last")]
        return "computed" not in made and len(self.inlined.lines) == len(made)


class Rows(Sequence[Any]):
    """Records of a batch, of which some fields are read in columns. Each is made only where it is asked for."""

    def __init__(self, records: RecordType, batch: pa.RecordBatch, fields: Sequence[int]) -> None:
        """Raise `RecordTypeError` where the records cannot be read."""
        records.check_others(batch, fields)
        self.columns = [records.values(number, batch.column(number)) for number in fields]
        """The fields that are read, of all records of the batch."""

        self.start, self.end = 0, len(batch)
        """Where the records are in the batch."""

        self._records, self._batch = records, batch
        self._made: list[list[Any]] = []

    def _all(self) -> list[Any]:
        if not self._made:  # shared with the parts of the batch that were sliced before
            self._made.append(self._records.from_batch(self._batch))
        return self._made[0]

    def __len__(self) -> int:
        return self.end - self.start

    def __iter__(self) -> Iterator[Any]:
        return iter(self._all()[self.start : self.end])

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice) and index.step is None:
            start, end, _ = index.indices(len(self))
            part = Rows.__new__(Rows)
            part.columns, part._records, part._batch, part._made = self.columns, self._records, self._batch, self._made
            part.start, part.end = self.start + start, self.start + max(start, end)
            return part
        return self._all()[self.start : self.end][index]


class FieldFold:
    """Folds runs of records into values of a type."""

    def __init__(self, fold: Fold, value: RecordType, taken: RecordType) -> None:
        self._fold, self._ways = fold, fold.ways
        self._value, self._taken = value, taken
        self._text = _Text(fold, len(value.names), value == taken)
        self._final = _final(self._text)
        self.reads = self._final.columns
        """The fields of records that `one` needs."""

    def combined(self, batch: pa.RecordBatch, starts: Sequence[int], held: Any) -> list[Any] | None:
        """The value that each run of a batch becomes, the first one after `held`, if that is not None.

        None where only the function can say.
        """
        try:
            return (self._at_once if self._fold.combines else self._one_by_one)(batch, starts, held)
        except Exception:
            return None

    def rolling(
        self, batch: pa.RecordBatch, starts: Sequence[int], held: Sequence[Any]
    ) -> tuple[pa.RecordBatch, list[Any]] | None:
        """The value after each record of a batch, and the one at the end of each run.

        `held` are the values before the runs, None where there is none. None where only the function can say.
        """
        try:
            return self._rolling(batch, starts, held)
        except Exception:
            return None

    def one(self, rows: Rows, held: Any) -> Any:
        """The value that some records become after another value, if any; None where only the function can say."""
        try:
            before = None if held is None else self._fields(held)
            return self._value.record(self._final.run(rows.start, rows.end, before, *rows.columns))
        except Exception:
            return None

    def _fields(self, value: Any) -> Sequence[Any]:
        if isinstance(value, tuple):
            return value
        return (value,) if self._value.shape == "value" else [getattr(value, name) for name in self._value.names]

    def _ends(self, batch: pa.RecordBatch, starts: Sequence[int], way: Way, number: int) -> list[Any]:
        """The values of a field at one end of each run."""
        ends = starts if way == "first" else [end - 1 for end in [*starts[1:], batch.num_rows]]
        return self._taken.values(number, batch.column(number).take(pa.array(ends, pa.int64())))

    def _at_once(self, batch: pa.RecordBatch, starts: Sequence[int], held: Any) -> list[Any] | None:
        """As `combined`, where each field is combined with itself alone."""
        self._taken.check_others(batch, [number for number, way in enumerate(self._ways) if way in _COMBINE])
        ends = [*starts[1:], batch.num_rows]
        columns: list[list[Any]] = []
        before = None if held is None else self._fields(held)
        for number, way in enumerate(self._ways):
            if way == "first" or way == "last":
                column = self._ends(batch, starts, way, number)
                if way == "first" and before is not None:
                    column[0] = before[number]
                columns.append(column)
                continue
            array = batch.column(number)
            if way == "sum" and not _fits(array, 0 if before is None else before[number]):
                return None
            values, combine = self._taken.values(number, array), _COMBINE[way]
            columns.append([combine(values[start:end]) for start, end in zip(starts, ends, strict=True)])
            if before is not None:
                columns[-1][0] = combine([before[number], columns[-1][0]])
        return self._value.records(columns)

    def _one_by_one(self, batch: pa.RecordBatch, starts: Sequence[int], held: Any) -> list[Any]:
        """As `combined`, record by record."""
        self._taken.check_others(batch, self.reads)
        columns = [self._taken.values(number, batch.column(number)) for number in self.reads]
        ends = [*starts[1:], batch.num_rows]
        befores = [None if held is None else self._fields(held), *[None] * (len(starts) - 1)]
        fold = self._final.run
        values = [fold(*run, *columns) for run in zip(starts, ends, befores, strict=True)]
        return self._value.records(list(zip(*values, strict=True)))

    def _rolling(
        self, batch: pa.RecordBatch, starts: Sequence[int], held: Sequence[Any]
    ) -> tuple[pa.RecordBatch, list[Any]] | None:
        code = _rolling(self._text)
        self._taken.check_others(batch, code.columns)
        columns = [self._taken.values(number, batch.column(number)) for number in code.columns]
        before = [None if value is None else self._fields(value) for value in held]
        ends = [*starts[1:], batch.num_rows]
        results = iter(code.run(starts, ends, before, *columns))
        made = [None if way == "first" or way == "last" else next(results) for way in self._ways]
        arrays, lasts = [], list[list[Any]]()
        for number, (way, values) in enumerate(zip(self._ways, made, strict=True)):
            column = batch.column(number)
            if values is not None:
                column = self._value.plain_column(number, values)
                if column is None:
                    return None
                lasts.append(next(results))
            elif way == "last":
                lasts.append(self._ends(batch, starts, "last", number))
            else:
                own = self._ends(batch, starts, "first", number)
                firsts = [v if b is None else b[number] for v, b in zip(own, before, strict=True)]
                column = _repeated(self._value.column(number, firsts), ends)
                lasts.append(firsts)
            arrays.append(column)
        return pa.RecordBatch.from_arrays(arrays, schema=self._value.schema), self._value.records(lasts)


def _repeated(firsts: pa.Array, ends: Sequence[int]) -> pa.Array:
    """The value of each run, for each of its records."""
    import pyarrow.compute as pc  # slow to load, and a pipeline is built without it

    runs = pa.RunEndEncodedArray.from_arrays(pa.array(ends, pa.int32()), pa.array(range(len(ends)), pa.int32()))
    return firsts.take(pc.run_end_decode(runs))


def _fits(column: pa.Array, held: int) -> bool:
    """Whether all sums of some of the values, and of what was held before, have 64 bits."""
    import pyarrow.compute as pc  # slow to load, and a pipeline is built without it

    smallest, largest = pc.min_max(column).values()
    most: int = max(abs(smallest.as_py()), abs(largest.as_py()))
    return most * len(column) + abs(held) <= LARGEST


@dataclass(frozen=True)
class _Text:
    """What a fold is compiled from."""

    fold: Fold
    size: int
    """How many fields a value has."""

    starts_from_record: bool
    """Whether a record is the value of a run that nothing comes before."""

    def __hash__(self) -> int:
        return hash((self.fold.ways, self.fold.inlined.lines, self.size, self.starts_from_record))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Text)
            and (self.size, self.starts_from_record) == (other.size, other.starts_from_record)
            and self.fold.ways == other.fold.ways
            and alike([self.fold.inlined], [other.fold.inlined])
        )


@dataclass(frozen=True)
class _Code:
    run: Callable[..., Any]
    columns: tuple[int, ...]
    """The columns of records that it takes."""


class _Loop:
    """The text of a loop over a run: `h0`, … are the fields of the value so far, `v0`, … those of a record."""

    def __init__(self, text: _Text, held: Sequence[int]) -> None:
        """`held` are the fields of the value that are needed beside those that the loop computes with."""
        self._text, self.namespace = text, dict[str, Any]()
        ways, inlined = text.fold.ways, text.fold.inlined
        self.made = [number for number, way in enumerate(ways) if way not in ("first", "last")]
        used = {*inlined.reads, *(int(name[1:]) for name in map(self._field, self.made) if name.startswith("F"))}
        self.held = sorted({*self.made, *held, *(number for number in used if number < text.size)})
        self._known = dict[str, str]()
        for name, value in inlined.constants.items():
            self._known[name] = f"c{len(self._known)}"
            self.namespace[self._known[name]] = value
        self.body = [f"{self._written(target)} = {self._written(value)}" for target, value in inlined.lines]
        bounded = {self._field(number) for number in self.made if ways[number] in ("min", "max")}
        for name in map(self._written, (name for name in inlined.whole if name not in bounded)):
            self.body.append(f"if not {FIRST} <= ({name} or 0) <= {LAST}: raise OverflowError")
        changed = [number for number in self.held if ways[number] != "first"]
        if changed:
            values = ", ".join(self._written(self._field(number)) for number in changed)
            self.body.append(f"{', '.join(f'h{number}' for number in changed)} = {values}")

    def _field(self, number: int) -> str:
        return self._text.fold.inlined.fields[number]

    def place(self, number: int) -> int:
        """The field of the record that a field of the value is at the end of a run."""
        return int(self._field(number)[1:]) - self._text.size

    def _written(self, text: str) -> str:
        return NAME.sub(lambda found: self._name(found[0]), text)

    def _name(self, name: str) -> str:
        if name not in self._known:
            number, size = int(name[1:]), self._text.size
            of_field = f"h{number}" if number < size else f"v{number - size}"
            self._known[name] = of_field if name.startswith("F") else f"w{len(self._known)}"
        return self._known[name]

    def lines(self, after: Sequence[str] = ()) -> list[str]:
        """Fold the run from `start` to `end` after `before`; `after` stands after each record."""
        begin = [f"h{number} = before[{number}]" for number in self.held] or ["pass"]
        if self._text.starts_from_record:
            first = [*(f"h{number} = column_{number}[start]" for number in self.held), *after, "start += 1"]
            begin = ["if before is None:", *_indented(first), "else:", *_indented(begin)]
        body = [*self.body, *after] or ["pass"]
        read = sorted({int(name[1:]) for name in re.findall(r"\bv\d+\b", " ".join(body))})
        variables = "".join(f", v{number}" for number in read)
        slices = "".join(f", column_{number}[start:end]" for number in read)
        return [*begin, f"for _{variables} in zip(range(start, end){slices}):", *_indented(body)]

    def compiled(self, arguments: str, lines: Sequence[str]) -> _Code:
        """Compile a function that takes these arguments, and the columns that its lines name."""
        columns = sorted({int(number) for number in re.findall(r"\bcolumn_(\d+)\b", " ".join(lines))})
        taken = "".join(f", column_{number}" for number in columns)
        text = "\n".join([f"def run({arguments}{taken}):", *_indented(lines)])
        exec(compile(text, "<fold>", "exec"), self.namespace)
        return _Code(self.namespace["run"], tuple(columns))


@lru_cache(maxsize=256)
def _final(text: _Text) -> _Code:
    """Return what gives the fields of the value at the end of one run."""
    ways = text.fold.ways
    loop = _Loop(text, [number for number, way in enumerate(ways) if way != "last"])
    result = "".join(
        f"column_{loop.place(number)}[end - 1], " if way == "last" else f"h{number}, "
        for number, way in enumerate(ways)
    )
    return loop.compiled("start, end, before", [*loop.lines(), f"return ({result})"])


@lru_cache(maxsize=256)
def _rolling(text: _Text) -> _Code:
    """Return what gives the fields that are computed, of many runs: after each record, and at the end of each run."""
    loop = _Loop(text, [])
    lists = [f"made_{number}" for number in loop.made] + [f"last_{number}" for number in loop.made]
    lines = [
        *(f"{name} = []" for name in lists),
        "for start, end, before in zip(starts, ends, befores):",
        *_indented(loop.lines([f"made_{number}.append(h{number})" for number in loop.made])),
        *_indented([f"last_{number}.append(h{number})" for number in loop.made]),
        f"return [{', '.join(lists)}]",
    ]
    return loop.compiled("starts, ends, befores", lines)


def _indented(lines: Sequence[str]) -> list[str]:
    return ["    " + line for line in lines]
