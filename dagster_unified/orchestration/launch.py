"""Launches a pipeline's job in this process: what the command line does.

Uses the Dagster instance of DAGSTER_HOME where it is set, so that the run is seen in the UI; else one that is gone
afterwards.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from dagster import DagsterInstance, TextMetadataValue

from dagster_unified import settings
from dagster_unified.connectors.protocol.commits import SparkSink
from dagster_unified.engine import events, interrupts, session
from dagster_unified.engine.restarts import Attempts
from dagster_unified.errors import may_pass
from dagster_unified.graph.options import Configuration, Layer
from dagster_unified.graph.plan import plan
from dagster_unified.orchestration.definitions import unified_definitions
from dagster_unified.orchestration.deployments import StreamingDeployment
from dagster_unified.orchestration.resources import IntermediatesResource, SparkResource

if TYPE_CHECKING:
    import pyarrow as pa
    from dagster import DagsterEvent, JobDefinition

    from dagster_unified.api.pipeline import Pipeline
    from dagster_unified.engine.events import Observer
    from dagster_unified.engine.interrupts import Interrupts
    from dagster_unified.graph.plan import Plan


@dataclass
class Outcome:
    """How a launched run ended.

    `error` is one sentence where it failed; `interrupted` says that the process was asked to stop, and `may_pass` that
    another attempt may succeed.
    """

    run_id: str
    error: str | None
    spark: SparkResource
    interrupted: bool = False
    may_pass: bool = False

    def tables(self, planned: Plan, rows: int) -> dict[str, pa.Table]:
        """Return the first rows of each result table."""
        spark = session.start(self.spark.master, self.spark.remote, self.spark.config)
        previews = {}
        for node in planned.graph.sinks:
            if isinstance(node.sink, SparkSink) and node.sink.exists():
                table = node.sink.preview(spark, rows)
                if table is not None:
                    previews[f"{node.name} ({node.sink.describe()})"] = table
        return previews


def launch(
    pipeline: Pipeline,
    options: Mapping[str, Any],
    master: str,
    remote: str | None,
    storage: str,
    observe: Observer,
    connections: Mapping[str, object],
) -> Outcome:
    """Run `<pipeline>_batch` or, where the pipeline resolves to STREAMING, `<pipeline>_streaming` with these options.

    `connections` has the resources that sources and sinks connect by.

    The run is executed in a thread of its own, where neither Spark nor Dagster puts a signal handler in place of that
    of the process.
    """
    spark = SparkResource(master=master, remote=remote)
    configuration = Configuration([Layer("launch", options), *settings.shared_layers()])
    graph = pipeline.graph()
    mode = plan(graph, configuration, with_input=False).execution.mode
    streams = [StreamingDeployment(pipeline)] if mode == "STREAMING" else []
    own = {"spark": spark, "intermediates": IntermediatesResource(path=storage)}
    resources = {**{key: connections[key] for key in graph.resource_keys}, **own}
    definitions = unified_definitions(pipeline, *streams, resources=resources)
    job = definitions.resolve_job_def(f"{pipeline.name}_{mode.lower()}")
    config = {
        "resources": {"execution": {"config": dict(options)}},
        "loggers": {"console": {"config": {"log_level": "CRITICAL"}}},
    }
    with (
        interrupts.listening() as asked,
        ThreadPoolExecutor(1, thread_name_prefix="run") as thread,
        events.listening(observe),
    ):
        if mode == "BATCH":  # its stages are tried again in the run
            return thread.submit(_execute, job, config, spark, asked).result()
        return thread.submit(_keep_running, job, config, spark, asked, configuration, observe).result()


def _keep_running(
    job: JobDefinition,
    config: Mapping[str, Any],
    spark: SparkResource,
    asked: Interrupts,
    options: Configuration,
    observe: Observer,
) -> Outcome:
    """Execute a stream's job, and repeat it after an error that may pass, as its restart strategy says."""
    attempts = Attempts(options, "STREAMING", job.name)
    while True:
        began = datetime.now(timezone.utc)
        outcome = _execute(job, config, spark, asked)
        if outcome.error is None or not outcome.may_pass:
            return outcome
        decision = attempts.failed(began, outcome.error)
        if isinstance(decision, str):
            return replace(outcome, error=f"{outcome.error}. It is not started again: {decision}")
        observe(decision)
        until = time.monotonic() + decision.seconds
        while time.monotonic() < until:
            if asked.received:
                return replace(outcome, error=None, interrupted=True)
            time.sleep(min(interrupts.POLL, decision.seconds))


def _execute(job: JobDefinition, config: Mapping[str, Any], spark: SparkResource, asked: Interrupts) -> Outcome:
    run_id = str(uuid4())
    home = os.environ.get("DAGSTER_HOME")
    if home:
        os.makedirs(home, exist_ok=True)
    with DagsterInstance.get() if home else DagsterInstance.ephemeral() as instance:

        def cancelled() -> None:
            run = instance.get_run_by_id(run_id)
            if run is not None:
                instance.report_run_canceling(run)

        asked.on_stop = cancelled
        result = job.execute_in_process(run_config=config, instance=instance, raise_on_error=False, run_id=run_id)
        failures = [e for e in result.all_node_events if e.is_step_failure]
        interrupted = asked.received and not result.success
        if result.success or interrupted:
            return Outcome(run_id, None, spark, interrupted)
        return Outcome(run_id, _sentence(failures), spark, may_pass=any(map(_may_pass, failures)))


def _may_pass(failure: DagsterEvent) -> bool:
    """Return whether a step failed with one of the library's errors that another attempt may not meet."""
    raised = failure.step_failure_data.user_failure_data
    kind = raised.metadata.get("error") if raised is not None else None
    return isinstance(kind, TextMetadataValue) and may_pass(kind.value or "")


def _sentence(failures: list[DagsterEvent]) -> str:
    if not failures:
        return "the run failed; see the Dagster event log"
    data = failures[0].step_failure_data
    if data.user_failure_data is not None and data.user_failure_data.description:
        return data.user_failure_data.description
    error = data.error
    while error is not None and error.cause is not None:
        error = error.cause
    return error.message.strip() if error is not None else "the run failed; see the Dagster event log"
