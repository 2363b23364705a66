"""The hashes of a column of integers or texts are those of its keys one by one: state is found by them, for ever."""

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.operators.keys import LONGEST_TEXT, integer_hashes, key_hashes, text_hashes

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


SHORT = st.text(st.characters(codec="utf-8"), max_size=LONGEST_TEXT).filter(lambda t: len(t.encode()) <= LONGEST_TEXT)


@given(st.lists(st.one_of(SHORT, st.text("ab\0", max_size=9))), st.integers(0, 3))
def test_the_hashes_of_a_column_of_texts_are_those_of_its_keys(keys, start):
    assert text_hashes(pa.array(keys, pa.string()).slice(start)).to_pylist() == key_hashes(keys[start:])


def test_a_text_that_is_too_long_has_no_hash_with_the_others():
    keys = ["a", "b" * LONGEST_TEXT]
    assert text_hashes(pa.array(keys)).to_pylist() == key_hashes(keys)
    assert text_hashes(pa.array([*keys, "c" * (LONGEST_TEXT + 1)])) is None
