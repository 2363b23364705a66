"""Functions of single records as operations on columns: a chain of them is one loop over Python values.

Only the fields that are read are decoded, and no record is made. Fields that only go on stay in Arrow:

    for i, v1 in zip(range(size), column_1):
        w0 = (v1 + 1) * 2
        if not w0 % 4 == 0: continue
        kept.append(i)
        made_w0.append(w0)

Where an operation raises, or a value has no plain place in its column, the result is None, and the chain's functions
run on the block instead; so all errors are theirs. Knows no graph, and no author's function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from itertools import count
from typing import Any

import pyarrow as pa

from dagster_unified.operators.program.blocks import Block
from dagster_unified.records import RecordType
from dagster_unified.values import in_utc

FIRST, LAST = -(1 << 63), (1 << 63) - 1
"""The integers that a column holds."""

NAME = re.compile(r"(?<!\.)\b[FLRC]\d+\b")
"""What stands in the text of a function for a field, a local, a result or a constant."""


def exactly(texts: list[str], count: int) -> list[str]:
    """The texts, which are as many as the names that they are unpacked into."""
    if len(texts) != count:
        raise ValueError(f"{len(texts)} texts for {count} names")
    return texts


def given(value: Any) -> Any:
    """The value of a field that may not be None."""
    if value is None:
        raise ValueError("a field is None that may not be")
    return value


def in_utc_or_none(value: datetime | None) -> datetime | None:
    """The normal form of a time that may be None."""
    return None if value is None else in_utc(value)


@dataclass(frozen=True)
class Inlined:
    """One function, as text in which `F0`, … stand for the fields of its record, and other names for values."""

    lines: tuple[tuple[str, str], ...]
    """In order: a name and the value that it gets, or no name and a condition without which no record goes on.

    With `*` before the name, it stands for each of the values: the lines after it are in that loop.
    """

    fields: tuple[str, ...]
    """What stands for each field of the result."""

    reads: tuple[int, ...]
    """The fields of its record that it computes with."""

    constants: Mapping[str, Any]
    """What its text names beside that."""

    whole: tuple[str, ...] = ()
    """Names of integers, which as fields of a record have at most 64 bits."""

    def compiles(self) -> bool:
        """Whether Python takes the text: it is not nested too deeply."""
        try:
            for _, text in self.lines:
                compile(text, "<inlined>", "eval")
        except (SyntaxError, RecursionError, MemoryError):
            return False
        return True


@dataclass(frozen=True)
class _Code:
    """A chain of functions, compiled. Fields are those of the record that comes in, and of the one that goes out."""

    run: Callable[..., list[list[Any]]]
    """Takes how many records there are, and the columns that are read; returns what is computed, in columns."""

    reads: tuple[int, ...]
    made: tuple[int | None, ...]
    """For each field that goes out, its place in what is computed; None where it comes from the input."""

    carried: tuple[int | None, ...]
    """For each field that goes out, the field of the input that it is."""

    chooses: bool
    """Whether other records may come out than go in. The first of what is computed then is where each comes from."""


class InlinedChain:
    """A chain of inlined functions, for blocks in Arrow's form."""

    def __init__(self, parts: Sequence[Inlined], taken: RecordType, made: RecordType) -> None:
        self._code = _compiled(_Parts(tuple(parts), len(taken.names)))
        self._taken, self._made = taken, made

    def run(self, block: Block) -> Block | None:
        """The records that go on, in Arrow's form; None where only the functions themselves can say."""
        batch = block.columns
        if batch is None:
            return None
        try:
            return self._run(batch, block.timestamps)
        except Exception:
            return None  # the functions raise it again, where it says whose it is

    def _run(self, batch: pa.RecordBatch, timestamps: Sequence[int | None] | None) -> Block | None:
        code, taken = self._code, self._taken
        taken.check_others(batch, code.reads)
        columns = code.run(batch.num_rows, *(taken.values(number, batch.column(number)) for number in code.reads))
        kept: list[int] | None = None
        if code.chooses and columns[0] != list(range(batch.num_rows)):
            kept = columns[0]
            timestamps = None if timestamps is None else [timestamps[number] for number in kept]
        arrays: list[pa.Array] = []
        for number, (place, origin) in enumerate(zip(code.made, code.carried, strict=True)):
            if place is not None:
                made = self._made.plain_column(number, columns[place])
                if made is None:
                    return None
                arrays.append(made)
            else:
                assert origin is not None
                arrays.append(self._carried(number, origin, batch, kept))
        return Block(None, self._made.partial_batch(arrays), timestamps, self._made)

    def _carried(self, number: int, origin: int, batch: pa.RecordBatch, kept: list[int] | None) -> pa.Array:
        """A field that only goes on. Of a nested one, the parts may be declared otherwise where it comes from."""
        column, kind = batch.column(origin), self._made.schema.types[number]
        if (column.type == kind and not pa.types.is_nested(kind)) or self._taken.lacks(origin, column):
            return column if kept is None else column.take(pa.array(kept, pa.int32()))
        values = self._taken.values(origin, column)
        return self._made.column(number, values if kept is None else [values[row] for row in kept])


@dataclass(frozen=True)
class _Parts:
    """Functions in the order of a chain, compared by their text and by the identity of their constants."""

    parts: tuple[Inlined, ...]
    fields: int

    def __hash__(self) -> int:
        return hash((tuple((part.lines, part.fields) for part in self.parts), self.fields))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Parts) and self.fields == other.fields and alike(self.parts, other.parts)


def alike(some: Sequence[Inlined], others: Sequence[Inlined]) -> bool:
    """Whether two chains are the same text, on constants of the same classes and values."""
    if [(p.lines, p.fields, p.whole) for p in some] != [(p.lines, p.fields, p.whole) for p in others]:
        return False
    return all(_told(a.constants) == _told(b.constants) for a, b in zip(some, others, strict=True))


def _told(constants: Mapping[str, Any]) -> list[tuple[str, type, str]]:
    return [(name, type(value), repr(value)) for name, value in constants.items()]


@lru_cache(maxsize=256)
def _compiled(chain: _Parts) -> _Code:
    names = count()
    origin = {f"v{number}": number for number in range(chain.fields)}
    current = list(origin)
    body: list[str] = []
    namespace: dict[str, Any] = {}
    chooses, indent = False, ""
    for position, part in enumerate(chain.parts):
        known = {f"F{number}": name for number, name in enumerate(current)}
        for name, value in part.constants.items():
            known[name] = f"c{next(names)}"
            namespace[known[name]] = value

        def written(text: str, known: dict[str, str] = known) -> str:
            return NAME.sub(lambda found: known.setdefault(found[0], f"w{next(names)}"), text)

        for target, text in part.lines:
            value, name = written(text), written(target)
            if name.startswith("*"):
                body.append(f"{indent}for {name[1:]} in {value}:")
                indent += "    "
            else:
                body.append(indent + (f"{name} = {value}" if name else f"if not {value}: continue"))
            chooses = chooses or not name or name.startswith("*")
        if position < len(chain.parts) - 1:
            whole = (known[name] for name in part.whole)
            body += [f"{indent}if not {FIRST} <= ({name} or 0) <= {LAST}: raise OverflowError" for name in whole]
        current = [known[name] for name in part.fields]

    computed = list(dict.fromkeys(name for name in current if name not in origin))
    lists = (["kept"] if chooses else []) + [f"made_{name}" for name in computed]
    body += [f"{indent}kept.append(i)"] if chooses else []
    body += [f"{indent}made_{name}.append({name})" for name in computed]
    used = set(re.findall(r"(?<!\.)\bv\d+\b", " ".join(body)))
    read = [number for name, number in origin.items() if name in used]
    variables = ["i", *(f"v{number}" for number in read)]
    iterated = ["range(size)", *(f"column_{number}" for number in read)]
    text = "\n".join(
        [
            f"def run({', '.join(['size', *iterated[1:]])}):",
            *(f"    {name} = []" for name in lists),
            f"    for {', '.join(variables)}, in zip({', '.join(iterated)}):",
            *(f"        {line}" for line in body or ["pass"]),
            f"    return [{', '.join(lists)}]",
        ]
    )
    exec(compile(text, "<inlined chain>", "exec"), namespace)
    place = {name: number for number, name in enumerate(computed, start=int(chooses))}
    return _Code(
        namespace["run"],
        tuple(read),
        tuple(place.get(name) for name in current),
        tuple(origin.get(name) for name in current),
        chooses,
    )
