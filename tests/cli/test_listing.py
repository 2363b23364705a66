"""`dagster-unified list` and `start`: what is deployed, in which state, and how a stream is begun without the UI."""

import json
import re
import sys

import pytest
from dagster import DagsterInstance, RunsFilter

from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory, Deployed
from dagster_unified.engine.streaming.desired import Status, ask, read_desired, write_status
from dagster_unified.operators.time import wall_clock

MODULE = """
from dagster_unified.api import Pipeline
from dagster_unified.connectors import RateSource
from dagster_unified.orchestration import StreamingDeployment, unified_definitions

shops = Pipeline("shops")
shops.from_source(RateSource(1)).print()
totals = Pipeline("totals")
totals.from_collection([1], int).print()
defs = unified_definitions(StreamingDeployment(shops, options={"execution.checkpointing.dir": "here"}), totals)
"""


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    yield
    sys.modules.pop("listed_shops", None)


@pytest.fixture
def module(tmp_path):
    (tmp_path / "listed_shops.py").write_text(MODULE)
    return "listed_shops"


@pytest.fixture
def home(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    (tmp_path / "home/dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    with DagsterInstance.get() as instance:
        yield instance


@pytest.fixture
def listed(cli, module):
    """The rows of the list, by pipeline."""

    def run():
        code, out, err = cli("list", module, "--json")
        assert (code, err) == (0, "")
        return {row["pipeline"]: row for row in json.loads(out)}

    return run


def directory(tmp_path):
    made = CheckpointDirectory(str(tmp_path / "here"), "shops")
    made.deploy(Deployed(0, "", "shops", "f", 0, 128, 4, "ROCKSDB", {}, {}))
    return made


def test_deployments_of_both_modes_before_anything_ran(cli, module):
    code, out, err = cli("list", module)
    assert (code, err) == (0, "")
    assert [cell.strip() for cell in out.splitlines()[-3].split("│")[1:4]] == ["shops", "STREAMING", "not started"]
    assert [cell.strip() for cell in out.splitlines()[-2].split("│")[1:4]] == ["totals", "BATCH", "unknown"]


def test_a_stream_that_runs(cli, module, listed, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    checkpoint = directory(tmp_path)
    (checkpoint.path / "spark/main/commits").mkdir(parents=True)
    (checkpoint.path / "spark/main/commits/41").write_text("v1\n{}")
    with checkpoint.take("0123456789", 20) as lease:
        write_status(checkpoint, Status(1, "0123456789", lease.token, wall_clock(), watermark=1_700_000_000_000))
        row = listed()["shops"]
        assert (row["state"], row["run"], row["epoch"]) == ("running", "0123456789", 41)
        assert row["watermark"] == "2023-11-14T22:13:20Z"
        assert row["lag"] == pytest.approx(wall_clock() / 1000 - 1_700_000_000, abs=60)
        cells = [cell.strip() for cell in cli("list", module)[1].splitlines()[-3].split("│")]
        days = (wall_clock() // 1000 - 1_700_000_000) // 86_400
        assert cells[3:8] == ["running", "01234567", "41", "2023-11-14 22:13:20", f"{days} d"]
        assert re.fullmatch(r"\d s ago", cells[8])
        write_status(checkpoint, Status(2, "0123456789", lease.token, wall_clock(), phase="restoring state"))
        assert (listed()["shops"]["state"], listed()["shops"]["phase"]) == ("starting", "restoring state")
        write_status(checkpoint, Status(3, "0123456789", lease.token, wall_clock(), phase="running"))
        ask(checkpoint, state="drained")
        assert listed()["shops"]["state"] == "draining"
        ask(checkpoint, state="suspended")
        assert listed()["shops"]["state"] == "stopping"
    assert listed()["shops"]["state"] == "suspended"
    ask(checkpoint, state="running")
    assert listed()["shops"]["state"] == "stopped"


@pytest.mark.parametrize(("state", "shown"), [("running", "finished"), ("drained", "drained")])
def test_a_stream_that_has_come_to_its_end(listed, tmp_path, state, shown):
    checkpoint = directory(tmp_path)
    ask(checkpoint, state=state)
    checkpoint.finish()
    assert listed()["shops"]["state"] == shown


def test_a_stream_whose_process_died(listed, tmp_path, monkeypatch):
    checkpoint = directory(tmp_path)
    lease = checkpoint.take("run", 20)
    written = checkpoint.path / f"lease/{lease.token}.json"
    alive = json.loads(written.read_bytes())
    lease.release()
    written.write_text(json.dumps({**alive, "beat": wall_clock() - 60_000}))
    row = listed()["shops"]
    assert (row["state"], row["note"]) == ("failed", "its job gives no sign of life any more")


def test_what_dagster_knows_of_the_last_runs(listed, home, tmp_path):
    directory(tmp_path)
    assert {name: row["state"] for name, row in listed().items()} == {"shops": "stopped", "totals": "not started"}
    assert listed()["shops"]["note"] == "its sensor is off, and turned on by dagster-unified start"
    defs = sys.modules["listed_shops"].defs
    for name, job in (("shops", "shops_streaming"), ("totals", "totals_batch")):
        run = home.create_run_for_job(defs.resolve_job_def(job))
        home.report_run_failed(run, f"{name}: the disk is full")
    rows = listed()
    assert {name: row["state"] for name, row in rows.items()} == {"shops": "failed", "totals": "failed"}
    assert rows["totals"]["note"] == "totals: the disk is full"
    assert rows["shops"]["note"].startswith("shops: the disk is full; its sensor is off")
    run = home.create_run_for_job(defs.resolve_job_def("totals_batch"))
    home.report_run_canceled(run)
    assert listed()["totals"]["state"] == "terminated"
    assert home.get_runs(RunsFilter(job_name="totals_batch"))[0].run_id == listed()["totals"]["run"]


def test_the_module_of_a_project_is_found(cli, module, tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.dagster]\nmodule_name = "listed_shops"\n')
    assert "shops" in cli("list")[1]


def test_a_state_that_cannot_be_read_leaves_the_others(cli, module, tmp_path):
    checkpoint = directory(tmp_path)
    for file in (checkpoint.path / "deployment").iterdir():
        file.write_text("damaged")
    code, out, _ = cli("list", module)
    assert code == 0
    assert "shops: the deployment record in" in out
    assert "totals" in out


def test_pipelines_without_a_deployment_are_listed_by_their_sources(cli, tmp_path):
    (tmp_path / "listed_shops.py").write_text(MODULE.partition("defs =")[0])
    rows = json.loads(cli("list", "listed_shops.py", "--json")[1])
    assert [(row["pipeline"], row["mode"]) for row in rows] == [("shops", "STREAMING"), ("totals", "BATCH")]
    (tmp_path / "listed_shops.py").write_text("x = 1")
    assert "has no deployment, Definitions of pipelines, or Pipeline" in cli("list", "listed_shops.py")[2]


# start


def test_start_turns_the_sensor_on_and_asks_for_the_job(cli, module, home, tmp_path):
    checkpoint = directory(tmp_path)
    ask(checkpoint, state="suspended")
    (tmp_path / "workspace.yaml").write_text(
        f"load_from: [{{python_module: {{module_name: {module}, location_name: corner}}}}]"
    )
    code, out, err = cli("start", f"{module}:shops")
    assert code == 0, err
    assert out == f"shops is to be running ({checkpoint.path}); its sensor in code location corner is on\n"
    assert "evaluates sensors; the job starts once one does (dagster dev, or dagster-daemon run)" in err
    assert read_desired(checkpoint).state == "running"
    (state,) = home.all_instigator_state()
    assert (state.instigator_name, state.is_running) == ("shops_streaming_sensor", True)
    assert state.origin.repository_origin.code_location_origin.location_name == "corner"
    with checkpoint.take("0123456789", 20):
        asked = read_desired(checkpoint)
        assert cli("start", module)[1].endswith("its job runs: run 0123456789\n")
        assert read_desired(checkpoint) == asked
    rows = json.loads(cli("list", module, "--json")[1])
    assert (rows[0]["sensor"], rows[0]["note"]) == ("on", "")


def test_start_needs_dagster_home_and_a_code_location_with_the_sensor(cli, module, monkeypatch, tmp_path):
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    code, out, err = cli("start", module)
    assert (code, out) == (2, "")
    assert "shops: DAGSTER_HOME is not set, and no daemon would see that it is to run" in err
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "other"))
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "workspace.yaml").write_text("load_from: [{python_module: broken}]")
    code, out, err = cli("start", module)
    assert (code, out) == (2, "")
    assert "no code location of the workspace has a sensor shops_streaming_sensor; its locations are broken" in err
    assert "broken cannot be loaded: ZeroDivisionError: division by zero" in err
    assert not (tmp_path / "here").exists()
