"""The examples on the documentation's pages are run as they stand.

The Python blocks of a page are one module, in an empty folder.
"""

import importlib
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import pytest
from deltalake import DeltaTable

from dagster_unified.connectors.written_ahead import _Log, _Receiver
from dagster_unified.orchestration import unified_definitions
from tests.depth import SEED, rotated
from tests.docs.support import PAGES
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
ON_SPARK = ("tutorial", "without-dagster", "handover", "write-a-connector")
EXAMPLES = sorted(
    str(page.relative_to(SITE))
    for page in SITE.rglob("*.md")
    if BLOCK.search(page.read_text()) and page.stem not in ON_SPARK and page not in PAGES
)
MODULES = {"quickstart.md": "shops"}
"""The names under which a page's own examples import its module."""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a page's examples, and return their module."""

    def run(page):
        name = MODULES.get(page, re.sub(r"\W", "_", page.removesuffix(".md")))
        (tmp_path / f"{name}.py").write_text("\n".join(BLOCK.findall((SITE / page).read_text())))
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        try:
            return importlib.import_module(name)
        finally:
            sys.modules.pop(name, None)

    return run


@pytest.mark.parametrize("page", EXAMPLES)
def test_the_examples_of_a_page_hold(page, run):
    run(page)


def test_the_partitioned_definitions_have_schedules_and_a_janitor(run):
    defs = run("guides/partitions.md").defs
    assert sorted(schedule.name for schedule in defs.schedules) == ["daily_janitor_schedule", "daily_schedule"]
    assert defs.resolve_job_def("daily_janitor")
    made = [node for node in defs.resolve_asset_graph().asset_nodes if node.is_materializable]
    assert all(node.is_partitioned for node in made)
    assert {node.has_self_dependency for node in made if "stage" in node.kinds} == {True}


def test_the_malformed_rows_of_a_source_are_an_asset(run):
    defs = unified_definitions(run("guides/connectors.md").checked)
    keys = {key.to_user_string() for key in defs.resolve_asset_graph().get_all_asset_keys()}
    assert "checked/sales_malformed" in keys


def test_a_streaming_deployment_gives_two_jobs_and_a_sensor(run):
    defs = run("guides/deployments.md").defs
    assert [sensor.name for sensor in defs.sensors] == ["shops_streaming_sensor"]
    assert sorted(job.name for job in defs.jobs) == ["shops_control", "shops_streaming"]


def test_a_pipeline_runs_without_dagster(spark, run):
    page = run("guides/without-dagster.md")
    assert sorted(page.collected) == [page.Sale("north", 5), page.Sale("south", 2)]
    assert page.result.metrics.rows["totals"] == 2


def test_the_source_of_the_page_on_connectors_answers_when_an_order_is_on_disk(run, tmp_path):
    page, port = run("guides/connectors.md"), free_port()
    receiver = _Receiver(page.Orders(port), tmp_path / "log")
    receiver.start()
    try:
        while socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.01)
        body = b'[{"number": 1, "amount": 9.5}, {"number": 2, "amount": 1.0}]'
        with urlopen(f"http://127.0.0.1:{port}/", body) as answer:
            assert answer.status == 200
        assert sum(_Log(page.Orders(port), str(tmp_path / "log")).newest().values()) == 2
    finally:
        receiver.end()


@pytest.mark.spark
@pytest.mark.rotates("kits")
def test_the_sink_of_the_page_on_connectors_loses_nothing_and_writes_nothing_twice(tmp_path):
    """In a process of its own: the kit's processes have to be able to import the page."""
    page = (SITE / "guides/write-a-connector.md").read_text()
    checks = rotated(["check_epochs", "check_partitions"], 1)
    assert len(BLOCK.findall(page)[0].splitlines()) < 120
    (tmp_path / "sqlite_page.py").write_text("\n".join(BLOCK.findall(page)))
    program = f"""
import os

import sqlite_page
from dagster_unified.testing.connectors import {", ".join(checks)}, spark_connect_server
if __name__ == "__main__":
    with spark_connect_server({free_port()}) as server:
        for number, check in enumerate([{", ".join(checks)}]):
            folder = f"{{os.getcwd()}}/{{number}}"
            os.mkdir(folder)
            check(sqlite_page.SqliteTarget(folder), server, {SEED}, 4)
"""
    (tmp_path / "check.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "check.py"], cwd=tmp_path, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stderr


def test_batch_hands_its_state_to_streaming(spark, run, tmp_path):
    run("guides/handover.md")
    rows = DeltaTable(f"{tmp_path}/totals").to_pyarrow_table().to_pylist()
    assert sorted((row["shop"], row["amount"]) for row in rows) == [("north", 7), ("south", 1)]


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_a_page_that_is_made_from_code_is_up_to_date(page):
    assert page.read_text() == PAGES[page](), "`python -m tests.docs.support` writes it"


def test_the_site_builds_strictly(tmp_path):
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    shutil.copytree(SITE, tmp_path / "docs")
    (tmp_path / "dagster_unified").symlink_to(ROOT / "dagster_unified")
    command = [str(Path(sys.executable).with_name("zensical")), "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "reference" / "api.html").exists()


@pytest.mark.parametrize("page", ["CHANGELOG.md", "CONTRIBUTING.md", "README.md"])
def test_links_of_the_repositorys_pages_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []
