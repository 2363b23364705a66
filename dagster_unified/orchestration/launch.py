"""Launches a pipeline's BATCH job in this process: what the command line does.

Uses the Dagster instance of DAGSTER_HOME where it is set, so that the run is seen in the UI; else one that is gone afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster import DagsterInstance

from dagster_unified import settings
from dagster_unified.connectors.base import SparkSink
from dagster_unified.engine import session
from dagster_unified.graph.nodes import SinkNode
from dagster_unified.graph.options import Configuration, Layer
from dagster_unified.graph.plan import plan
from dagster_unified.orchestration import progress
from dagster_unified.orchestration._dagster_compat import DagsterExecutionInterruptedError
from dagster_unified.orchestration.definitions import unified_definitions
from dagster_unified.orchestration.io_manager import IntermediateIOManager
from dagster_unified.orchestration.resources import SparkResource

if TYPE_CHECKING:
    import pyarrow as pa
    from dagster import DagsterEvent

    from dagster_unified.api.pipeline import Pipeline
    from dagster_unified.engine.events import Observer
    from dagster_unified.graph.plan import Plan


@dataclass
class Outcome:
    """How a launched run ended; `error` is one sentence where it failed."""

    run_id: str
    error: str | None
    spark: SparkResource

    def tables(self, planned: Plan, rows: int) -> dict[str, pa.Table]:
        """The first rows of each result table."""
        spark = session.start(self.spark.master, self.spark.remote, self.spark.config)
        found = {}
        for node in planned.graph.nodes:
            if isinstance(node, SinkNode) and isinstance(node.sink, SparkSink):
                table = node.sink.preview(spark, rows)
                if table is not None:
                    found[f"{node.name} ({node.sink.describe()})"] = table
        return found


def launch(pipeline: Pipeline, options: Mapping[str, Any], master: str, remote: str | None, storage: str, observe: Observer) -> Outcome:
    """Runs `<pipeline>_batch` or, where the pipeline resolves to STREAMING, `<pipeline>_streaming` with these options."""
    spark = SparkResource(master=master, remote=remote)
    definitions = unified_definitions(pipeline, {"spark": spark, "intermediates": IntermediateIOManager(path=storage)})
    mode = plan(pipeline.graph(), Configuration([Layer("launch", options), *settings.shared_layers()])).execution.mode
    job = definitions.resolve_job_def(f"{pipeline.name}_{mode.lower()}")
    config = {"resources": {"execution": {"config": dict(options)}}, "loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
    home = os.environ.get("DAGSTER_HOME")
    if home:
        os.makedirs(home, exist_ok=True)
    with DagsterInstance.get() if home else DagsterInstance.ephemeral() as instance, progress.listening(observe):
        try:
            result = job.execute_in_process(run_config=config, instance=instance, raise_on_error=False)
        except (DagsterExecutionInterruptedError, KeyboardInterrupt):
            return Outcome("", None, spark)
        failures = [e for e in result.all_node_events if e.is_step_failure]
        if any(_interrupted(e) for e in failures):
            return Outcome(result.run_id, None, spark)
        return Outcome(result.run_id, None if result.success else _sentence(failures), spark)


def _interrupted(failure: DagsterEvent) -> bool:
    """Whether a step failed since it was asked to stop, and did."""
    error = failure.step_failure_data.error
    while error is not None and error.cls_name != DagsterExecutionInterruptedError.__name__:
        error = error.cause
    return error is not None


def _sentence(failures: list[DagsterEvent]) -> str:
    """What the user reads of a failed run."""
    if not failures:
        return "the run failed; see the Dagster event log"
    data = failures[0].step_failure_data
    if data.user_failure_data is not None and data.user_failure_data.description:
        return data.user_failure_data.description
    error = data.error
    while error is not None and error.cause is not None:
        error = error.cause
    return error.message.strip() if error is not None else "the run failed; see the Dagster event log"
