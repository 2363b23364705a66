"""`UnifiedPipelineComponent`: what a `defs.yaml` may say, and what the real `dg` makes of it in an empty project."""

import importlib
import re
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from dagster import (
    AutomationCondition,
    ComponentTree,
    DailyPartitionsDefinition,
    DefaultScheduleStatus,
    FreshnessPolicy,
)
from dagster.components.resolved.errors import ResolutionException
from dagster_dg_cli.cli import create_dg_cli
from pydantic import ValidationError

import dagster_unified
from dagster_unified import UnifiedPipelineComponent
from dagster_unified.errors import ConfigurationError
from dagster_unified.orchestration import BatchDeployment, BatchSchedule, Checks, Retention, StreamingDeployment

PYPROJECT = """
[project]
name = "corner-shops"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["dagster-unified"]

[tool.dg]
directory_type = "project"

[tool.dg.project]
root_module = "corner_shops"
"""
READING = """
from typing import NamedTuple

from dagster_unified.api import Pipeline
from dagster_unified.connectors import DeltaSink, DeltaSource


class Total(NamedTuple):
    shop: str
    amount: int


first = Pipeline("first")
totals = first.from_collection([Total("a", 1)], Total, "sales").key_by("shop").sum("amount")
totals.sink_to(DeltaSink("/lake/totals", name="totals"))
totals.sink_to(DeltaSink("/lake/all", mode="append", name="all"))
second = Pipeline("second")
again = second.from_source(DeltaSource("/lake/totals", Total, name="totals"))
again.sink_to(DeltaSink("/lake/all", mode="append", name="all"))
"""
DEFINITIONS = """
from pathlib import Path

from dagster import definitions, load_from_defs_folder


@definitions
def defs():
    return load_from_defs_folder(path_within_project=Path(__file__).parent)
"""
SHOPS = """
from dagster import MonthlyPartitionsDefinition

from dagster_unified.api import Pipeline
from dagster_unified.connectors import CsvSource

MONTHS = MonthlyPartitionsDefinition("2024-01-01")
pipeline = Pipeline("shops")
pipeline.from_source(CsvSource("/in/{start:%Y-%m-%d}.csv", int, name="files")).print()
live = Pipeline("live")
live.from_source(CsvSource("/in", int, name="files", monitor=True)).print()
"""


@pytest.fixture
def shops(tmp_path, monkeypatch):
    """A module with two pipelines, and a package of definitions with none."""
    (tmp_path / "shop_pipelines.py").write_text(SHOPS)
    (tmp_path / "shop_defs").mkdir()
    (tmp_path / "shop_defs" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for module in ("shop_pipelines", "shop_defs"):
        sys.modules.pop(module, None)


def component(**attributes):
    return UnifiedPipelineComponent.from_attributes_dict(
        attributes={"pipeline": "shop_pipelines:pipeline", **attributes}
    )


def built(**attributes):
    """The definitions of a component in a project without others."""
    tree = ComponentTree(defs_module=importlib.import_module("shop_defs"), project_root=Path.cwd())
    return component(**attributes).build_defs(tree.load_context)


def test_the_example_of_the_documentation_builds(shops):
    page = (Path(__file__).parents[2] / "docs" / "coming-from" / "dagster.md").read_text()
    example = yaml.safe_load(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])
    assert example["type"] == "dagster_unified.UnifiedPipelineComponent"
    names = {job.name for job in built(**{**example["attributes"], "pipeline": "shop_pipelines:pipeline"}).jobs}
    assert {"shops_batch", "shops_streaming"} <= names


def test_the_attributes_are_those_of_the_deployments(shops):
    batch = {
        "partitions": {"type": "daily", "start_date": "2024-01-01", "timezone": "Europe/Vienna"},
        "backfill_policy": {"type": "multi_run", "max_partitions_per_run": 7},
        "carry_state": True,
        "upstream": {"files": "exports/files"},
        "schedule": {"offset": "2 h", "catch_up": 3, "running": True},
        "retention": {"max_age": None, "max_bytes": 5},
        "checks": {"columns": False, "fresh_within": "1 d"},
        "options": {"execution.savepoint.path": "/data/savepoint"},
    }
    found = component(batch=batch)
    declared = found.batch.deployment(found.pipeline)
    assert isinstance(declared, BatchDeployment)
    assert declared.partitions == DailyPartitionsDefinition("2024-01-01", timezone="Europe/Vienna")
    assert declared.backfill_policy.max_partitions_per_run == 7
    assert declared.upstream["files"].to_user_string() == "exports/files"
    assert declared.schedule == BatchSchedule(offset=timedelta(hours=2), catch_up=3, running=True)
    assert declared.retention == Retention(max_age=None, max_bytes=5)
    assert declared.checks == Checks(schema=False, fresh_within=timedelta(days=1))
    assert declared.options == {"execution.savepoint.path": "/data/savepoint"}
    streaming = {
        "options": {"pipeline.max-parallelism": 4},
        "restart_strategy": "none",
        "tick_every": "5 s",
        "materialize_every": "1 min",
        "partitions": {"type": "daily", "start_date": "2024-01-01"},
        "rerun_late": True,
        "upgrade_mode": "savepoint",
        "from_savepoint": "/data/savepoint",
    }
    found = component(pipeline="shop_pipelines:live", streaming=streaming)
    declared = found.streaming.deployment(found.pipeline)
    assert isinstance(declared, StreamingDeployment)
    assert declared.options == {
        "pipeline.max-parallelism": 4,
        "restart-strategy.type": "none",
        "execution.state-recovery.path": "/data/savepoint",
    }
    assert (declared.upgrade_mode, declared.tick_every) == ("savepoint", timedelta(seconds=5))
    assert (declared.materialize_every, declared.rerun_late) == (timedelta(minutes=1), True)
    assert declared.partitions == DailyPartitionsDefinition("2024-01-01")


def test_the_attributes_left_out_are_the_defaults_of_the_deployments(shops):
    found = component(batch={"schedule": {}, "retention": {}, "checks": {}}, streaming={})
    batch = found.batch.deployment(found.pipeline)
    assert batch == BatchDeployment(found.pipeline, schedule=BatchSchedule(), retention=Retention(), checks=Checks())
    assert found.streaming.deployment(found.pipeline) == StreamingDeployment(found.pipeline)
    found = component(batch={})
    assert found.batch.deployment(found.pipeline) == BatchDeployment(found.pipeline)
    found = component(batch={"retention": None})
    assert found.batch.deployment(found.pipeline) == BatchDeployment(found.pipeline, retention=None)


def test_what_templates_give_is_text_that_is_read_as_its_attribute(shops, monkeypatch):
    monkeypatch.setenv("NO", "false")
    monkeypatch.setenv("HALF", "0.5")
    given = {
        "partitions": "shop_pipelines:MONTHS",
        "carry_state": "{{ env.NO }}",
        "schedule": {"running": "{{ env.NO }}", "catch_up": "3"},
        "checks": {"rows_within": "{{ env.HALF }}"},
    }
    found = component(batch=given)
    declared = found.batch.deployment(found.pipeline)
    assert (declared.carry_state, declared.schedule.running, declared.schedule.catch_up) == (False, False, 3)
    assert declared.checks.rows_within == 0.5


def test_a_component_gives_the_definitions_of_its_pipeline(shops):
    definitions = built(batch={"partitions": "shop_pipelines:MONTHS", "schedule": {"running": True}})
    assert definitions.resolve_schedule_def("shops_schedule").default_status is DefaultScheduleStatus.RUNNING
    assert {"spark", "execution", "intermediates"} <= definitions.resources.keys()
    live = built(pipeline="shop_pipelines:live", project_resources=["spark"], executor="project")
    assert [sensor.name for sensor in live.sensors] == ["live_streaming_sensor"]
    assert sorted(live.resources) == ["execution", "intermediates", "object_store", "unified_tables"]
    assert live.executor is None


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (
            {"pipeline": "shop_pipelines"},
            "pipeline: expected module:attribute, such as my_project.shops:pipeline, and not 'shop_pipelines'",
        ),
        ({"pipeline": "shop_pipelnes:pipeline"}, "pipeline: 'shop_pipelnes:pipeline' names a module that is not there"),
        (
            {"pipeline": "shop_pipelines:lives"},
            "shop_pipelines has no Pipeline 'lives'; did you mean 'live'?; it has pipeline, live",
        ),
        (
            {"batch": {"partitions": "shop_pipelines:pipeline"}},
            "shop_pipelines has no PartitionsDefinition 'pipeline'; it has MONTHS",
        ),
        ({"batch": {"carry_state": "maybe"}}, "expected bool, and not 'maybe'"),
        ({"batch": {"retention": {"max_bytes": "5GB"}}}, "expected int | None, and not '5GB'"),
        ({"executor": "in-process"}, "expected Literal['in_process', 'project'], and not 'in-process'"),
        (
            {"project_resources": "spark"},
            "expected list[Literal['spark', 'execution', 'intermediates']], and not 'spark'",
        ),
        ({"batch": "daily"}, "expected attributes, some of partitions, timezone, backfill_policy"),
        ({"batch": {"schedule": "0 3 * * *"}}, "some of offset, catch_up, retries, cron, running, and not '0 3 * * *'"),
        (
            {"batch": {"backfill_policy": "single_run"}},
            "backfill_policy: expected attributes, such as {type: single_run}",
        ),
        ({"batch": {"upstream": "a/b"}}, "upstream: expected assets by sources, such as {sales: exports/sales}"),
        ({"batch": {"options": "x=y"}}, "expected dict[str, str | int | float | bool], and not 'x=y'"),
        ({"batch": {"schedule": {"offset": "later"}}}, "'later' is not a duration such as 10 s, 500 ms or 2 min"),
    ],
)
def test_what_is_not_there_is_an_error_that_says_what_is(shops, attributes, message):
    with pytest.raises(ResolutionException, match="ConfigurationError") as raised:
        component(**attributes)
    assert message in str(raised.value)


def test_a_component_without_attributes_says_which_it_needs():
    with pytest.raises(
        ConfigurationError, match="there are no attributes; give at least pipeline, as module:attribute"
    ):
        UnifiedPipelineComponent.load(None, ComponentTree.for_test().load_context)


def test_an_attribute_that_there_is_not_is_an_error(shops):
    with pytest.raises(ValidationError, match="upgrade_mod"):
        component(streaming={"upgrade_mod": "savepoint"})


def test_the_package_names_its_component_and_nothing_that_is_not_there():
    assert "UnifiedPipelineComponent" in dir(dagster_unified)
    with pytest.raises(AttributeError, match="no attribute 'UnifiedPipelineComponnt'"):
        dagster_unified.UnifiedPipelineComponnt


def test_translation_and_templates_say_what_the_assets_are(shops):
    condition = "{{ dg.AutomationCondition.eager() }}"
    policy = "{{ dg.FreshnessPolicy.time_window(datetime.timedelta(hours=24)) }}"
    translation = {
        "key": "lake/{{ pipeline }}/{{ name }}",
        "group_name": "{{ 'tables' if kind == 'table' else spec.group_name }}",
        "tags": {"part": "{{ kind }}"},
    }
    definitions = built(batch={"automation_condition": condition, "freshness_policy": policy}, translation=translation)
    assets = definitions.resolve_asset_graph()
    shown = {key.to_user_string(): assets.get(key) for key in assets.get_all_asset_keys()}
    assert {name: (node.group_name, node.tags["part"]) for name, node in shown.items()} == {
        "lake/shops/files_source": ("shops", "source"),
        "lake/shops/files_stage": ("shops", "stage"),
        "lake/shops/print": ("tables", "table"),
    }
    table = shown["lake/shops/print"]
    assert table.automation_condition == AutomationCondition.eager()
    assert table.freshness_policy == FreshnessPolicy.time_window(timedelta(hours=24))


def project(folder, monkeypatch):
    """Make a project of dg, and return its package and what calls dg in it."""
    package = folder / "src" / "corner_shops"
    (package / "defs").mkdir(parents=True)
    for path in (package / "__init__.py", package / "defs" / "__init__.py"):
        path.touch()
    (package / "definitions.py").write_text(DEFINITIONS)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder / "src")
    monkeypatch.setenv("PYTHONPATH", str(folder / "src"))
    monkeypatch.setenv("DAGSTER_DG_UPDATE_CHECK_ENABLED", "0")

    def dg(*arguments):
        done = CliRunner().invoke(create_dg_cli(), arguments)
        assert done.exit_code == 0, done.output
        return done.output

    for name in [name for name in sys.modules if name.partition(".")[0] == "corner_shops"]:
        monkeypatch.delitem(sys.modules, name)
    return package, dg


def test_components_find_what_the_others_of_their_project_write(tmp_path, monkeypatch):
    package, dg = project(tmp_path, monkeypatch)
    (package / "reading.py").write_text(READING)
    for name in ("first", "second"):
        dg(
            "scaffold",
            "defs",
            "dagster_unified.UnifiedPipelineComponent",
            name,
            "--pipeline",
            f"corner_shops.reading:{name}",
        )
    with (package / "defs" / "first" / "defs.yaml").open("a") as attributes:
        attributes.write('  translation:\n    key: "lake/{{ pipeline }}/{{ name }}"\n')
    tree = ComponentTree.for_project(tmp_path)
    assets = tree.build_defs().resolve_asset_graph()
    parents = {
        key.to_user_string(): sorted(k.to_user_string() for k in assets.get(key).parent_keys)
        for key in assets.get_all_asset_keys()
    }
    assert parents["second/all_stage"] == ["lake/first/totals"]
    assert parents["lake/first/all"] == ["lake/first/totals_stage", "second/all_stage"]
    assert "second/all" not in parents


def test_dg_scaffolds_a_component_in_an_empty_project_and_loads_it(tmp_path, monkeypatch):
    package, dg = project(tmp_path, monkeypatch)
    dg("scaffold", "defs", "dagster_unified.UnifiedPipelineComponent", "totals")
    scaffolded = package / "defs" / "totals" / "defs.yaml"
    assert yaml.safe_load(scaffolded.read_text()) == {
        "type": "dagster_unified.UnifiedPipelineComponent",
        "attributes": {"pipeline": "corner_shops.defs.totals.pipeline:pipeline"},
    }
    scaffolded.write_text(scaffolded.read_text() + "  streaming:\n    upgrade_mode: savepoint\n")
    (package / "shops.py").write_text(SHOPS)
    dg("scaffold", "defs", "dagster_unified.UnifiedPipelineComponent", "shops", "--pipeline", "corner_shops.shops:live")
    assert "All definitions loaded successfully" in dg("check", "defs")
