"""What a running stream looks like in Dagster: its operators as a graph, with what each does, and its last epochs.

As the page of a job in Flink's UI. Spark runs the operators of a query in one job: so how busy it is, and how many
records it reads, is known of a query, what is read and waits of a source, what is written of a sink, and the watermark
of each operator that is told it. What is not known is not shown. All of it is on the driver already.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dagster import MetadataValue, TableColumn, TableRecord, TableSchema

from dagster_unified.engine.events import EpochCommitted
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.control import ControlFile
from dagster_unified.graph.drawing import tasks_as_svg
from dagster_unified.graph.plan import Plan
from dagster_unified.operators.time import to_datetime
from dagster_unified.orchestration.partitions import as_text

WINDOW = 60_000
"""Milliseconds over which rates are taken."""

SHOWN = 12
"""Epochs in the table."""

_COLUMNS = (
    TableColumn("query"),
    TableColumn("epoch", "int"),
    TableColumn("rows in", "int"),
    TableColumn("written"),
    TableColumn("seconds", "float"),
    TableColumn("watermark"),
)


class Committed(NamedTuple):
    """An epoch, and when it was committed, in milliseconds since the epoch."""

    event: EpochCommitted
    at: int


class _Rates(NamedTuple):
    """What a query does, per second."""

    read: float
    busy: float
    sources: Mapping[str, float]
    """The records read, by the uid of their source."""

    sinks: Mapping[str, float]
    """The rows written, by sink."""


class StreamFace:
    """Draws one job, from its plan, its last epochs and its checkpoint directory."""

    def __init__(self, plan: Plan, directory: CheckpointDirectory) -> None:
        self._plan, self._directory = plan, directory
        self._numbers = {node.uid: node.id for node in plan.graph.nodes}

    def metadata(self, epochs: Sequence[Committed], now: int) -> dict[str, Any]:
        """Return the metadata of an observation; `epochs` are the last ones, the oldest first."""
        last = {committed.event.query: committed.event for committed in epochs}
        rates = {query: _rates([e for e in epochs if e.event.query == query], now) for query in last}
        notes: dict[int, list[str]] = {}
        for uid, note in self._notes(last, rates, now):
            notes.setdefault(self._numbers[uid], []).append(note)
        header = [self._header(event, rates[query], now) for query, event in last.items()]
        drawn = base64.b64encode(tasks_as_svg(self._plan, notes, header).encode()).decode()
        return {
            "operators": MetadataValue.md(f"![operators of {self._plan.name}](data:image/svg+xml;base64,{drawn})"),
            "last epochs": MetadataValue.table(
                [_row(committed.event) for committed in reversed(epochs[-SHOWN:])], TableSchema(list(_COLUMNS))
            ),
        }

    def _header(self, event: EpochCommitted, rates: _Rates, now: int) -> str:
        """A query in one line."""
        parts = [f"epoch {event.epoch:,}", f"{_rate(rates.read)} read", f"{rates.busy:.0%} busy"]
        if event.watermark is not None:
            parts.append(_watermark(event.watermark, now))
        if event.state_rows is not None:
            parts.append(f"{event.state_rows:,} rows of state")
        return f"{event.query}: {', '.join(parts)}"

    def _notes(
        self, last: Mapping[str, EpochCommitted], rates: Mapping[str, _Rates], now: int
    ) -> Iterator[tuple[str, str]]:
        """What each operator does, by its uid."""
        for name, event in last.items():
            for node in self._plan.graph.sources:
                if node.uid in rates[name].sources:
                    yield node.uid, f"{_rate(rates[name].sources[node.uid])} read"
                if node.source.name in event.backlog:
                    yield node.uid, f"{event.backlog[node.source.name]:,} records wait"
            for uid, watermark in self._watermarks(name).items():
                if uid in self._numbers:
                    yield uid, _watermark(watermark, now)
            for sink in self._plan.graph.sinks:
                if sink.name in rates[name].sinks:
                    yield sink.uid, f"{_rate(rates[name].sinks[sink.name])} written"

    def _watermarks(self, query: str) -> Mapping[str, int]:
        """The watermarks that operators were told last, by uid."""
        event = ControlFile(str(self._directory.path / "control" / query)).read()
        return {} if event is None else event.watermarks


def _rates(epochs: Sequence[Committed], now: int) -> _Rates:
    """What a query has done of late: in the epochs of the last minute, or since the last one before."""
    late = [committed for committed in epochs if committed.at > now - WINDOW] or epochs[-1:]
    elapsed = max(now - late[0].at, 0) / 1000 + late[0].event.seconds or 1.0
    sources: Counter[str] = Counter()
    sinks: Counter[str] = Counter()
    for committed in late:
        sources.update(committed.event.read)
        sinks.update({sink: written.rows for sink, written in committed.event.written.items()})
    busy = min(sum(committed.event.seconds for committed in late) / elapsed, 1.0)
    read = sum(committed.event.rows_in for committed in late) / elapsed
    each = ({name: count / elapsed for name, count in counted.items()} for counted in (sources, sinks))
    return _Rates(read, busy, *each)


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}/s" if per_second >= 10 else f"{per_second:.1f}/s"


def _watermark(millis: int, now: int) -> str:
    try:
        to_datetime(millis)
    except OverflowError:
        return "watermark at the end"
    return f"watermark {as_text(millis).removesuffix('+00:00')}, {max(now - millis, 0) / 1000:,.0f} s behind"


def _row(event: EpochCommitted) -> TableRecord:
    return TableRecord(
        {
            "query": event.query,
            "epoch": event.epoch,
            "rows in": event.rows_in,
            "written": event.written_rows(),
            "seconds": round(event.seconds, 3),
            "watermark": "" if event.watermark is None else as_text(event.watermark),
        }
    )
