"""What the BATCH drivers emit, and the counters that are known once all of it is."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import NamedTuple

import pyarrow as pa

from dagster_unified.operators.metrics import Metrics


class Emitted(NamedTuple):
    """A batch of one of a program's outputs, and the index of the partition that it belongs to."""

    output: int
    batch: pa.RecordBatch
    partition: int = 0


Emitting = Generator[Emitted, None, dict[int, Metrics]]
"""A driver at work; it returns the metrics of each partition."""


class Run:
    """A driver's run, which goes on while it is iterated."""

    def __init__(self, emitting: Emitting) -> None:
        self._emitting = emitting
        self.metrics: dict[int, Metrics] = {}
        """Of each partition by its index, at the end of the run."""

    def __iter__(self) -> Iterator[Emitted]:
        self.metrics = yield from self._emitting
