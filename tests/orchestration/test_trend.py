"""What an observation of a sink's asset says."""

from dataclasses import replace

from dagster_unified.engine.events import EpochCommitted, Written
from dagster_unified.operators.metrics import Metrics
from dagster_unified.orchestration.streaming import UPDATED, Trend


def epoch(number, rows, seconds, sink="a", late=0, watermark=None):
    metrics = Metrics({"late records": late} if late else {})
    return EpochCommitted(
        "main",
        number,
        rows,
        seconds,
        watermark,
        metrics,
        {sink: Written(3, 10)},
        7,
        700,
    )


def test_rates_state_watermark_and_late_records():
    now = [10_000]
    trend = Trend({}, lambda: now[0])
    assert trend.metadata("a") is None
    trend.add(epoch(0, 100, 1.0))
    assert trend.metadata("a")["late records"] == 0
    now[0] = 18_000
    trend.add(epoch(1, 800, 1.0, late=3, watermark=15_000))
    trend.add(epoch(0, 5_000, 9.0, sink="b"))
    now[0] = 19_000
    said = trend.metadata("a")
    assert (said["epoch"], said["input rows per second"], said["processed rows per second"]) == (1, 90.0, 450.0)
    assert (
        said["late records"],
        said["rows written"],
        said["bytes written"],
        said["state rows"],
        said["state bytes"],
        said["watermark lag (s)"],
    ) == (3, 6, 20, 7, 700, 4.0)
    assert said["watermark"].value == "1970-01-01 00:00:15+00:00"
    assert said["batch durations"].value == "▁▁█"


def test_of_state_nothing_is_said_before_it_is_known():
    trend = Trend({}, lambda: 10_000)
    trend.add(replace(epoch(0, 100, 1.0), state_rows=None, state_bytes=None))
    assert {"state rows", "state bytes"}.isdisjoint(trend.metadata("a"))


def test_an_observation_says_when_rows_were_last_written_also_by_an_earlier_run():
    now = [10_000]
    trend = Trend({"a": 4_000, "b": 5_000}, lambda: now[0])
    trend.add(replace(epoch(0, 0, 1.0), written={"a": Written(0, 0)}))
    assert trend.metadata("a")[UPDATED].value == 4.0
    now[0] = 11_000
    trend.add(epoch(1, 100, 1.0))
    now[0] = 19_000
    assert (trend.metadata("a")[UPDATED].value, trend.metadata("b")[UPDATED].value) == (11.0, 5.0)
    assert UPDATED not in trend.metadata("c")
