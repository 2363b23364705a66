"""The last epochs of a streaming job at a glance: rates, durations, watermark, and a sparkline."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from dagster import MetadataValue

from dagster_unified.engine.events import EpochCommitted
from dagster_unified.operators.metrics import Totals
from dagster_unified.operators.time import wall_clock
from dagster_unified.orchestration.moments import as_text

KEPT = 60
UPDATED = "dagster/last_updated_timestamp"
"""What Dagster's freshness checks look at."""

_BARS = "▁▂▃▄▅▆▇█"


class Trend:
    """Remembers the last epochs."""

    def __init__(self, updated: Mapping[str, int], clock: Callable[[], int] = wall_clock) -> None:
        self._clock = clock
        self._updated = dict(updated)
        """When rows were last written to a sink, at first by earlier runs; milliseconds since the epoch."""

        self._epochs: deque[EpochCommitted] = deque(maxlen=KEPT)
        self._committed: deque[int] = deque(maxlen=KEPT)
        self._totals = Totals()
        self._rows: dict[str, int] = {}
        self._bytes: dict[str, int] = {}

    def add(self, event: EpochCommitted) -> None:
        """One more epoch."""
        self._epochs.append(event)
        self._committed.append(self._clock())
        self._totals.add(event.metrics, self._clock() / 1000, event.seconds)
        for sink, written in event.written.items():
            self._rows[sink] = self._rows.get(sink, 0) + written.rows
            self._bytes[sink] = self._bytes.get(sink, 0) + written.bytes
            if written.rows:
                self._updated[sink] = self._clock()

    @property
    def begun(self) -> bool:
        """Whether an epoch is committed."""
        return bool(self._epochs)

    @property
    def watermark(self) -> int | None:
        """The last known watermark."""
        return next((e.watermark for e in reversed(self._epochs) if e.watermark is not None), None)

    def line(self, event: EpochCommitted) -> str:
        """One epoch, as a line of a log."""
        mark = "" if event.watermark is None else f", watermark {as_text(event.watermark)}"
        rows = f"{event.rows_in:,} rows in, {event.written_rows()}"
        return (
            f"epoch {event.epoch} of {event.query}: {rows} in {event.seconds:.2f} s{mark}; durations {self._picture()}"
        )

    def metadata(self, sink: str) -> dict[str, Any] | None:
        """What an observation of a sink's asset says, or None before the first epoch."""
        both = list(zip(self._epochs, self._committed, strict=True))
        mine = [(e, at) for e, at in both if sink in e.written] or both
        if not mine:
            return None
        last, (first, begun) = mine[-1][0], mine[0]
        rows, seconds = sum(e.rows_in for e, _ in mine), sum(e.seconds for e, _ in mine)
        elapsed = (self._clock() - begun) / 1000 + first.seconds
        found: dict[str, Any] = {
            "epoch": last.epoch,
            "query": last.query,
            "batch duration (s)": round(last.seconds, 3),
            "input rows per second": round(rows / elapsed, 1) if elapsed else 0.0,
            "processed rows per second": round(rows / seconds, 1) if seconds else 0.0,
            "rows written": self._rows.get(sink, 0),
            "bytes written": self._bytes.get(sink, 0),
            **({} if last.state_rows is None else {"state rows": last.state_rows}),
            **({} if last.state_bytes is None else {"state bytes": last.state_bytes}),
            "batch durations": MetadataValue.text(self._picture()),
            "late records": 0,
            **{f"backlog of {source}": waiting for source, waiting in last.backlog.items()},
            **self._totals.shown(self._clock() / 1000),
        }
        if sink in self._updated:
            found[UPDATED] = MetadataValue.timestamp(self._updated[sink] / 1000)
        if self.watermark is not None:
            found["watermark"] = MetadataValue.text(as_text(self.watermark))
            found["watermark lag (s)"] = round((self._clock() - self.watermark) / 1000, 1)
        return found

    def _picture(self) -> str:
        longest = max((e.seconds for e in self._epochs), default=0.0) or 1.0
        return "".join(_BARS[min(int(e.seconds / longest * 7.99), 7)] for e in self._epochs)
