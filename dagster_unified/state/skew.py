"""How evenly the keys of a savepoint are spread over key groups."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pyarrow as pa

from dagster_unified.operators.keys import key_hashes, key_values
from dagster_unified.state.manifest import OperatorState
from dagster_unified.state.schemas import SUBTASK_ROLES
from dagster_unified.state.tables import read_batches

if TYPE_CHECKING:
    from upath import UPath

SAMPLE = 1_000_000
"""Keys that are looked at; of more, evenly spaced ones."""


def keys_per_group(folder: UPath, state: OperatorState, groups: int, sample: int = SAMPLE) -> list[int] | None:
    """How many keys each of `groups` key groups has; None where a key's columns do not tell, and for operator state.

    Of more than `sample` keys it is an estimate.
    """
    if any(column.role in SUBTASK_ROLES for column in state.columns):
        return None
    key = [column.name for column in state.columns if column.role == "key"]
    every = max(1, -(-state.rows // sample))
    found: Counter[int] = Counter()
    offset = 0
    for batch in read_batches(folder, state, key):
        if not key or any(pa.types.is_nested(column.type) for column in batch.columns):
            return None
        rows = range(offset, batch.num_rows, every)
        offset = (offset - batch.num_rows) % every
        picked = batch.take(pa.array(rows, pa.int64())).drop_null()  # the row of broadcast state has no key
        found.update(h % groups for h in key_hashes(key_values(picked.columns)))
    return [found[group] * every for group in range(groups)]
