"""The totals of `delay_totals` over history and what comes after it: the same code, in BATCH and then in STREAMING.

January to October are history, in partitions of New York's days. They leave a savepoint, from which the stream starts
that reads the days after them.
"""

from dagster import DailyPartitionsDefinition

from jobs.data import BY_DAY, OUTPUT
from jobs.delay_totals import build

TABLES = OUTPUT.parent / "ongoing_tables"
SAVEPOINT = OUTPUT.parent / "ongoing_delays" / "october"
HISTORY = DailyPartitionsDefinition("2013-01-01", end_date="2013-11-01", timezone="America/New_York")

pipeline = build(f"{BY_DAY}/{{start:%Y-%m-%d}}.csv", str(TABLES), name="ongoing_delays", live=True)
