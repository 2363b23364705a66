"""The flights that took place, in plain Python."""

from datetime import datetime, timedelta


def flown(rows):
    """Completed flights as `(row, departure, landing)`, in the order of `rows`.

    UTC is from the data's own `time_hour`.
    """
    for row in rows:
        if "NA" not in (row["dep_delay"], row["arr_delay"], row["air_time"], row["tailnum"]):
            scheduled = datetime.fromisoformat(row["time_hour"]) + timedelta(minutes=int(row["minute"]))
            departed = scheduled + timedelta(minutes=int(row["dep_delay"]))
            yield row, departed, departed + timedelta(minutes=int(row["air_time"]))
