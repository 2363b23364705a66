"""What an author writes for a delta iteration: a function of solutions and of what their keys were sent.

Knows no engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Generic

import pyarrow as pa

from dagster_unified.operators.functions.base import Function
from dagster_unified.operators.functions.type_variables import S, T


class DeltaFunction(Function, ABC, Generic[S, T]):
    """The body of a delta iteration, for one key: its record in the solution set, joined with its workset.

    There is an example at `iterate_delta`. Flink: *Delta Iterate*; a co-group of workset and solution set.
    """

    @abstractmethod
    def update(self, solution: S | None, workset: Sequence[T]) -> tuple[S | None, Iterable[T]]:
        """The record that replaces the key's, None to keep it as it is, and what is sent to keys for the next round.

        `solution` is None where the solution set has no record of the key, and a change then adds one. `workset` is
        what was sent to the key for this round, in no defined order. Return a new record as the change, and leave the
        given one as it is.
        """


class BatchDeltaFunction(Function, ABC):
    """The body of a delta iteration over Arrow batches: many keys at once. Both streams are keyed by fields.

    Examples:
        >>> import pyarrow as pa
        >>> import pyarrow.compute as pc
        >>> class Halving(iterations.BatchDeltaFunction):
        ...     def update_batch(self, solution, workset):
        ...         amounts = pc.add(solution["amount"], workset["amount"])
        ...         total = workset.set_column(1, "amount", amounts).select(["shop", "amount"])
        ...         half = workset.set_column(1, "amount", pc.divide(workset["amount"], 2))
        ...         return total, half.filter(pc.greater(half["amount"], 0))
        >>> of_shops = sales.key_by("shop").window(GlobalWindows.create_with_end_of_stream_trigger())
        >>> by_shop = of_shops.max_by("amount").key_by("shop")
        >>> sums = {"amount": "sum", "at": "min"}
        >>> totals = iterations.iterate_delta(by_shop, sales.key_by("shop"), Halving(), combine=sums)
        >>> sorted((sale.shop, sale.amount) for sale in collect(totals))
        [('north', 20), ('south', 11)]
    """

    @abstractmethod
    def update_batch(
        self, solution: pa.RecordBatch, workset: pa.RecordBatch
    ) -> tuple[pa.RecordBatch | None, pa.RecordBatch | None]:
        """The changes of the solution set, and the workset of the next round; None where there is nothing.

        A row of `solution` is that of the same row's key in `workset`; where the solution set has none, all of it is
        null. With `combine=` by columns each key has one row. How keys are cut into batches is not defined. A change
        has the columns of the key and those that change; others stay as they are. One of a key that the solution set
        does not have has all columns.
        """
