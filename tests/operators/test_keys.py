"""Keys: their hashes by column, and how equal ones of a micro-batch are brought together."""

from itertools import pairwise
from math import nan
from typing import NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.api import Pipeline
from dagster_unified.errors import RecordTypeError
from dagster_unified.operators.drivers.group import MemoryStore
from dagster_unified.operators.drivers.key_groups import GroupInput, KeyGroups, MicroBatch
from dagster_unified.operators.keyed import ReduceOperator
from dagster_unified.operators.keys import (
    LONGEST_TEXT,
    KeyedInput,
    integer_hashes,
    key_groups,
    key_hashes,
    sorted_runs,
    text_hashes,
)
from dagster_unified.operators.layout import StreamLayout
from dagster_unified.operators.operator import KeyedOptions
from dagster_unified.operators.program.step import KeyedStep, Output, Program
from dagster_unified.records import record_type
from dagster_unified.testing import run_pipeline
from tests.support import MODES


class Row(NamedTuple):
    text: str
    number: int
    real: float
    several: list[int]
    place: int


ROWS = StreamLayout(record_type(Row, "rows"))
rows = st.lists(
    st.tuples(
        st.sampled_from(["", "a", "b", "ab"]),
        st.sampled_from([0, 1, -1, 2**62]),
        st.sampled_from([0.0, -0.0, 1.5]),
        st.sampled_from([[], [1], [1, 2]]),
    ),
    min_size=1,
    max_size=40,
)


def batch(records):
    return ROWS.records.to_batch([Row(*record, place) for place, record in enumerate(records)])


@given(
    rows,
    st.sampled_from(
        [
            ("text",),
            ("number",),
            ("real",),
            ("text", "number"),
            ("real", "text"),
            ("number", "text", "number"),
            ("real", "several"),
        ]
    ),
)
def test_each_key_comes_once_with_all_its_records_in_their_order(records, columns):
    ordered, keys, starts = sorted_runs(batch(records), KeyedInput(columns, object), ROWS, "here")
    expected = {}
    for place, record in enumerate(records):
        row = dict(zip(Row._fields, record, strict=False))
        key = tuple(row[name] + 0.0 if name == "real" else row[name] for name in columns)  # -0.0 is 0.0
        expected.setdefault(repr(key if len(columns) > 1 else key[0]), []).append(place)
    places = ordered.column("place").to_pylist()
    runs = [places[start:end] for start, end in pairwise([*starts, len(places)])]
    assert dict(zip(map(repr, keys), runs, strict=True)) == expected
    assert len(keys) == len(expected)


@given(rows)
def test_keys_that_are_equal_numbers_lose_no_update(records):
    step = KeyedStep(
        "op",
        lambda a, b: b._replace(number=a.number + b.number),
        uid="op",
        output=ROWS.records,
        operator=ReduceOperator,
    )
    options = KeyedOptions(incremental_updates=True)
    program = Program("p", "s", ROWS, (step,), (Output(0, ROWS),), KeyedInput(("real",), float), options)
    out = []
    driver = KeyGroups(program, lambda number, b: out.extend(ROWS.records.from_batch(b)), lambda: 0)
    counted = [(text, 1, real, several) for text, _, real, several in records]
    driver.run(MemoryStore(), MicroBatch(GroupInput([batch(counted)])))
    found = {real: sorted(r.number for r in out if r.real == real) for real in {r.real for r in out}}
    assert found == {real: list(range(1, len(numbers) + 1)) for real, numbers in found.items()}


@given(rows)
def test_equal_numbers_are_in_one_key_group(records):
    groups = key_groups(batch(records), KeyedInput(("real",), float), ROWS, "here", 1024, {}).to_pylist()
    found = {}
    for record, group in zip(records, groups, strict=True):
        assert found.setdefault(record[2], group) == group


def test_a_key_that_is_no_number_is_an_error_that_shows_its_record():
    with pytest.raises(RecordTypeError, match=r"the key 'real' is nan, which equals nothing, for .*'text': 'b'"):
        sorted_runs(batch([("a", 1, 0.0, []), ("b", 1, nan, [])]), KeyedInput(("real",), float), ROWS, "here")


def test_a_key_that_is_none_is_an_error_that_shows_its_record():
    records = batch([("a", 1, 0.0, [])]).set_column(0, "text", pa.array([None], pa.string()))
    with pytest.raises(RecordTypeError, match="the key 'text' is None for"):
        sorted_runs(records, KeyedInput(("text",), str), ROWS, "here")


class Spot(NamedTuple):
    x: float
    between: tuple[float, int] = (0.0, 0)


class Visit(NamedTuple):
    spot: Spot
    count: int


@MODES
@pytest.mark.parametrize("key", ["spot", lambda visit: visit.spot])
def test_numbers_within_a_key_are_the_same_key_where_they_are_equal(mode, key):
    def counted(*spots):
        pipeline = Pipeline("p")
        visits = pipeline.from_collection([Visit(spot, 1) for spot in spots], Visit)
        keyed = visits.key_by(key) if isinstance(key, str) else visits.key_by(key, key_type=Spot)
        keyed.sum("count").name("counted").print("out")
        return sorted(visit.count for visit in run_pipeline(pipeline, mode, micro_batch=None, seed=None).sinks["out"])

    options = [Spot(0.0, (1.0, 1)), Spot(1.0, (0.0, 2)), Spot(-0.0, (1.0, 1)), Spot(1.0, (-0.0, 2))]
    assert counted(*options) in ([2, 2], [1, 1, 2, 2])
    for unequal in (Spot(nan), Spot(0.0, (nan, 1))):
        with pytest.raises(
            RecordTypeError, match=r"key.* has nan, which equals nothing, for .*; filter such records out"
        ):
            counted(Spot(0.0), unequal)


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
