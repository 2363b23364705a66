"""The sensor of a stream, and its decision: a pure function of what is seen. When it starts a deployment."""

import os
import sys
import time
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from dagster import (
    AssetKey,
    DagsterInstance,
    DagsterRunStatus,
    RunRequest,
    SensorEvaluationContext,
    build_sensor_context,
    job,
    op,
)
from dagster._core.remote_origin import ManagedGrpcPythonEnvCodeLocationOrigin
from dagster._core.storage.tags import REPOSITORY_LABEL_TAG
from dagster._core.test_utils import create_run_for_test
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin

from dagster_unified.api import Pipeline
from dagster_unified.connectors import CsvSource
from dagster_unified.engine.comparison import Compared
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory, Deployed, Lease
from dagster_unified.engine.streaming.desired import Desired, Status, read_desired
from dagster_unified.engine.streaming.shadow import Round
from dagster_unified.errors import ConfigurationError, SinkError
from dagster_unified.graph.options import Configuration
from dagster_unified.orchestration import ExecutionConfig, Retention, StreamingDeployment, unified_definitions
from dagster_unified.orchestration.outcomes import as_failure, error_of, log_of, why_it_failed
from dagster_unified.orchestration.stream_materializations import JobAssets
from dagster_unified.orchestration.streaming import stopped, streaming_job
from dagster_unified.orchestration.streaming_sensor import LOADED, Seen, SeenRun, next_step, streaming_sensor
from tests.orchestration.support import ticked
from tests.support import Sale

NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)
SECOND = timedelta(seconds=1)


def deployment(**options):
    pipeline = Pipeline("p")
    pipeline.from_collection([1]).print()
    return StreamingDeployment(pipeline, **options)


def sensor_of(folder, **options):
    """The streaming job of a deployment whose checkpoints are in a folder, and its sensor."""
    declared = deployment(options={"execution.checkpointing.dir": str(folder), **options})
    assets = JobAssets({}, {}, AssetKey("savepoint"))
    streaming = streaming_job(declared, assets)
    return streaming, streaming_sensor(declared, streaming, None, assets)


def run(status, name="run-1", ago=60, reason="", error="", code=""):
    ended = None if status in ("STARTED", "QUEUED") else NOON - ago * SECOND
    return SeenRun(name, status, NOON - (ago + 30) * SECOND, ended, reason, error, code)


def millis(ago):
    return int((NOON - ago * SECOND).timestamp() * 1000)


def lease(owner="run-1", ago=1, released=False, token=4):
    return Lease(token, owner, millis(ago), released)


def deployed(fingerprint="now", finished=False, **given):
    return Deployed(1, "id", "p", fingerprint, 1, 128, 4, "ROCKSDB", {}, {}, finished, **given)


def see(*runs, **given):
    known = {
        "deployed": deployed(),
        "lease": None,
        "desired": Desired(),
        "status": None,
        "fingerprint": "now",
        "now": NOON,
        **given,
    }
    strategy = {"restart-strategy.type": known.pop("strategy", "exponential-delay")}
    options = Configuration.of({**strategy, "restart-strategy.exponential-delay.jitter-factor": 0})
    return next_step(deployment(**known.pop("declared", {})), options, Seen(list(runs), **known))


def test_a_deployment_without_a_run_is_started_once_per_predecessor():
    assert see(deployed=None).launch == "p/first/now"
    assert see(run("SUCCESS")).launch == "p/run-1/now"


@pytest.mark.parametrize("status", ["QUEUED", "NOT_STARTED", "STARTING", "STARTED", "CANCELING"])
def test_nothing_is_launched_beside_a_run_that_may_be_alive(status):
    assert see(run(status), lease=lease()).launch is None


def test_a_suspended_deployment_stays_down_whoever_said_so():
    assert (
        "p is suspended; launch p_control with the action resume"
        in see(run("SUCCESS"), desired=Desired(1, "suspended")).message
    )
    assert see(run("SUCCESS"), declared={"state": "suspended"}).launch is None
    assert see(run("SUCCESS"), declared={"state": "suspended"}, desired=Desired(1, "running", at=millis(1))).launch


def test_a_failed_run_is_started_again_when_its_time_has_come_and_the_message_says_why():
    waiting = see(run("FAILURE", ago=0, reason="disk full"))
    assert waiting.launch is None
    assert waiting.message == "run run-1 failed: disk full; attempt 1 begins at 12:00:01 UTC"
    assert see(run("FAILURE", ago=5)).launch == "p/run-1/now"


@pytest.mark.parametrize(
    ("error", "restarted"),
    [
        ("SinkError", False),
        ("PipelineError", False),
        ("StateError", False),
        ("UserFunctionError", True),
        ("LeaseLostError", True),
    ],
)
def test_what_would_fail_again_is_not_started_again_until_it_is_resumed(error, restarted):
    failed = run("FAILURE", reason="no column", error=error)
    assert bool(see(failed).launch) == restarted
    assert ("failed: no column; giving up: it would fail again. Fix the cause" in see(failed).message) != restarted
    assert see(failed, desired=Desired(2, "running", at=millis(1))).launch
    assert see(failed, fingerprint="corrected").launch


def test_new_code_that_fails_is_started_again_as_the_strategy_says_and_code_that_was_put_back_at_once():
    fails = {"reason": "no such uid", "error": "PipelineError", "code": "new"}
    given_up = see(run("FAILURE", **fails), fingerprint="new")
    assert "failed: no such uid; giving up: it would fail again" in given_up.message
    waiting = see(run("FAILURE", ago=0, code="new"), fingerprint="new")
    assert waiting.launch is None
    assert waiting.message.endswith("attempt 1 begins at 12:00:01 UTC")
    twice = [run("FAILURE", "run-2", ago=5, code="new"), run("FAILURE", ago=60, code="new")]
    assert "; attempt 2" in see(*twice, fingerprint="new").message
    assert see(run("FAILURE", **fails), fingerprint="now").message == "starting p"
    assert see(run("FAILURE", **fails), fingerprint="newer").launch
    assert see(run("FAILURE", **fails), fingerprint="new", desired=Desired(2, "running", at=millis(1))).launch


def test_new_code_runs_beside_the_old_until_it_is_accepted():
    declared = {"upgrade_mode": "shadow"}
    beside = see(run("STARTED"), lease=lease(), fingerprint="new", declared=declared)
    assert (beside.beside, beside.stop, beside.launch) == (True, None, None)
    assert "run run-1 of p goes on with the code before, and the new code runs beside it" in beside.message
    assert beside.message.endswith("their tables have not been compared yet")
    for sink, words in (
        (Compared(rows=2), "their tables are equal (round 1: t: 2 rows, 0 different): dagster-unified swap puts it"),
        (Compared(rows=2, different=1), "their tables differ (round 1: t: 2 rows, 1 different)"),
    ):
        compared = Round(1, 0, {"t": sink})
        found = see(run("STARTED"), lease=lease(), fingerprint="new", declared=declared, compared=compared)
        assert words in found.message
    accepted = {"desired": Desired(1, accepted="new"), "fingerprint": "new", "declared": declared}
    assert see(run("STARTED"), lease=lease(), **accepted).stop == 4
    assert see(run("SUCCESS"), **accepted).launch == "p/run-1/new"
    assert not see(run("STARTED"), lease=lease(), declared=declared).beside


def test_new_code_does_not_take_the_place_of_an_old_job_that_has_ended_until_it_is_accepted():
    ended = see(run("FAILURE"), fingerprint="new", declared={"upgrade_mode": "shadow"})
    assert (ended.launch, ended.failed) == (None, True)
    assert "the job of p has ended, and the code that is loaded is another, which has not been" in ended.message
    assert see(run("SUCCESS"), deployed=None, fingerprint="new", declared={"upgrade_mode": "shadow"}).launch
    assert see(run("FAILURE"), declared={"upgrade_mode": "shadow"}).launch


def test_a_failed_run_says_the_class_of_its_error_and_where_its_log_is(tmp_path):
    @op
    def write(context):
        with as_failure(context):
            raise SinkError("no column")

    @job
    def writing():
        write()

    with DagsterInstance.local_temp(str(tmp_path)) as instance:
        failed = writing.execute_in_process(instance=instance, raise_on_error=False)
        assert (error_of(instance, failed.run_id), why_it_failed(instance, failed.run_id)) == ("SinkError", "no column")
        (failure,) = [event for event in failed.all_events if event.is_step_failure]
        told = failure.step_failure_data.user_failure_data.metadata
        assert told["run"].value == failed.run_id
        assert told["log"].value == log_of(instance, failed.run_id)
        assert told["log"].value.startswith(str(tmp_path))


def test_a_sensor_that_gives_up_says_where_the_log_is_and_a_resumption_forgives_what_failed_before():
    failed = replace(run("FAILURE", ago=60), log="/logs/run-1.err")
    gave_up = see(failed, strategy="none").message
    assert "giving up: restart-strategy.type is NONE. Fix the cause" in gave_up
    assert gave_up.endswith("; its log is /logs/run-1.err")
    assert see(failed, strategy="none", desired=Desired(2, "running", at=millis(1))).launch


def test_a_run_that_was_terminated_by_hand_stays_down_until_it_is_resumed():
    assert "was terminated by hand" in see(run("CANCELED")).message
    assert see(run("CANCELED"), desired=Desired(1, "running", at=millis(1))).launch
    assert "was terminated by hand" in see(run("CANCELED"), fingerprint="changed").message


def test_a_silent_run_is_marked_failed_whatever_dagster_says_of_it():
    assert see(run("STARTED"), lease=lease(ago=30)).mark_failed == "run-1"
    assert see(run("STARTED"), lease=lease(ago=5)).mark_failed is None
    assert see(run("STARTED", ago=600), lease=lease("another", ago=600)).mark_failed == "run-1"


def test_a_run_without_progress_is_replaced():
    status = Status(1, "run-1", 4, millis(1), 7, busy_since=millis(700))
    assert see(run("STARTED"), lease=lease(), status=status).replace == "run-1"
    assert (
        see(run("STARTED"), lease=lease(), status=status, declared={"stall_after": timedelta(hours=1)}).replace is None
    )


def test_the_sensor_says_what_a_run_has_lost_of_its_cluster_of_late():
    lost = "executor 1 on host a was lost; none is left, and tasks wait until the cluster gives another"
    status = Status(1, "run-1", 4, millis(1), 7, lost=lost, lost_at=millis(9))
    said = see(run("STARTED"), lease=lease(), status=status).message
    assert said == f"run run-1 of p is started; at 11:59:51 UTC {lost}"
    old = Status(1, "run-1", 4, millis(1), 7, lost=lost, lost_at=millis(700))
    another = Status(1, "run-0", 3, millis(1), 7, lost=lost, lost_at=millis(9))
    for status in (old, another):
        assert see(run("STARTED"), lease=lease(), status=status).message == "run run-1 of p is started"
    stuck = Status(1, "run-1", 4, millis(1), 7, millis(700), lost=lost, lost_at=millis(500))
    assert see(run("STARTED"), lease=lease(), status=stuck).message.endswith(f"replacing it; at 11:51:40 UTC {lost}")


def test_new_code_stops_the_job_once_and_starts_from_its_state():
    stopping = see(run("STARTED"), lease=lease(), fingerprint="new")
    assert stopping.stop == 4
    assert see(run("STARTED"), lease=lease(), fingerprint="new", desired=Desired(1, stop=4)).stop is None
    started = see(run("SUCCESS"), fingerprint="new")
    assert started.launch == "p/run-1/new"
    assert "with new code" in started.message


def test_the_sensor_says_what_has_changed():
    held = deployed(code={"step": {"": "a", "jobs.rate": "b"}, "old": {"": "c"}, "the options": {"parallelism": "d"}})
    code = {"step": {"": "a", "jobs.rate": "e"}, "new": {"": "c"}, "the options": {"parallelism": "f"}}
    said = "operator 'new' is new, operator 'old' is gone, operator 'step' (jobs.rate), the options (parallelism)"
    stopping = see(run("STARTED"), lease=lease(), deployed=held, fingerprint="new", code=code)
    assert stopping.message == f"the code of p has changed: {said}; stopping run run-1 after its epoch"
    assert (
        see(run("SUCCESS"), deployed=held, fingerprint="new", code=code).message == f"starting p with new code: {said}"
    )


def test_code_that_differs_after_three_upgrades_of_one_loading_is_upgraded_no_more():
    code = {"step": {"jobs.RATE": "b"}}

    def seen(upgrades, loaded="one", **given):
        held = deployed(code={"step": {"jobs.RATE": "a"}}, loaded="one", upgrades=upgrades, **given)
        return {"deployed": held, "fingerprint": "new", "code": code, "loaded": loaded}

    assert see(run("STARTED"), lease=lease(), **seen(2)).stop == 4
    stuck = see(run("STARTED"), lease=lease(), **seen(3))
    assert (stuck.failed, stuck.stop) == (True, None)
    assert "was started with new code 3 times since the code location was loaded" in stuck.message
    assert "operator 'step' (jobs.RATE)" in stuck.message
    assert see(run("STARTED"), lease=lease(), **seen(3, loaded="two")).stop == 4
    assert see(run("SUCCESS"), **seen(3)).message == "starting p"
    assert see(run("SUCCESS"), **seen(3, finished=True)).launch is None


@pytest.mark.parametrize(
    "strategy",
    [
        {"type": "fixed-delay", "fixed-delay.attempts": 60, "fixed-delay.delay": "0 s"},
        {
            "type": "failure-rate",
            "failure-rate.max-failures-per-interval": 60,
            "failure-rate.failure-rate-interval": "1 d",
            "failure-rate.delay": "0 s",
        },
    ],
)
def test_a_strategy_gives_up_after_more_failures_than_a_tick_looks_at_first(tmp_path, strategy):
    streaming, sensor = sensor_of(tmp_path, **{f"restart-strategy.{name}": value for name, value in strategy.items()})
    said = {}
    with DagsterInstance.ephemeral() as instance:
        for number in range(1, 62):
            failed = create_run_for_test(instance, job_name=streaming.name, status=DagsterRunStatus.STARTED)
            instance.report_run_failed(failed, "broken")
            if number in (50, 60, 61):
                said[number] = ticked(sensor, build_sensor_context(instance))
    assert said[50].tags["dagster-unified/reason"].endswith("; attempt 50")
    assert said[60].tags["dagster-unified/reason"].endswith("; attempt 60")
    assert "broken; giving up: " in said[61].skip_message


def test_a_sensor_whose_code_differs_after_three_upgrades_fails_its_tick_and_leaves_the_job_alone(tmp_path):
    streaming, sensor = sensor_of(tmp_path)
    directory = CheckpointDirectory(str(tmp_path), "p")
    with DagsterInstance.ephemeral() as instance:
        asked = ticked(sensor, build_sensor_context(instance))
        started = create_run_for_test(instance, job_name=streaming.name, status=DagsterRunStatus.STARTED)
        for number in range(4):  # each run finds other code than the sensor
            code = {"sink-print": {"jobs.NONCE": str(number)}}
            directory.deploy(
                Deployed(0, "", "p", str(number), 0, 128, 4, "ROCKSDB", {}, {}, code=code, loaded=asked.tags[LOADED])
            )
        held = directory.take(started.run_id, 20)
        try:
            with pytest.raises(
                Exception, match=r"p was started with new code 3 times .* operator 'sink-print' \(jobs.NONCE\)"
            ):
                ticked(sensor, build_sensor_context(instance))
        finally:
            held.release()
    assert read_desired(directory).stop == 0


def test_a_bounded_input_that_has_ended_is_not_begun_again():
    ended = {"deployed": deployed(finished=True), "bounded": True}
    assert see(run("SUCCESS"), **ended).message == "p has come to the end of its input"
    changed = see(run("SUCCESS"), **ended, fingerprint="changed")
    assert changed.launch is None
    assert "; its code is another now: launch p_control with the action resume to run it on all" in changed.message
    resumed = Desired(2, "running", at=millis(1))
    assert see(run("SUCCESS"), **ended, fingerprint="changed", desired=resumed).launch


def test_a_drained_deployment_stays_down_also_with_new_code():
    drained = {"deployed": deployed(finished=True), "desired": Desired(1, "drained", at=millis(90))}
    for fingerprint in ("now", "changed"):
        found = see(run("SUCCESS", ago=60), **drained, fingerprint=fingerprint)
        assert (found.launch, found.message) == (None, "p was drained, and has come to the end of its input")


@pytest.mark.parametrize("given", [{"fingerprint": "changed"}, {"desired": Desired(2, "running", at=millis(1))}])
def test_what_start_when_asks_for_keeps_no_new_code_and_no_resumption_waiting(given):
    assert see(run("SUCCESS"), may_start=False).message == "p waits for what start_when asks for"
    assert see(run("SUCCESS"), may_start=False, **given).launch


def test_a_run_of_another_code_location_is_none_of_this_deployments(tmp_path):
    streaming, sensor = sensor_of(tmp_path)
    target = LoadableTargetOrigin(executable_path=sys.executable, module_name="definitions")
    with DagsterInstance.ephemeral() as instance:
        context = SensorEvaluationContext(
            instance_ref=None,
            last_tick_completion_time=None,
            last_run_key=None,
            cursor=None,
            repository_name="__repository__",
            instance=instance,
            code_location_origin=ManagedGrpcPythonEnvCodeLocationOrigin(target, "here"),
            sensor_name=sensor.name,
        )
        for location, is_started in (("there", True), ("here", False)):
            create_run_for_test(
                instance,
                job_name=streaming.name,
                status=DagsterRunStatus.STARTED,
                tags={REPOSITORY_LABEL_TAG: f"__repository__@{location}"},
            )
            assert isinstance(ticked(sensor, context), RunRequest) is is_started


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: deployment(upgrade_mode="blue-green"), "upgrade_mode is one of stateless, last-state, savepoint"),
        (lambda: deployment(options={"restart-strategy.typ": "none"}), "unknown option"),
        (
            lambda: deployment(options={"execution.runtime-mode": "batch"}),
            "p: a StreamingDeployment runs in STREAMING, and its options say",
        ),
        (lambda: deployment(stall_after=5), "p: stall_after is a timedelta, not 5"),
        (
            lambda: deployment(restart_strategy="none", options={"restart-strategy.type": "fixed-delay"}),
            "the restart strategy is given twice",
        ),
        (lambda: deployment(restart_strategy="sometimes"), "restart-strategy.type"),
        (lambda: ExecutionConfig(**{"execution.runtime-mod": "BATCH"}), "did you mean 'execution.runtime-mode'"),
        (lambda: ExecutionConfig(execution_runtime_mode="BATCH"), "did you mean 'execution.runtime-mode'"),
        (lambda: Retention(max_bytes=-5), "cannot be negative"),
    ],
)
def test_a_deployment_that_cannot_be_is_an_error(made, says):
    with pytest.raises(ConfigurationError, match=says):
        made()


def test_the_restart_strategy_is_an_option_like_any_other():
    assert deployment(restart_strategy="none").options == {"restart-strategy.type": "none"}
    assert (
        deployment(restart_strategy="fixed-delay", options={"restart-strategy.fixed-delay.attempts": 2}).options[
            "restart-strategy.type"
        ]
        == "fixed-delay"
    )


def test_a_job_that_was_asked_to_stop_says_an_epoch_is_committed_only_where_one_is(tmp_path):
    directory = CheckpointDirectory(str(tmp_path), "sales")
    assert stopped(directory).startswith("stopped before the first epoch was committed, ")
    assert "starts over" in stopped(directory)
    commits = directory.path / "spark/main/commits"
    commits.mkdir(parents=True)
    (commits / "0").write_text("v1")
    assert "goes on behind the last epoch that is committed" in stopped(directory)


WAITS = "sales waits for what start_when asks for"


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
        found = ticked(self.definitions.resolve_sensor_def("sales_streaming_sensor"), context)
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
