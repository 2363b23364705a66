"""Conditions in Spark's SQL say of no row that a filter drops it, unless the function does, and raises nothing."""

import pyarrow as pa
import pytest
from pyspark.sql import functions as F

from dagster_unified.graph.lowering.sifting import kept_rows
from dagster_unified.records import record_type
from tests.depth import NIGHTLY, SEED
from tests.graph.lowering.odd_records import Odd, rows

LIMIT = 3
NAMES = ("a", "ß", "\U0001f600")
NUMBERS = frozenset([0, 1, -1, 2**62])


def local(r: Odd) -> bool:
    double = r.n * 2
    rest = double % 7
    return rest > LIMIT and double != r.m


def unused(r: Odd) -> bool:
    broken = r.m + 1  # noqa: F841
    return r.n > 0


def several(r: Odd) -> bool:
    if r.m is None:
        return r.x > 0
    if r.m > 10:
        return r.text == "a"
    return r.flag


FILTERS = [
    lambda r: r.n > 0,
    lambda r: r.n >= r.m,
    lambda r: 0 < r.n <= 10,
    lambda r: -5 < r.m < r.n < 100,
    lambda r: r.n % 5 == 2,
    lambda r: r.n // 7 == -1,
    lambda r: r.m % 3 != 0,
    lambda r: r.n + 1 > r.n,
    lambda r: r.n * r.m < 0,
    lambda r: r.n - r.m == 1,
    lambda r: not r.n,
    lambda r: r.m,
    lambda r: r.m or r.flag,
    lambda r: r.m and r.mark,
    lambda r: r.m is None,
    lambda r: r.m is not None and r.m > 5,
    lambda r: r.m > 5 or r.m is None,
    lambda r: r.flag and r.m > 5,
    lambda r: r.m > 5 and r.flag,
    lambda r: not (r.flag or r.m > 5),
    lambda r: r.text == "a",
    lambda r: r.text != "\U0001f600",
    lambda r: r.text < "ß",
    lambda r: r.text >= r.note,
    lambda r: r.note,
    lambda r: len(r.text) > 1,
    lambda r: len(r.note) == 1,
    lambda r: r.text in NAMES,
    lambda r: r.note in ("a", ""),
    lambda r: r.n in NUMBERS,
    lambda r: r.n not in NUMBERS,
    lambda r: r.x > 0.5,
    lambda r: r.x == 0.0,
    lambda r: r.x != r.y,
    lambda r: r.y <= 1e300,
    lambda r: r.x > 3,
    lambda r: r.n > 2.5,
    lambda r: not r.x < 1.0,
    lambda r: r.flag == r.mark,
    lambda r: (r.n > 0) == (r.x > 0.0),
    lambda r: r.flag is not None and not r.mark,
    lambda r: (r.n if r.flag else r.m) > 0 if r.mark else r.flag,
    lambda r: r.n > 9223372036854775807,
    lambda r: r.text == "x' OR true --",
    lambda r: r.text > "\0",
    lambda r: r.text.isdigit(),
    lambda r: r.n > 0 and r.text.isdigit(),
    lambda r: r.x.is_integer() and r.n > 0,
    lambda r: -r.n,
    lambda r: -r.n < 5,
    lambda r: abs(r.n) > 3,
    lambda r: max(r.n, r.m) > 3,
    lambda r: r.x * 2 > 1,
    lambda r: r.x / r.y >= 0.5,
    lambda r: r.x / 4 != r.y - r.x,
    lambda r: -r.x < r.n * 0.5,
    lambda r: r.text.startswith("a"),
    lambda r: r.note.endswith("\u0301"),
    lambda r: r.note in r.text,
    lambda r: "s" not in r.text,
    local,
    unused,
    several,
]
SAID = 52
"""How many of them have a condition, at least."""


def answer(function, record):
    """Whether the function keeps a record; None where it raises."""
    try:
        return bool(function(record))
    except (TypeError, AttributeError, ZeroDivisionError):
        return None


@pytest.fixture(scope="module")
def conditions():
    return {number: kept_rows(function, record_type(Odd)) for number, function in enumerate(FILTERS)}


def test_most_have_a_condition(conditions):
    assert sum(text is not None for text in conditions.values()) >= SAID


def test_a_row_is_dropped_only_where_the_function_drops_it(conditions, spark):
    records = rows(100_000 if NIGHTLY else 1500, SEED)
    table = pa.Table.from_batches([record_type(Odd).to_batch(records)])
    said = {f"c{number}": F.expr(text) for number, text in conditions.items() if text is not None}
    answers = spark.createDataFrame(table).select(*(column.alias(name) for name, column in said.items())).toArrow()
    dropped = kept = 0
    for name in said:
        function = FILTERS[int(name[1:])]
        for record, found in zip(records, answers.column(name).to_pylist(), strict=True):
            own = answer(function, record)
            assert found is None or found is own, (name, record, found, own)
            dropped, kept = dropped + (found is False), kept + (found is True)
    assert dropped > len(records)
    assert kept > len(records)


def test_what_only_python_says_has_no_condition():
    for function in (lambda r: r.text.lower() == "a", lambda r: r.n > r.x, lambda r: r.n % r.m):
        assert kept_rows(function, record_type(Odd)) is None
