"""The processor of key groups that Spark's transformWithState is given.

At the start of a query Spark also makes one on the driver, for each level in a Python process of its own that only asks
what the state is. So this module imports little, and what runs the operators is loaded with the first rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import BinaryType, IntegerType, StructType

from dagster_unified.spark_internals.state_client import WriteBehindClient

if TYPE_CHECKING:
    from pyspark.sql import Row

    from dagster_unified.engine.shipping import Payload
    from dagster_unified.engine.streaming.worker import LevelTask


_NUMBER = StructType().add("number", IntegerType())
_DATA = StructType().add("data", BinaryType())


class KeyGroupProcessor(StatefulProcessor):
    """Runs the keyed operators of one level: the payload is the program of each lane."""

    def __init__(self, payload: Payload) -> None:
        self._payload = payload

    def init(self, handle: Any) -> None:
        self._client = WriteBehindClient.of(handle)
        self._pages = handle.getMapState("pages", _NUMBER, _DATA)
        self._task: LevelTask | None = None

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:  # noqa: N802 - Spark's names
        if self._task is None:
            from dagster_unified.engine.streaming.worker import LevelTask

            self._task = LevelTask(self._payload, self._client, self._pages)
        lane, group, _ = key
        return self._task.run(lane, group, rows)

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:  # noqa: N802 - Spark's names
        """Take a page of the state that the query starts from, or its index."""
        with self._client.writing():
            self._pages.updateValue((initialState["number"],), (initialState["data"],))

    def close(self) -> None:
        if self._task is not None:
            self._task.close()
