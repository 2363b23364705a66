"""Tells functions of the last epoch of a job: no epoch comes after it whose functions would hear of it.

An instance of each operator that listens is opened for it, in a Spark task, and closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from dagster_unified.by_value import sent
from dagster_unified.engine.shipping import Payload
from dagster_unified.graph import nodes as g
from dagster_unified.graph.plan import Plan
from dagster_unified.graph.programs import broadcast_input, keyed_program, step
from dagster_unified.operators.functions.checkpoints import listeners
from dagster_unified.operators.program.run import RunningProgram
from dagster_unified.operators.program.spec import Program
from dagster_unified.operators.time import wall_clock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def tell_of_last_epoch(plan: Plan, nodes: Iterable[int], epoch: int, spark: SparkSession) -> None:
    """Open an instance of each of these operators that listens, and tell it that an epoch is committed."""
    for node in map(plan.graph.node, sorted(nodes)):
        if node.step is None or next(iter(listeners(node.user_function)), None) is None:
            continue
        program = _alone(plan, node)
        payload = sent([program], partial(Payload.of, program, [node.user_function]), program.pipeline)
        spark.range(0, 1, 1, 1).mapInArrow(_telling(payload, epoch), "id long").collect()


def _alone(plan: Plan, node: g.Node) -> Program:
    if node.key is not None:
        return keyed_program(plan, node)
    steps = (step(plan, node, -1, None),)
    return Program(plan.name, node.name, plan.input_layout(node.id), steps, (), broadcast=broadcast_input(plan, node))


def _telling(payload: Payload, epoch: int) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    return partial(_tell, payload, epoch)


def _tell(payload: Payload, epoch: int, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    program: Program = payload.load()
    for batch in batches:
        with RunningProgram(program, lambda number, emitted: None, wall_clock) as running:
            running.notify(epoch)
        yield batch.slice(0, 0)
