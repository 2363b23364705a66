"""`<pipeline>_control`: one job for all that is asked of a streaming deployment, run as from the launchpad."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from dagster import AssetKey, DagsterInstance, DagsterInvalidConfigError, Failure, validate_run_config

from dagster_unified.api import Pipeline
from dagster_unified.connectors import CsvSource, DeltaSink
from dagster_unified.engine import events
from dagster_unified.engine.events import EpochCommitted, SavepointTaken
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory, Deployed
from dagster_unified.engine.streaming.desired import read_desired
from dagster_unified.engine.streaming.savepoints.copy import savepoints
from dagster_unified.orchestration import StreamingDeployment, unified_definitions
from dagster_unified.orchestration.streaming_sensor import LOADED
from dagster_unified.state import Savepoint
from tests.support import Sale


@pytest.fixture
def deployed(tmp_path):
    pipeline = Pipeline("shops")
    pipeline.from_collection([1, 2], int).print()
    deployment = StreamingDeployment(
        pipeline, upgrade_mode="savepoint", options={"execution.checkpointing.dir": str(tmp_path)}
    )
    return CheckpointDirectory(str(tmp_path), "shops"), unified_definitions(pipeline, deployment)


def action(name, **options):
    return {"ops": {"shops_action": {"config": {"action": name, **options}}}}


def launch(definitions, name, **options):
    return definitions.resolve_job_def("shops_control").execute_in_process(
        instance=DagsterInstance.ephemeral(), run_config=action(name, **options)
    )


def names(definitions):
    jobs = {job.name for job in definitions.get_repository_def().get_all_jobs() if not job.name.startswith("__")}
    return jobs, {sensor.name for sensor in definitions.sensors or ()}


def test_a_bounded_pipeline_has_no_streaming_job_until_it_has_a_streaming_deployment():
    pipeline = Pipeline("shops")
    pipeline.from_collection([1, 2], int).print()
    assert names(unified_definitions(pipeline)) == ({"shops_batch", "shops_janitor"}, {"shops_heartbeat_sensor"})
    both = unified_definitions(pipeline, StreamingDeployment(pipeline))
    assert names(both) == (
        {"shops_batch", "shops_janitor", "shops_streaming", "shops_control"},
        {"shops_heartbeat_sensor", "shops_streaming_sensor"},
    )


def test_an_unbounded_pipeline_has_a_streaming_job_without_being_asked():
    pipeline = Pipeline("shops")
    pipeline.from_source(CsvSource("in", int, monitor=True)).print()
    assert names(unified_definitions(pipeline)) == ({"shops_streaming", "shops_control"}, {"shops_streaming_sensor"})


def test_the_launchpad_knows_the_actions(deployed):
    _, definitions = deployed
    job = definitions.resolve_job_def("shops_control")
    for name in ("suspend", "stop", "resume", "drain", "savepoint", "restore"):
        assert validate_run_config(job, action(name))
    assert validate_run_config(job, action("restore", savepoint="g1-20260101T000000-000"))
    with pytest.raises(DagsterInvalidConfigError, match="SUSPEND"):
        validate_run_config(job, action("SUSPEND"))
    with pytest.raises(DagsterInvalidConfigError, match='Missing required config entry "ops"'):
        validate_run_config(job, {})


@pytest.mark.parametrize(("name", "state"), [("suspend", "suspended"), ("resume", "running"), ("drain", "drained")])
def test_an_action_says_what_is_wanted(deployed, name, state):
    directory, definitions = deployed
    assert launch(definitions, name).success
    assert read_desired(directory).state == state


def test_a_suspended_stream_is_not_launched_by_hand(deployed):
    _, definitions = deployed
    launch(definitions, "suspend")
    streaming = definitions.resolve_job_def("shops_streaming")
    with pytest.raises(
        Failure, match=r"^shops is suspended, .* let it go on first \(dagster-unified resume, or shops_c"
    ):
        streaming.execute_in_process(instance=DagsterInstance.ephemeral())
    launched = streaming.execute_in_process(instance=DagsterInstance.ephemeral(), tags={LOADED: "1"})
    assert launched.success, "its sensor did, at the same moment"


def test_a_savepoint_is_named_only_to_restore_it(deployed):
    directory, definitions = deployed
    with pytest.raises(Failure, match="shops: the action 'suspend' takes no savepoint"):
        launch(definitions, "suspend", savepoint="g1")
    assert read_desired(directory).state is None


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        (
            "drain",
            {"with_savepoint": True},
            "shops: the action 'drain' is not taken with a savepoint",
        ),
        (
            "suspend",
            {"drain": True},
            "shops: the action 'suspend' does not drain the job; remove drain, or choose stop",
        ),
        ("resume", {"path": "x"}, "shops: the action 'resume' writes no tables; remove path='x'$"),
        ("suspend", {"path": "x"}, "writes no tables; remove path='x', or add with_savepoint: true"),
    ],
)
def test_what_an_action_has_no_use_for_is_an_error(deployed, name, given, message):
    directory, definitions = deployed
    with pytest.raises(Failure, match=message):
        launch(definitions, name, **given)
    assert read_desired(directory).state is None


def run_until(folder, kind, action, **options):
    """Runs a stream of totals, and launches an action at its first event of a kind; gives the result and the instance.

    The stream ends by that action.
    """
    (folder / "in").mkdir()
    (folder / "in/1.csv").write_text("shop,amount\nnorth,3\nsouth,5\n")
    pipeline = Pipeline("shops")
    sales = pipeline.from_source(CsvSource(str(folder / "in"), Sale, name="sales", monitor=True))
    totals = sales.key_by("shop").reduce(lambda a, b: Sale(a.shop, a.amount + b.amount)).uid("totals")
    totals.sink_to(DeltaSink(f"{folder}/out", mode="upsert", key="shop"))
    given = {"execution.checkpointing.dir": str(folder), "pipeline.max-parallelism": 2, **options}
    definitions = unified_definitions(StreamingDeployment(pipeline, options=given))
    asked = []

    def ask(event):
        if isinstance(event, kind) and not asked:
            asked.append(thread.submit(launch, definitions, **action))

    with (
        ThreadPoolExecutor(1) as thread,
        events.listening(ask),
        DagsterInstance.ephemeral() as instance,
    ):
        assert definitions.resolve_job_def("shops_streaming").execute_in_process(instance=instance).success
        left = instance.fetch_materializations(AssetKey(["shops", "savepoint"]), limit=5).records
    (control,) = asked
    return control.result(), [record.asset_materialization for record in left]


def saved_totals(path):
    return {row["shop"]: row["value"]["amount"] for row in Savepoint.read(path).rows("totals")}


def test_a_stream_shows_the_savepoints_of_its_interval_and_is_suspended_with_one(spark, tmp_path):
    suspend = {"name": "suspend", "with_savepoint": True, "path": f"{tmp_path}/handed over"}
    control, (shown,) = run_until(tmp_path, SavepointTaken, suspend, **{"execution.savepoint.interval": "1 ms"})
    assert control.success
    directory = CheckpointDirectory(str(tmp_path), "shops")
    periodic, last = savepoints(directory)
    location = f"{directory.path}/savepoints/{periodic.name}"
    assert shown.metadata["path"].value == location
    assert (periodic.periodic, last.periodic, last.tables) == (True, False, f"{tmp_path}/handed over")
    assert saved_totals(location) == saved_totals(last.tables) == {"north": 3, "south": 5}


def test_a_stream_is_drained_with_a_savepoint(spark, tmp_path):
    control, _ = run_until(tmp_path, EpochCommitted, {"name": "stop", "drain": True})
    (event,) = control.asset_materializations_for_node("shops_action")
    directory = CheckpointDirectory(str(tmp_path), "shops")
    (made,) = savepoints(directory)
    assert (made.drained, directory.deployed().finished, read_desired(directory).state) == (True, True, "drained")
    tables = f"{directory.path}/savepoints/{made.name}"
    assert event.metadata["path"].value == tables
    assert saved_totals(tables) == {"north": 3, "south": 5}


@pytest.mark.parametrize(("name", "given"), [("suspend", {"with_savepoint": True}), ("stop", {})])
def test_stopping_with_a_savepoint(deployed, name, given):
    directory, definitions = deployed
    directory.deploy(Deployed(0, "", "shops", "f", 0, 128, 4, "ROCKSDB", {}, {}))
    (directory.path / "spark/main/commits").mkdir(parents=True)
    assert launch(definitions, name, **given).success
    assert len(savepoints(directory)) == 1
    assert read_desired(directory).state == "suspended"


def test_saving_and_going_back_from_the_launchpad(deployed):
    directory, definitions = deployed
    with pytest.raises(Failure, match="there is no state to save"):
        launch(definitions, "savepoint")
    directory.deploy(Deployed(0, "", "shops", "f", 0, 128, 4, "ROCKSDB", {}, {}))
    (directory.path / "spark/main/commits").mkdir(parents=True)
    (directory.path / "spark/main/commits/7").write_text("v1\n{}")
    assert launch(definitions, "savepoint").success
    (made,) = savepoints(directory)
    assert made.epochs == {"main": 7}
    (directory.path / "spark/main/commits/8").write_text("v1\n{}")
    with pytest.raises(Failure, match=f"no savepoint 'another' .*there are {made.name}"):
        launch(definitions, "restore", savepoint="another")
    assert launch(definitions, "restore", savepoint=made.name).success
    assert sorted(p.name for p in (directory.path / "spark/main/commits").iterdir()) == ["7"]
    assert launch(definitions, "restore").success
    assert directory.deployed().timeline == 2
