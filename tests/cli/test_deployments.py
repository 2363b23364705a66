"""Commands about a streaming deployment: they find it where it is declared, and change nothing where they do not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory, Deployed
from dagster_unified.engine.streaming.desired import read_desired
from dagster_unified.engine.streaming.savepoints.copy import savepoints
from dagster_unified.state import Savepoint

COMMAND = str(Path(sys.executable).with_name("dagster-unified"))
PIPELINES = """
from dagster_unified.api import Pipeline
from dagster_unified.orchestration import StreamingDeployment, unified_definitions

pipeline = Pipeline("shops")
pipeline.from_collection([1, 2], int).print()
"""
DEPLOYMENT = "StreamingDeployment(pipeline, options={'execution.checkpointing.dir': 'elsewhere'})"
SECOND = "second = Pipeline('others')\nsecond.from_collection([1], int).print()\n"
MODULES = {
    "its definitions": f"defs = unified_definitions(pipeline, {DEPLOYMENT})",
    "its deployment": f"deployment = {DEPLOYMENT}",
    "both": f"deployment = {DEPLOYMENT}\ndefs = unified_definitions(pipeline, deployment)",
    "merged definitions": (
        f"from dagster import Definitions\ndefs = Definitions.merge(unified_definitions(pipeline, {DEPLOYMENT}),"
        " Definitions())"
    ),
}


@pytest.fixture(autouse=True)
def module():
    yield
    sys.modules.pop("deployed_shops", None)


def started(root, pipeline="shops"):
    directory = CheckpointDirectory(str(root), pipeline)
    directory.deploy(Deployed(0, "", pipeline, "f", 0, 128, 4, "ROCKSDB", {}, {}))
    return directory


@pytest.mark.parametrize("module", MODULES)
def test_a_deployment_is_found_with_its_own_options(cli, tmp_path, module):
    (tmp_path / "deployed_shops.py").write_text(PIPELINES + MODULES[module])
    directory = started(tmp_path / "elsewhere")
    code, out, err = cli("suspend", "deployed_shops.py")
    assert (code, err) == (0, "")
    assert out.startswith(f"shops is to be suspended ({directory.path}: deployment ")
    assert read_desired(directory).state == "suspended"
    assert cli("resume", "deployed_shops.py")[0] == 0
    assert read_desired(directory).state == "running"


@pytest.mark.parametrize("command", ["suspend", "stop", "resume", "drain", "savepoint", "savepoints", "restore"])
def test_where_nothing_was_started_nothing_is_written(cli, tmp_path, command):
    (tmp_path / "deployed_shops.py").write_text(PIPELINES)
    started(tmp_path / "elsewhere")
    before = sorted(tmp_path.rglob("*"))
    code, out, err = cli(command, "deployed_shops.py")
    assert (code, out) == (2, "")
    assert f"shops: nothing has been started in {tmp_path / '.dagster_unified/checkpoints/shops'}" in err
    assert [p for p in sorted(tmp_path.rglob("*")) if "__pycache__" not in str(p)] == before


def test_options_of_the_command_line_are_over_those_of_the_deployment(cli, tmp_path):
    (tmp_path / "deployed_shops.py").write_text(PIPELINES + MODULES["its deployment"])
    directory = started(tmp_path / "there")
    assert cli("drain", "deployed_shops.py", "-D", "execution.checkpointing.dir=there")[0] == 0
    assert read_desired(directory).state == "drained"


@pytest.fixture
def saved(tmp_path):
    """A job that has committed an epoch and has stopped."""
    (tmp_path / "deployed_shops.py").write_text(PIPELINES + MODULES["its deployment"])
    directory = started(tmp_path / "elsewhere")
    (directory.path / "spark/main/commits").mkdir(parents=True)
    (directory.path / "spark/main/commits/7").write_text("v1\n{}")
    return directory


@pytest.mark.parametrize("arguments", [("suspend", "--savepoint"), ("stop",), ("stop", "--savepoint")])
def test_stopping_with_a_savepoint(cli, saved, arguments):
    command, *more = arguments
    code, out, err = cli(command, "deployed_shops.py", *more)
    (made,) = savepoints(saved)
    assert (code, out, err) == (0, f"{made.describe()}\nshops is suspended\n", "")
    assert read_desired(saved).state == "suspended"


def test_what_does_not_run_is_not_drained(cli, saved):
    code, out, err = cli("stop", "deployed_shops.py", "--drain")
    assert (code, out) == (2, "")
    assert "shops: its input has not come to its end, and no job runs that could drain it; resume it, and ask" in err
    assert (savepoints(saved), read_desired(saved).state) == ([], None)


def test_the_exit_code_says_that_tables_could_not_be_written(saved, tmp_path):
    done = subprocess.run(  # a process of its own, which has not started Java yet
        [COMMAND, "savepoint", "deployed_shops.py", "--path", "tables"],
        cwd=tmp_path,
        env={**os.environ, "JAVA_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    (made,) = savepoints(saved)
    assert (done.returncode, done.stdout) == (1, f"{made.describe()}\n")
    assert made.describe().endswith(f"(command line), tables in {tmp_path}/tables")
    assert done.stderr.startswith(
        "dagster-unified: its tables could not be written: Spark needs Java 17 or newer, and JAVA_HOME"
    )


def test_a_path_that_has_a_savepoint_is_an_error_before_anything_is_done(cli, saved, tmp_path):
    Savepoint.new("other").write(str(tmp_path / "tables"))
    for command, option in (("savepoint", "--path"), ("suspend", "--path"), ("stop", "--savepoint")):
        code, out, err = cli(command, "deployed_shops.py", option, "tables")
        assert (code, out) == (2, "")
        assert f"there is a savepoint in {tmp_path}/tables already; give another path, or remove it" in err
    assert savepoints(saved) == []
    assert read_desired(saved).state is None


def waits_for_a_swap(tmp_path):
    waiting = DEPLOYMENT.replace("pipeline,", "pipeline, upgrade_mode='shadow',", 1)
    (tmp_path / "deployed_shops.py").write_text(PIPELINES + f"deployment = {waiting}")


def test_new_code_is_swapped_in_where_its_tables_are_equal_or_somebody_accepts_that_they_are_not(cli, saved, tmp_path):
    code, _, err = cli("swap", "deployed_shops.py")
    assert code == 2
    assert (
        "shops: its upgrade_mode is 'last-state', so that new code takes the place of the old as soon as it is" in err
    )
    waits_for_a_swap(tmp_path)
    code, _, err = cli("swap", "deployed_shops.py")
    assert code == 2
    assert "shops: the new code has written nothing beside the old one yet" in err
    assert read_desired(saved).accepted == ""
    code, out, _ = cli("swap", "deployed_shops.py", "--accept-differences")
    assert code == 0
    assert "shops is to run the new code: its sensor upgrades it" in out
    assert read_desired(saved).accepted
    assert cli("suspend", "deployed_shops.py")[0] == 0
    assert read_desired(saved).accepted, "it stays accepted whatever else is asked"


def test_there_is_no_shadow_of_what_was_never_started(cli, tmp_path):
    waits_for_a_swap(tmp_path)
    code, out, err = cli("shadow", "deployed_shops.py")
    assert (code, out) == (2, "")
    assert f"shops: no job was started in {tmp_path}/elsewhere/shops, and there is nothing that new code could" in err


def test_a_run_says_that_the_deployment_has_its_state_elsewhere(cli, tmp_path):
    loaded = f"open({str(tmp_path / 'loaded')!r}, 'a').write('once ')\n"
    (tmp_path / "deployed_shops.py").write_text(loaded + PIPELINES + MODULES["its deployment"])
    nobody, streaming = ("--master", "spark://127.0.0.1:9"), ("-D", "execution.runtime-mode=STREAMING")
    _, _, err = cli("run", "deployed_shops.py", *nobody, *streaming)
    assert "takes no options of its StreamingDeployment" in err
    assert f"give -D execution.checkpointing.dir={tmp_path}/elsewhere" in err
    assert (tmp_path / "loaded").read_text() == "once ", "a file that is loaded again has other classes"
    _, _, err = cli("run", "deployed_shops.py", *nobody, *streaming, "-D", "execution.checkpointing.dir=elsewhere")
    assert "StreamingDeployment" not in err


def test_one_that_is_declared_suspended_is_resumed_before_it_ever_ran(cli, tmp_path):
    (tmp_path / "deployed_shops.py").write_text(
        PIPELINES + "deployment = StreamingDeployment(pipeline, state='suspended')"
    )
    assert cli("suspend", "deployed_shops.py")[0] == 2
    code, out, _ = cli("resume", "deployed_shops.py")
    assert code == 0
    assert "not started yet" in out


def test_one_of_several_is_named(cli, tmp_path):
    (tmp_path / "deployed_shops.py").write_text(
        PIPELINES + SECOND + f"defs = unified_definitions({DEPLOYMENT}, StreamingDeployment(second))"
    )
    directory = started(tmp_path / "elsewhere")
    code, _, err = cli("suspend", "deployed_shops.py")
    assert code == 2
    assert "has several streaming deployments; name one: deployed_shops.py:others, deployed_shops.py:shops" in err
    assert cli("suspend", "deployed_shops.py:shops")[0] == 0
    assert read_desired(directory).state == "suspended"
    code, _, err = cli("suspend", "deployed_shops.py:shosp")
    assert code == 2
    assert "no streaming deployment of 'shosp'; did you mean 'shops'?" in err


def test_pipelines_beside_the_one_deployment_are_none(cli, tmp_path):
    (tmp_path / "deployed_shops.py").write_text(
        PIPELINES + SECOND + f"defs = unified_definitions(pipeline, second, {DEPLOYMENT})"
    )
    directory = started(tmp_path / "elsewhere")
    assert cli("suspend", "deployed_shops.py")[0] == 0
    assert read_desired(directory).state == "suspended"


def test_a_module_without_any_is_an_error(cli, tmp_path):
    (tmp_path / "deployed_shops.py").write_text("x = 1")
    code, _, err = cli("suspend", "deployed_shops.py")
    assert code == 2
    assert "deployed_shops.py has no StreamingDeployment, Definitions of pipelines, or Pipeline at its top level" in err
