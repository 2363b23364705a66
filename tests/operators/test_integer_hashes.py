"""The hashes of a column of integers are those of its keys one by one: state is found by them, for ever."""

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.operators.integer_hashes import integer_hashes
from dagster_unified.operators.keys import key_hashes

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
NUMBERS = st.one_of(INT64, st.integers(-300, 300), st.integers(-70_000, 70_000), st.integers(-(1 << 33), 1 << 33))


@given(st.lists(NUMBERS, max_size=50), st.integers(0, 10))
def test_a_column_has_the_hashes_of_its_keys(keys, start):
    assert integer_hashes(pa.array(keys, pa.int64()).slice(start)).to_pylist() == key_hashes(keys[start:])


def test_numbers_where_their_encoding_changes_have_their_hashes():
    bounds = [sign * (1 << bit) + more for bit in range(64) for more in (-2, -1, 0, 1) for sign in (1, -1)]
    keys = [number for number in bounds if -(1 << 63) <= number < 1 << 63]
    assert integer_hashes(pa.array(keys, pa.int64())).to_pylist() == key_hashes(keys)
    for number in keys:
        assert integer_hashes(pa.array([number], pa.int64())).to_pylist() == key_hashes([number])
