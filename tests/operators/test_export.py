"""The exporting driver: what keys leave as rows are the rows of the pages that they would have in STREAMING."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from dagster_unified.engine.batch.run import exports_rows
from dagster_unified.operators.drivers import batch as batch_driver
from dagster_unified.operators.drivers.batch import rows_of, run_batch
from dagster_unified.operators.drivers.group import MemoryStore
from dagster_unified.operators.drivers.key_groups import ControlEvent, GroupInput, KeyGroups, MicroBatch
from dagster_unified.operators.keys import sorted_runs
from dagster_unified.operators.layout import CARRIED, CARRIED_LAYOUT
from dagster_unified.operators.program.step import CarryOver, Output
from dagster_unified.operators.time import MIN_TIMESTAMP
from dagster_unified.testing.records import to_batch
from tests.depth import examples
from tests.operators.test_state_of_every_operator import (  # noqa: F401 - a fixture
    OPERATORS,
    Driving,
    broadcast_table,
    micro_batches,
    part,
    rows,
    rows_of_windows,
    ruled,
    unkeyed,
)

NOT_OF_KEYS = (ruled, unkeyed, broadcast_table)
"""Operators that have state of others than keys."""


def by_key(batches):
    """Rows in one order, and so the entries of maps, which keep none where they are in parts."""
    return sorted((in_order(row) for batch in batches for row in batch.to_pylist()), key=repr)


def in_order(value):
    if isinstance(value, bytes) and value[:1] and value[0] >> 4 == 8:  # a map by window, of a state with no column
        return sorted(msgspec.msgpack.decode(value, type=dict[tuple[int, ...] | str | int, Any]).items(), key=repr)
    if isinstance(value, dict):
        return {name: in_order(item) for name, item in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        return sorted(((in_order(key), in_order(item)) for key, item in value), key=repr)
    return [in_order(item) for item in value] if isinstance(value, list) else value


def left_as_rows(program, batches, event):
    """What is emitted, and the rows that are left."""
    outputs = (*program.outputs, Output(0, CARRIED_LAYOUT, CARRIED))
    over = CarryOver(MIN_TIMESTAMP, msgspec.json.encode(event))
    out, left = [], []
    for output, batch, _ in run_batch(replace(program, outputs=outputs, export=over), batches, lambda: event.now):
        if output < len(program.outputs):
            out.append((output, batch))
            continue
        left.append(batch)
    return out, left


def left_as_pages(program, batch, event):
    """The same of a micro-batch of STREAMING that has all records, and the pages that are left."""
    out, store = [], MemoryStore()
    driver = KeyGroups(program, lambda output, emitted: out.append((output, emitted)), lambda: event.now)
    driver.run(store, MicroBatch(GroupInput([batch]), event, sorted_by_key=True))
    driver.close()
    (pages,) = rows_of(0, store)
    return out, pages


@pytest.mark.usefixtures("part")
@pytest.mark.parametrize("build", [o for o in OPERATORS if o not in NOT_OF_KEYS], ids=lambda build: build.__name__)
@settings(
    phases=[Phase.generate, Phase.shrink],
    max_examples=examples(4),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data(), batches=micro_batches(), most=st.integers(2, 7), cut=st.integers(1, 5))
def test_what_keys_leave_are_the_rows_of_their_pages(build, data, batches, most, cut):
    driving = Driving(build, data.draw)
    assert exports_rows(driving.node)
    program = driving.payload.load()
    events = [event for batch in batches for event in batch[0]]
    records, _ = driving.inputs(program, events)
    assume(records)
    batch, *_ = sorted_runs(to_batch("p", program.input, records), program.keyed, program.input, "p")
    event = ControlEvent(watermarks={"operator": batches[0][1]}, now=batches[0][2])
    emitted, pages = left_as_pages(program, batch, event)
    cuts = [batch.slice(start, cut) for start in range(0, batch.num_rows, cut)]
    whole = build in (rows, rows_of_windows)  # a function of batches sees how a key's records are cut
    with patch.object(batch_driver, "MOST_WAITING", len(events) + 1 if whole else most):
        out, left = left_as_rows(program, cuts, event)
    assert by_key(left) == by_key(driving.rows(pages))
    assert by_key([b for _, b in out]) == by_key([b for _, b in emitted])
