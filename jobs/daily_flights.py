"""The flights pipeline day by day, in partitions of New York's days that hand their state on.

The code is that of `flight_delays`. The partitions end with the year, so that its last day is the end of input: every
idle aircraft is reported, as in one run over the year.
"""

from dagster import DailyPartitionsDefinition

from jobs.data import BY_DAY, OUTPUT
from jobs.flight_delays import build

TABLES = OUTPUT.parent / "daily_tables"
DAYS = DailyPartitionsDefinition("2013-01-01", end_date="2014-01-01", timezone="America/New_York")

pipeline = build(f"{BY_DAY}/{{start:%Y-%m-%d}}.csv", str(TABLES), name="daily_flights")
