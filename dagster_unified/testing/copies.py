"""Functions of its own for each turn of a subtask in the harness, which is in the process that built the pipeline.

Unpickled there, they would change the author's classes: what is pickled by value brings its class along. Knows
no Spark.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

from dagster_unified.errors import PipelineError
from dagster_unified.operators.rounds.spec import Level, Loop


def afresh(loop: Loop, number: int) -> Level:
    """A level with functions of its own: what they keep elsewhere than in state goes with the round."""
    passes = []
    for one in loop.levels[number].passes:
        steps = []
        for step in one.program.steps:
            try:
                steps.append(replace(step, function=deepcopy(step.function)))
            except TypeError as error:
                raise PipelineError(
                    f"{loop.where}, operator '{step.name}': its function cannot be copied for each subtask: {error};"
                    " create connections, locks and open files in open(), not before"
                ) from error
        passes.append(replace(one, program=replace(one.program, steps=tuple(steps))))
    return Level(tuple(passes))
