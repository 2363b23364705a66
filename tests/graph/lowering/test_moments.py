"""Functions that compute times give on columns what they give alone, in zones, as clocks change, and out of range."""

import sys
from datetime import UTC, date, datetime, timedelta, timezone
from typing import NamedTuple
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.api import Pipeline
from dagster_unified.errors import UnifiedError
from dagster_unified.graph.lowering.inlining import inlined_map
from dagster_unified.graph.lowering.source import UnreadableError
from dagster_unified.records import record_type
from dagster_unified.testing import run_pipeline
from tests.support import MODES

BERLIN = ZoneInfo("Europe/Berlin")
NEW_YORK = ZoneInfo(key="America/New_York")
MINUTE = timedelta(minutes=1)
DAY_MS = 24 * 60 * 60 * 1000
BEGIN = datetime(2020, 3, 1, tzinfo=BERLIN)
SHIFTED = datetime(2020, 3, 1, tzinfo=timezone(timedelta(hours=5)))
MOVED = datetime(2020, 1, 1)
MOVED = datetime(2020, 1, 2)
NOW = datetime.now()
ELSEWHERE = ZoneInfo(sys.platform and "UTC")


class Taken(NamedTuple):
    at: datetime
    maybe: datetime | None
    day: date
    year: int
    hour: int
    delay: float | None


class Made(NamedTuple):
    at: datetime
    maybe: datetime | None
    day: date
    text: str
    n: int
    x: float


TAKEN, MADE = record_type(Taken), record_type(Made)


def local(t: Taken) -> Made:
    """Also in the hour that the clock skips, and the one that it repeats."""
    at = datetime(t.year, 3, 29, t.hour, 30, tzinfo=BERLIN)
    return Made(at, t.maybe, at.date(), at.isoformat(), at.hour, at.timestamp())


def later(t: Taken) -> Made:
    at = t.at.astimezone(NEW_YORK) + t.delay * MINUTE
    return Made(
        at, None if t.maybe is None else t.maybe - MINUTE, date(t.year, 10, 25), at.strftime("%H:%M %z"), 1, 0.5
    )


def naive(t: Taken) -> Made:
    at = datetime(t.year, t.hour, 1)
    return Made(at, t.at, t.day + timedelta(days=t.hour), f"{at}", DAY_MS * t.year, 1.0)


def compared(t: Taken) -> Made:
    return Made(max(t.at, BEGIN), SHIFTED, t.at.date(), str(t.at < BEGIN), (t.at - BEGIN).days, 0.0)


def mixed(t: Taken) -> Made:
    """Raises: a time with a zone is compared with one without."""
    return Made(t.at, None, t.day, str(datetime(t.year, 1, 1) < t.at), 1, 1.0)


READ = (local, later, naive, compared, mixed)


@pytest.mark.parametrize("function", READ)
def test_functions_of_times_that_are_read(function):
    inlined_map(function, TAKEN, MADE)


@pytest.mark.parametrize(
    "function",
    [
        lambda t: t._replace(at=MOVED),
        lambda t: t._replace(at=NOW),
        lambda t: t._replace(at=t.at.astimezone(ELSEWHERE)),
        lambda t: t._replace(at=datetime.now()),
        lambda t: t._replace(at=datetime.fromtimestamp(t.year)),
        lambda t: t._replace(at=t.at.replace(tzinfo=UTC)),
        lambda t: t._replace(at=datetime(t.delay, 1, 1)),
    ],
)
def test_functions_of_times_that_are_called(function):
    with pytest.raises(UnreadableError):
        inlined_map(function, TAKEN, TAKEN)


def outcome(rows, mode, function, lowering):
    pipeline = Pipeline("p")
    made = pipeline.from_collection(rows, Taken).map(function, Made)
    made.map(lambda m: (m.at, m.at.isoformat(), m.day), tuple[datetime, str, date]).print()
    try:
        return run_pipeline(pipeline, mode, options={"execution.lowering": lowering}, micro_batch=None).only()
    except UnifiedError as error:
        return str(error)


TIMES = st.one_of(
    st.datetimes(timezones=st.sampled_from([UTC, BERLIN, NEW_YORK])),
    st.datetimes(datetime(2020, 3, 28), datetime(2020, 3, 30), timezones=st.just(BERLIN)),
    st.sampled_from([datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)]),
)


@MODES
@given(
    st.lists(
        st.builds(
            Taken,
            TIMES,
            st.none() | TIMES,
            st.dates(),
            st.sampled_from([2020, 2021, 1, 9999, 0]),
            st.integers(0, 13),
            st.none() | st.floats(-1e9, 1e9),
        ),
        max_size=5,
    ),
    st.sampled_from(READ),
)
def test_times_are_those_of_the_functions(mode, rows, function):
    assert repr(outcome(rows, mode, function, "AUTO")) == repr(outcome(rows, mode, function, "OFF"))
