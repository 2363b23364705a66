"""The command line: what it prints, where, and its exit codes. A mistake is one sentence and exit code 2."""

import json
import subprocess
import sys
from importlib.metadata import version

import pytest

PIPELINE = """
from dagster_unified.api import Pipeline
from dagster_unified.cli import main

pipeline = Pipeline("shop")
pipeline.from_collection([("a", 1), ("b", 2)], name="sales").key_by(0).sum(1).name("totals").print("out")
"""


MODULES = {
    "shop_job": PIPELINE,
    "shop_two": PIPELINE + '\nother = Pipeline("other")\n',
    "shop_none": "x = 1\n",
    "shop_broken": "def (:\n",
    "shop_fails": "1 / 0\n",
    "shop_leaves": "raise SystemExit(3)\n",
    "shop_spark": 'from pyspark.sql import functions as F\nsmall = F.col("amount") < 3\n',
    "shop_missing": "import there_is_no_such_module\n",
}


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("name", ["shop_job.py", "shop_job", "shop_job:pipeline", "shop_two:pipeline", "./shop_job.py"])
def test_explain_shows_the_plan_of_a_file_or_a_module(cli, name):
    code, out, err = cli("explain", name)
    assert (code, err) == (0, "")
    assert out.startswith("shop: BATCH (bounded)\n")
    assert "stage 2 of 2: out" in out
    assert "(shop_" in out


def test_explain_as_mermaid_as_json_and_as_the_execution_graph(cli):
    assert cli("explain", "shop_job.py", "--mermaid")[1].startswith("flowchart LR\n")
    assert "vertex 1, depth 0, source:" in cli("explain", "shop_job.py", "--physical")[1]
    code, out, _ = cli("explain", "shop_job.py", "--json")
    assert (code, json.loads(out)["pipeline"]) == (0, "shop")


@pytest.mark.parametrize(
    "define",
    [
        ["-D", "execution.runtime-mode=STREAMING"],
        ["--define", "execution.runtime-mode=streaming"],
        ["-Dexecution.runtime-mode=STREAMING"],
    ],
    ids=" ".join,
)
def test_an_option_is_set_as_flink_users_write_it(cli, define):
    code, out, err = cli("explain", "shop_job.py", *define)
    assert (code, err) == (0, "")
    assert out.startswith("shop: STREAMING")


def test_version(cli):
    assert cli("version") == (0, version("dagster-unified") + "\n", "")


def test_config_show_names_every_values_origin(cli, tmp_path, monkeypatch):
    (tmp_path / "dagster-unified.toml").write_text(
        '[parallelism]\ndefault = 3\n[execution]\nruntime-mode = "BATCH"\nincremental-updates = true\n'
    )
    monkeypatch.setenv("DAGSTER_UNIFIED_EXECUTION_RUNTIME_MODE", "AUTOMATIC")
    monkeypatch.setenv("DAGSTER_UNIFIED_EXECUTION_INCREMENTAL_UPDATES", "false")
    code, out, _ = cli("config", "show", "--format", "plain", "-D", "execution.runtime-mode=STREAMING")
    lines = out.splitlines()
    assert code == 0
    assert "execution.runtime-mode = STREAMING (command line)" in lines
    assert "execution.incremental-updates = false (environment, DAGSTER_UNIFIED_EXECUTION_INCREMENTAL_UPDATES)" in lines
    assert "parallelism.default = 3 (file, dagster-unified.toml)" in lines
    assert "pipeline.operator-chaining.enabled = true (default)" in lines
    assert "execution.schedule-mode = follows from the mode (default)" in lines


def test_config_show_of_one_option_says_where_it_is_looked_for(cli):
    code, out, _ = cli("config", "show", "execution.schedule-mode")
    assert code == 0
    assert out.startswith("execution.schedule-mode = follows from the mode (default)\n")
    assert (
        "-D execution.schedule-mode=… or run configuration, a deployment's options, the environment variable"
        " DAGSTER_UNIFIED_EXECUTION_SCHEDULE_MODE, dagster-unified.toml" in out
    )


def test_config_show_as_a_table_names_options_and_origins(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = cli("config", "show")
    assert code == 0
    assert "execution.batch-shuffle-mode" in out
    assert "ALL_EXCHANGES_BLOCKING" in out


MISTAKES = {
    "unknown option": (
        ["explain", "shop_job.py", "-D", "execution.runtme-mode=BATCH"],
        "unknown option 'execution.runtme-mode'; did you mean 'execution.runtime-mode'?",
    ),
    "wrong value": (
        ["explain", "shop_job.py", "-D", "execution.runtime-mode=BACH"],
        "'BACH' is not one of BATCH, STREAMING, AUTOMATIC; did you mean 'BATCH'?",
    ),
    "no value": (
        ["explain", "shop_job.py", "-D", "execution.runtime-mode"],
        "expected key=value, such as -D execution.runtime-mode=BATCH",
    ),
    "unknown option to show": (
        ["config", "show", "parallelism.defalt"],
        "unknown option 'parallelism.defalt'; did you mean 'parallelism.default'?",
    ),
    "no such file": (["explain", "nowhere.py"], "there is no file nowhere.py"),
    "a module that exits": (["explain", "shop_leaves"], "shop_leaves cannot be imported: SystemExit: 3, at"),
    "no such module": (["explain", "shop_jbo"], "there is no module 'shop_jbo'; did you mean 'shop_job'?"),
    "relative module": (["explain", ".shop_job"], "'.shop_job' is not a module's name"),
    "no such pipeline": (
        ["explain", "shop_job:pipelin"],
        "shop_job has no pipeline 'pipelin'; did you mean 'pipeline'?",
    ),
    "several pipelines": (
        ["explain", "shop_two"],
        "shop_two has several pipelines; name one: shop_two:pipeline, shop_two:other",
    ),
    "no pipeline": (["explain", "shop_none.py"], "shop_none.py has no Pipeline at its top level"),
    "not Python": (["explain", "shop_broken.py"], "shop_broken.py"),
    "fails": (["explain", "shop_fails.py"], "ZeroDivisionError: division by zero"),
    "needs a module": (["explain", "shop_missing"], "No module named 'there_is_no_such_module'"),
    "file that needs a module": (["explain", "shop_missing.py"], "No module named 'there_is_no_such_module'"),
    "no Spark Connect server": (
        ["run", "shop_job.py", "--remote", "sc://127.0.0.1:1"],
        "no Spark Connect server can be reached at sc://127.0.0.1:1: Connection refused",
    ),
    "no Spark master": (
        ["run", "shop_job.py", "--master", "spark://127.0.0.1:1"],
        "no Spark master can be reached at spark://127.0.0.1:1: Connection refused",
    ),
    "not a remote": (
        ["run", "shop_job.py", "--remote", "http://host:1"],
        "'http://host:1' is not the address of a Spark Connect server, such as sc://host:15002",
    ),
    "not a master": (
        ["run", "shop_job.py", "--master", "sprk://host:7077"],
        "'sprk://host:7077' is not a Spark master",
    ),
    "unknown command": (["explian", "shop_job.py"], "explian"),
    "no pipeline given": (["explain"], "pipeline"),
    "two forms": (
        ["explain", "shop_job.py", "--json", "--mermaid"],
        "--mermaid, --json and --physical are forms of one plan",
    ),
    "fewer rows than none": (["run", "shop_job.py", "--rows", "-3"], "Must be >= 0"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_and_exit_code_2(cli, mistake):
    arguments, words = MISTAKES[mistake]
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    assert err.lower().count("dagster-unified:") == 1
    assert words.lower() in err.lower()
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1


def test_ctrl_c_before_anything_ran_is_one_sentence(cli, tmp_path):
    (tmp_path / "shop_stopped.py").write_text("raise KeyboardInterrupt\n")
    code, out, err = cli("explain", "shop_stopped.py")
    assert (code, out, err) == (130, "", "dagster-unified: interrupted before anything ran\n")


def test_functions_of_pyspark_are_told_apart_where_no_session_runs(tmp_path):
    explain = [
        sys.executable,
        "-m",
        "dagster_unified.cli",
        "explain",
        "shop_spark",
    ]  # a session may run in this process
    ended = subprocess.run(explain, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    said = " ".join(ended.stderr.split())
    assert "shop_spark.py:2 pyspark is asked for what only a running Spark has; take column functions from" in said


def test_a_file_that_is_not_toml_is_named(cli, tmp_path):
    (tmp_path / "dagster-unified.toml").write_text("= 3")
    code, _, err = cli("config", "show")
    assert code == 2
    assert "dagster-unified.toml is not TOML" in err


def test_a_run_connects_by_the_resources_of_the_definitions_in_its_module(cli, tmp_path):
    job = """
from dagster import Definitions
from dagster_unified.api import Pipeline
from dagster_unified.connectors import DatabaseSource, ResourceKey

pipeline = Pipeline("shops")
pipeline.from_source(DatabaseSource("orders", int, ResourceKey("warehouse"))).print()
"""
    (tmp_path / "without.py").write_text(job)
    (tmp_path / "given.py").write_text(job + 'defs = Definitions(resources={"warehouse": "duckdb:////data/a.db"})')
    assert cli("explain", "without.py")[0] == 0
    code, _, err = cli("run", "without.py", "--master", "spark://127.0.0.1:1")
    assert code == 2
    assert "shops: source 'orders' (table orders at database at resource 'warehouse') reads by the resource" in err
    code, _, err = cli("run", "given.py", "--master", "spark://127.0.0.1:1")  # which is looked for next
    assert "spark://127.0.0.1:1" in err
