"""What maps and filters are in Spark's SQL is what Python makes of the same records, or says that only Python knows."""

from typing import NamedTuple

import pyarrow as pa
import pytest

from dagster_unified.engine.dataframe.lowered import run_in_sql
from dagster_unified.errors import UnifiedError
from dagster_unified.graph.lowering.mapping import computed_in_sql
from dagster_unified.records import record_type
from tests.depth import NIGHTLY, SEED
from tests.graph.lowering.odd_records import Odd, rows

LIMIT = 3


class Made(NamedTuple):
    n: int
    m: int | None
    x: float
    y: float | None
    flag: bool
    text: str
    note: str | None


def carried(r: Odd) -> Made:
    return Made(r.n, r.m, r.x, r.y, r.flag, r.text, r.note)


def arithmetic(r: Odd) -> Made:
    return Made(r.n + 1, r.n - 7, r.x * 2.0, r.x + r.n, r.n > 0, r.text, "constant")


def products(r: Odd) -> Made:
    return Made(r.n * 3, None, r.x * r.x, r.x - 0.5, r.x > r.n, "\U0001f600", r.note)


def rests(r: Odd) -> Made:
    return Made(r.n % 7, r.n // 7, r.x / 3, r.x / 2.5, r.n % 2 == 0, r.text, None)


def missing(r: Odd) -> Made:
    return Made(r.m + 1, r.m, r.y * 2, r.y, r.m > 3, r.text, r.note)


def divided(r: Odd) -> Made:
    return Made(r.n, r.m, r.x / r.x, 1.0 / r.x, r.flag, r.text, r.note)


def divided_in_vain(r: Odd) -> Made:
    ratio = 1.0 / r.x  # noqa: F841
    return Made(r.n, r.m, r.x, r.y, r.flag, r.text, r.note)


def missing_in_vain(r: Odd) -> Made:
    more = r.m + 1  # noqa: F841
    return Made(r.n, r.m, r.x, r.y, r.flag, r.text, r.note)


def chosen(r: Odd) -> Made:
    m = r.m if r.m is not None else -1
    return Made(m + 1, None if r.flag else r.n, 0.0 if r.n > 3 else r.x, r.y, r.flag or m > 2, r.text, r.note)


def branches(r: Odd) -> Made:
    if r.m is None:
        return Made(0, None, -0.0, None, False, "", None)
    if r.m > 5:
        double = r.m * 2
        return Made(double, double, r.x, r.y, True, r.text, "much")
    return Made(r.m, r.m, -r.x, abs(r.x), False, r.text, r.text)


def signs(r: Odd) -> Made:
    return Made(-r.n, abs(r.n), r.n / 7, abs(r.x), not r.flag, r.text, r.note)


def smaller(r: Odd) -> Made:
    return Made(min(r.n, 10), max(r.n, LIMIT), r.x, r.y, r.n in (1, 2, 3), r.text, r.note)


def of_texts(r: Odd) -> Made:
    return Made(
        len(r.text), r.n, r.x, r.y, r.text.startswith("a"), r.text if "s" in r.text else "none", r.note or "empty"
    )


def ends(r: Odd) -> Made:
    return Made(r.n, r.n, r.x, r.y, r.text.endswith("\u0301") or r.text == "a", r.text, r.note)


def rests_in_vain(r: Odd) -> Made:
    rest = r.n % r.m  # noqa: F841
    return Made(r.n, r.m, r.x, r.y, r.flag, r.text, r.note)


def number_in_vain(r: Odd) -> Made:
    number = int(r.text)  # noqa: F841
    return Made(r.n, r.m, r.x, r.y, r.flag, r.text, r.note)


def several(r: Odd) -> Made:
    double = r.n * 2
    return Made(double + 1, double - 1, r.x, r.y, double > 0 and r.flag, r.text, r.note)


def mixed(r: Odd) -> Made:
    return Made(r.n, r.m, r.n * 0.5, (r.n + 1) / (r.n - 5), r.flag == (r.n > 0), r.text, r.note)


def upper(r: Odd) -> Made:
    return Made(r.n, r.m, r.x, r.y, r.flag, r.text.upper(), r.note)


def truncated(r: Odd) -> Made:
    return Made(int(r.x), r.m, r.x, r.y, r.flag, r.text, r.note)


SAID = [
    carried,
    arithmetic,
    rests,
    missing,
    divided,
    divided_in_vain,
    missing_in_vain,
    chosen,
    branches,
    signs,
    smaller,
    ends,
    several,
    mixed,
]
UNSAID = [products, rests_in_vain, number_in_vain, of_texts, upper, truncated]
"""An integer compared with a float, a text that is chosen by its truth, and two that Spark does in its own way."""


def own(function, record):
    """What the function returns; None where it raises or a field does not fit."""
    try:
        made = function(record)
        record_type(Made).to_batch([made])
    except (TypeError, ZeroDivisionError, OverflowError, UnifiedError, pa.ArrowInvalid):
        return None
    return made


def ran(spark, function, records, unknown):
    """What Spark makes of records, by the number of each; without those that only Python knows, or with an error."""
    said = computed_in_sql(function, record_type(Odd), record_type(Made), "map", unknown)
    table = pa.Table.from_batches([record_type(Odd).to_batch(records)])
    table = table.append_column("number", pa.array(range(len(records)), pa.int64()))
    frame = run_in_sql(said, spark.createDataFrame(table), record_type(Made), ["number"])
    found = frame.toArrow().to_pydict()
    numbers = found.pop("number")
    return dict(zip(numbers, (Made(*row) for row in zip(*found.values(), strict=True)), strict=True))


@pytest.mark.parametrize("function", SAID, ids=lambda function: function.__name__)
def test_what_spark_makes_of_records_is_what_the_function_makes(function, spark):
    records = rows(100_000 if NIGHTLY else 1500, SEED)
    found = ran(spark, function, records, "NULL")
    for number, made in found.items():
        assert repr(made) == repr(own(function, records[number])), records[number]
    assert len(found) > len(records) // 20
    known = [records[number] for number in found]
    assert len(ran(spark, function, known, "raise_error('unknown')")) == len(known)
    if len(found) < len(records):
        with pytest.raises(Exception, match="unknown"):
            ran(spark, function, records, "raise_error('unknown')")


@pytest.mark.parametrize("function", UNSAID, ids=lambda function: function.__name__)
def test_what_only_python_makes_is_not_said(function):
    assert computed_in_sql(function, record_type(Odd), record_type(Made), "map", "NULL") is None
