"""What an author writes for a delta iteration: a function of a key's solution and of what the key was sent.

Knows no engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Generic

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
