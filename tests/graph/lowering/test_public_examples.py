"""Functions of public examples: how many are read, and that those give on columns what they give."""

from itertools import islice

import pytest

from dagster_unified.errors import RecordTypeError
from dagster_unified.graph.lowering.inlining import inlined_filter, inlined_flat_map, inlined_map
from dagster_unified.graph.lowering.reducing import reduced
from dagster_unified.graph.lowering.source import UnreadableError
from dagster_unified.operators.by_field import FieldFold
from dagster_unified.operators.program.blocks import Block
from dagster_unified.operators.program.inlined import InlinedChain
from dagster_unified.records import record_type
from tests.graph.lowering.public_examples import EXAMPLES

TEXTS = ["a;1.5", "HV0005 to be", "one,two , three,4,5", "", "Straße  É", "x\ty", "12 34", "7", "HV0005", "beam,b,3,4"]
INTS = [0, 1, 2, -7, 2**31, 10]
FLOATS = [0.0, -0.0, 1.5, float("nan"), 1e308, -3.25]


def values_of(kind):
    """Some records of a type."""
    if kind in (str, int, float):
        return {str: TEXTS, int: INTS, float: FLOATS}[kind]
    types = kind.__args__ if hasattr(kind, "__args__") else list(kind.__annotations__.values())
    columns = [values_of(t if t in (str, int, float) else t.__args__[0]) for t in types]
    rows = [[column[(n * (2 * m + 1) + m) % len(column)] for m, column in enumerate(columns)] for n in range(30)]
    return [tuple(row) if hasattr(kind, "__args__") else kind(*row) for row in rows]


def type_of(made):
    return tuple[tuple(map(type, made))] if type(made) is tuple else type(made)


def given(function, kind, values):
    """What a function makes of each of these values that it can be called with."""
    results = []
    for value in values:
        try:
            found = function(value)
            if kind == "filter":
                results.append((value, [value] if found else []))
            else:
                results.append((value, list(islice(found, 100)) if kind == "flat_map" else [found]))
        except Exception:
            results.append((value, None))
    return results


def read(kind, types, function):
    """Read an example; return what runs it on a batch of one value, and the type of that."""
    taken = record_type(types[0])
    if kind == "reduce":
        return FieldFold(reduced(function, taken), taken, taken), taken
    if kind == "filter":
        return InlinedChain([inlined_filter(function, taken)], taken, taken), taken
    found = [made for _, emitted in given(function, kind, values_of(types[0])) for made in emitted or ()]
    made = next((made for made in found if made is not None), None)
    if made is None:
        raise UnreadableError("it gives nothing")
    out = record_type(type_of(made) | None if None in found else type_of(made))
    inlined = inlined_flat_map if kind == "flat_map" else inlined_map
    return InlinedChain([inlined(function, taken, out)], taken, out), out


IS_READ = []
for example in EXAMPLES:
    _, kind, types, function, _ = example
    try:
        if function is not None and len(types) == (2 if kind == "reduce" else 1):
            IS_READ.append((kind, types[0], function, *read(kind, types, function)))
    except (UnreadableError, RecordTypeError):
        pass


def test_most_are_read():
    assert len(EXAMPLES) == 75
    assert len(IS_READ) >= 49


@pytest.mark.parametrize("example", IS_READ, ids=lambda example: f"{example[0]} {example[2].__name__}")
def test_what_is_read_gives_what_the_function_gives(example):
    kind, python, function, runs, made = example
    taken, values = record_type(python), values_of(python)
    if kind == "reduce":
        batch = taken.to_batch(values)
        expected = values[0]
        for value in values[1:]:
            expected = function(expected, value)
        assert repr(runs.combined(batch, [0], None)) == repr([expected])
        return
    seen = 0
    for value, expected in given(function, kind, values):
        block = runs.run(Block(None, taken.to_batch([value]), None, taken))
        found = None if block is None else made.from_batch(block.columns)
        assert found is None or repr(found) == repr(expected)
        seen += found is not None
    assert seen
