"""`<pipeline>_savepoint` and `<pipeline>_restore`, run as from the launchpad."""

import pytest
from dagster import DagsterInstance, Failure

from dagster_unified.api import Pipeline
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory, Deployed
from dagster_unified.engine.streaming.savepoint import savepoints
from dagster_unified.orchestration import StreamingDeployment, unified_definitions


@pytest.fixture
def deployed(tmp_path):
    pipeline = Pipeline("shops")
    pipeline.from_collection([1, 2], int).print()
    deployment = StreamingDeployment(pipeline, upgrade_mode="savepoint", options={"execution.checkpointing.dir": str(tmp_path)})
    return CheckpointDirectory(str(tmp_path), "shops"), unified_definitions(pipeline, deployments=[deployment])


def launch(definitions, name, **ops):
    return definitions.resolve_job_def(name).execute_in_process(instance=DagsterInstance.ephemeral(), run_config={"ops": ops} if ops else None)


def test_saving_and_going_back_from_the_launchpad(deployed):
    directory, definitions = deployed
    with pytest.raises(Failure, match="there is no state to save"):
        launch(definitions, "shops_savepoint")
    directory.deploy(Deployed(0, "", "shops", "f", 0, 128, "ROCKSDB", {}, {}))
    (directory.path / "spark/main/commits").mkdir(parents=True)
    (directory.path / "spark/main/commits/7").write_text("v1\n{}")
    assert launch(definitions, "shops_savepoint").success
    (made,) = savepoints(directory)
    assert made.epochs == {"main": 7}
    (directory.path / "spark/main/commits/8").write_text("v1\n{}")
    with pytest.raises(Failure, match=f"no savepoint 'another' .*there are {made.name}"):
        launch(definitions, "shops_restore", shops_go_back={"config": {"savepoint": "another"}})
    assert launch(definitions, "shops_restore", shops_go_back={"config": {"savepoint": made.name}}).success
    assert sorted(p.name for p in (directory.path / "spark/main/commits").iterdir()) == ["7"]
    assert launch(definitions, "shops_restore").success
    assert directory.deployed().timeline == 2
