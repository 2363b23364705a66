"""Values of Arrow columns that are made of integers: those that Arrow makes."""

from datetime import date, datetime, timedelta, timezone

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.arrow_types import python_values

KINDS = {
    pa.timestamp("us"): st.datetimes(),
    pa.timestamp("us", "UTC"): st.datetimes(timezones=st.just(timezone.utc)),
    pa.date32(): st.dates(),
    pa.duration("us"): st.timedeltas(timedelta(days=-100_000_000), timedelta(days=100_000_000)),
    pa.list_(pa.timestamp("us", "UTC")): st.lists(st.datetimes(timezones=st.just(timezone.utc)), max_size=3),
}


@pytest.mark.parametrize("kind", KINDS, ids=str)
@given(data=st.data())
def test_they_are_those_that_went_in(kind, data):
    values = data.draw(st.lists(st.none() | KINDS[kind]))
    column = pa.array(values, kind)
    assert python_values(column) == values == column.to_pylist()
    assert python_values(column.slice(1)) == values[1:]


@pytest.mark.parametrize(
    ("kind", "number"),
    [(pa.timestamp("us", "UTC"), 2**63 - 1), (pa.timestamp("us"), -(2**63)), (pa.date32(), 2**31 - 1)],
)
def test_what_python_does_not_have_is_an_overflow(kind, number):
    with pytest.raises(OverflowError):
        python_values(pa.array([number], pa.int32() if kind == pa.date32() else pa.int64()).cast(kind))


def test_all_of_the_years_that_python_has():
    for first, last in ((datetime.min, datetime.max), (date.min, date.max)):
        assert python_values(pa.array([first, last])) == [first, last]
