"""`map_batches` with operator state: a function of batches that keeps lists of its subtask."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from dagster_unified.operators.functions.base import Wrapping
from dagster_unified.operators.functions.batches import KeyedBatchFunction
from dagster_unified.operators.functions.checkpoints import CheckpointListener
from dagster_unified.operators.keyed_batches import EmittingBatches, KeyedBatchesStep, KeyedBatchOperator
from dagster_unified.operators.operator_state import CheckpointedOperator
from dagster_unified.operators.program.epochs import Emitting
from dagster_unified.operators.program.step import Place


class OfBatches(Wrapping, KeyedBatchFunction[Any]):
    """A function of batches that is called with nothing else."""

    def process_batch(self, batch: pa.RecordBatch, ctx: KeyedBatchFunction.Context[Any]) -> pa.RecordBatch | None:
        found: pa.RecordBatch | None = self.function(batch)
        return found


class CheckpointedBatchOperator(CheckpointedOperator, KeyedBatchOperator):
    """Runs a function of batches with operator state."""

    may_return_none = False

    def _told(self) -> Emitting:
        return EmittingBatches(self)


class CheckpointedBatchesStep(KeyedBatchesStep):
    """`map_batches` with operator state."""

    def made(self, place: Place) -> KeyedBatchOperator:
        return CheckpointedBatchOperator(place.where, self.function, place.options, place.clock, place.metrics)

    def listeners(self) -> tuple[CheckpointListener, ...]:
        """None: the copies of its function hear of an epoch when they are opened."""
        return ()
