"""When the sensor starts a deployment: always, when files have arrived, or when a function says so."""

import os
import time
from typing import NamedTuple

import pytest
from dagster import DagsterInstance, DagsterRunStatus, RunRequest, build_sensor_context
from dagster._core.test_utils import create_run_for_test

from dagster_unified.api import Pipeline
from dagster_unified.connectors import CsvSource
from dagster_unified.orchestration import StreamingDeployment, unified_definitions
from dagster_unified.orchestration.streaming_sensor import LOADED

WAITS = "sales waits for what start_when asks for"


class Sale(NamedTuple):
    shop: str
    amount: int


class Deployment:
    """A deployment over a folder, and its sensor."""

    def __init__(self, instance, folder, start_when):
        self.instance = instance
        pipeline = Pipeline("sales")
        pipeline.from_source(CsvSource(str(folder / "in"), Sale, monitor=True)).print()
        deployment = StreamingDeployment(
            pipeline, start_when=start_when, options={"execution.checkpointing.dir": str(folder / "checkpoints")}
        )
        self.definitions = unified_definitions(pipeline, deployment)

    def tick(self):
        """True where the sensor starts a run, else its message."""
        context = build_sensor_context(instance=self.instance, repository_def=self.definitions.get_repository_def())
        found = self.definitions.resolve_sensor_def("sales_streaming_sensor")(context)
        return isinstance(found, RunRequest) or found.skip_message


@pytest.fixture
def instance():
    with DagsterInstance.ephemeral() as instance:
        yield instance


def test_always_starts_at_once(instance, tmp_path):
    assert Deployment(instance, tmp_path, "always").tick() is True


def test_files_starts_when_a_file_has_arrived_since_the_job_last_ran(instance, tmp_path):
    deployment = Deployment(instance, tmp_path, "files")
    assert deployment.tick() == WAITS
    (tmp_path / "in").mkdir()
    file = tmp_path / "in" / "1.csv"
    file.write_text("shop,amount\nnorth,1\n")
    assert deployment.tick() is True
    instance.create_run_for_job(
        deployment.definitions.resolve_job_def("sales_streaming"), status=DagsterRunStatus.SUCCESS
    )
    assert deployment.tick() == WAITS
    time.sleep(0.1)
    elsewhere = tmp_path / "2.csv"
    elsewhere.write_text("shop,amount\nsouth,2\n")
    os.utime(elsewhere, (time.time() - 60, time.time() - 60))
    elsewhere.rename(file.with_name("2.csv"))
    assert deployment.tick() is True


def test_a_function_of_the_sensors_context_decides(instance, tmp_path):
    answers = iter([False, True])
    seen = []
    deployment = Deployment(instance, tmp_path, lambda context: seen.append(context.instance) or next(answers))
    assert [deployment.tick(), deployment.tick()] == [WAITS, True]
    assert seen == [instance, instance]


def test_a_new_stream_waits_for_one_that_runs_under_a_name_that_is_gone(instance, tmp_path):
    deployment = Deployment(instance, tmp_path, "always")
    job = deployment.definitions.resolve_job_def("sales_streaming")
    create_run_for_test(instance, job_name="shops_streaming", status=DagsterRunStatus.STARTED)  # not of this library
    assert deployment.tick() is True
    orphan = create_run_for_test(
        instance, job_name="shops_streaming", status=DagsterRunStatus.STARTED, tags={LOADED: "before"}
    )
    assert f"sales is new here, and run {orphan.run_id[:8]} of shops_streaming still runs, which" in deployment.tick()
    create_run_for_test(instance, job_name=job.name, status=DagsterRunStatus.SUCCESS, tags={LOADED: "before"})
    instance.report_run_canceled(orphan)
    assert deployment.tick() is True
