"""The control stream: a tiny source of a query whose offsets *are* the control events.

The driver writes the latest event into its checkpoint directory; Spark's planner asks this source for its latest
offset, which is that event, and logs it. So a replayed micro-batch gets the very events that it got before, and no
files pile up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from dagster_unified.connectors.paths import storage_path
from dagster_unified.engine.streaming.atomic import read_latest, write_alternately
from dagster_unified.operators.drivers.key_groups import ControlEvent

NAME = "dagster_unified_control"


class ControlFile:
    """Where the latest event is kept."""

    def __init__(self, folder: str) -> None:
        self.folder = storage_path(folder, "checkpoint directory")

    def read(self) -> ControlEvent | None:
        """The latest event, or None before the first."""
        return read_latest(self.folder, ControlEvent, lambda e: e.number)

    def write(self, event: ControlEvent) -> None:
        """Makes `event` the latest; the one before it stays readable meanwhile."""
        write_alternately(self.folder, event.number, msgspec.json.encode(event))


class ControlSource(DataSource):
    """The Spark data source; its option `path` is the control file's folder."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        return "event string"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        return _Reader(str(self.options["path"]))


class _Events(InputPartition):
    def __init__(self, event: str) -> None:
        self.event = event


class _Reader(DataSourceStreamReader):
    def __init__(self, path: str) -> None:
        self._path = path

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        return {"number": 0}

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]  # noqa: N802 - Spark's name
        event = ControlFile(self._path).read()
        if event is None:
            return self.initialOffset()
        sent = msgspec.structs.replace(event, parts={})  # of which there may be many, and no key group needs them
        return {"number": event.number, "event": msgspec.json.encode(sent).decode()}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return [_Events(end["event"])] if end["number"] > start["number"] else []

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"event": [partition.event]})

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing is kept for what is behind."""
