"""Counts of records by units of event time."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.operators.event_times import by_unit
from dagster_unified.operators.metrics import Metrics, merge

MOMENTS = st.lists(st.integers(-(10**13), 10**13), min_size=1)


@given(MOMENTS, st.sampled_from([1, 60_000, 900_000]))
def test_each_record_counts_in_the_unit_of_its_moment(moments, unit):
    assert by_unit(moments, unit) == Counter(moment // unit for moment in moments)


def test_reports_of_parallel_instances_add_up():
    reports = [Metrics(), Metrics()]
    for report, counts in zip(reports, ({1: 2, 2: 1}, {2: 3}), strict=True):
        report.count_event_times("timed", counts)
    assert merge(report.encode() for report in reports).event_times == {"timed": {1: 2, 2: 4}}
