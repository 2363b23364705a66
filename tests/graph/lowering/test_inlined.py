"""Inlined chains give what their functions give, record for record, or leave it to them."""

import pyarrow as pa
import pytest

from dagster_unified.errors import RecordTypeError
from dagster_unified.graph.lowering.inlining import inlined_filter, inlined_map
from dagster_unified.graph.lowering.source import UnreadableError
from dagster_unified.operators.program.blocks import Block
from dagster_unified.operators.program.inlined import InlinedChain
from dagster_unified.records import record_type
from tests.depth import NIGHTLY, SEED
from tests.graph.lowering.generated import module, records, same

FUNCTIONS, RECORDS = (400, 120) if NIGHTLY else (60, 60)


def by_python(functions, values, made):
    """What a chain of functions gives, as it goes through a column; None where one raises or does not fit."""
    try:
        for kind, function in functions:
            values = [v for v in values if function(v)] if kind == "filter" else list(map(function, values))
            if kind == "map":
                values = record_type(type(values[0])).all_normal(values) if values else values
        return made.from_batch(made.to_batch(values))
    except Exception:
        return None


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    return module(tmp_path_factory.mktemp("generated"), SEED, FUNCTIONS)


def test_generated_chains_give_the_same_on_columns_or_nothing(generated):
    taken, made = record_type(generated.Taken), record_type(generated.Made)
    values = records(generated.Taken, SEED, RECORDS)
    pairs = inlined = left = 0
    for number in range(FUNCTIONS):
        make, keep, change = (getattr(generated, f"{letter}{number}") for letter in "fgh")
        for functions in ([("map", make)], [("filter", keep), ("map", make)], [("map", change), ("map", make)]):
            try:
                parts = [
                    inlined_filter(f, taken)
                    if kind == "filter"
                    else inlined_map(f, taken, made if f is make else taken)
                    for kind, f in functions
                ]
            except UnreadableError:
                continue
            chain = InlinedChain(parts, taken, made)
            inlined += 1
            one_by_one = [(value, by_python(functions, [value], made)) for value in values]
            for value, expected in one_by_one:
                pairs += 1
                found = chain.run(Block(None, taken.to_batch([value]), None, taken))
                if expected is None or found is None:
                    left += found is None
                    assert found is None, (functions, value)
                else:
                    assert same(tuple(made.from_batch(found.columns)), tuple(expected)), (functions, value)
            whole = [(value, expected) for value, expected in one_by_one if expected is not None]
            if whole:
                found = chain.run(Block(None, taken.to_batch([value for value, _ in whole]), None, taken))
                together = [record for _, expected in whole for record in expected]
                assert same(tuple(made.from_batch(found.columns)), tuple(together)), functions
    assert inlined > FUNCTIONS / 2
    assert pairs > left > 0


def test_event_times_go_with_the_records_that_stay():
    def odd(value: int) -> bool:
        return value % 2 == 1

    kind = record_type(int)
    chain = InlinedChain([inlined_filter(odd, kind)], kind, kind)
    found = chain.run(Block(None, kind.to_batch([1, 2, 3, 4]), [10, 20, None, 40], kind))
    assert (kind.from_batch(found.columns), found.timestamps) == ([1, 3], [10, None])


def test_an_integer_between_two_functions_has_64_bits():
    def squared(value: int) -> int:
        return value * value

    def zero(value: int) -> int:
        return value - value

    kind = record_type(int)
    chain = InlinedChain([inlined_map(squared, kind, kind), inlined_map(zero, kind, kind)], kind, kind)
    assert kind.from_batch(chain.run(Block(None, kind.to_batch([2**31]), None, kind)).columns) == [0]
    assert chain.run(Block(None, kind.to_batch([2**32]), None, kind)) is None
    with pytest.raises(RecordTypeError, match="cannot hold"):
        kind.normal(2**64)


def test_what_cannot_be_read_of_a_field_that_only_goes_on_is_left_to_the_functions():
    """Text that is not UTF-8, and a null where the type allows none."""
    kind = record_type(tuple[str, int])

    def more(pair: tuple[str, int]) -> tuple[str, int]:
        return pair[0], pair[1] + 1

    chain = InlinedChain([inlined_map(more, kind, kind)], kind, kind)
    broken = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")])
    for column in (broken, pa.array([None], pa.string())):
        batch = pa.RecordBatch.from_arrays([column, pa.array([1])], names=["f0", "f1"])
        assert chain.run(Block(None, batch, None, kind)) is None
