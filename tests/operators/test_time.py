from datetime import datetime, timedelta, timezone

from hypothesis import example, given
from hypothesis import strategies as st

from dagster_unified.api import to_millis

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


@given(st.integers(min_value=-(2**40), max_value=2**41))
@example(541_555_200_004)  # of which int(moment.timestamp() * 1000) makes one less
def test_the_milliseconds_of_a_moment_are_those_that_it_was_made_of(millis):
    assert to_millis(EPOCH + timedelta(milliseconds=millis)) == millis
    assert to_millis(EPOCH + timedelta(milliseconds=millis, microseconds=999)) == millis
    assert to_millis((EPOCH + timedelta(milliseconds=millis)).replace(tzinfo=None)) == millis
