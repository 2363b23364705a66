"""The set-ups in `deploy/` say the same: those that are run nowhere here are held against the one that is."""

from pathlib import Path

import pyspark
import pytest
import yaml

from dagster_unified import settings
from dagster_unified.graph.options import BY_KEY
from tests.deploy.units import DEPLOY, UNITS, commands, service, variables

PROGRAMS = "/opt/dagster-unified/.venv/bin/"
IMAGE = DEPLOY / "kubernetes" / "Dockerfile"


@pytest.fixture(scope="module")
def environment():
    return variables(DEPLOY / "machines" / "environment")


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"]


def test_containers_run_what_the_units_run(compose, environment):
    for unit in UNITS:
        *first, (program, *arguments) = commands(unit, environment)
        wanted = [program.removeprefix(PROGRAMS), *arguments]
        found = compose[unit.stem]["command"].split()
        elsewhere = {"127.0.0.1": "0.0.0.0", "/var/lib/dagster-unified/work": "/tmp/work"}
        assert found == [elsewhere.get(word, word) for word in wanted]
        for program, *arguments in first:
            assert [program.removeprefix(PROGRAMS), *arguments] == compose["database"]["command"].split()


def test_the_environment_is_one(compose, environment):
    (of_pods, *_) = yaml.safe_load_all((DEPLOY / "kubernetes" / "spark.yaml").read_text())
    for found in (compose["dagster-code"]["environment"], {**of_pods["data"], "SPARK_MASTER": None}):
        assert {**environment, **found}.keys() - environment.keys() <= {
            "AWS_ENDPOINT_URL", "AWS_ALLOW_HTTP", "AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY",
        }  # fmt: skip
        assert environment.keys() - found.keys() <= {"DAGSTER_HOME", "DAGSTER_DISABLE_TELEMETRY"}  # the chart's
        assert {name: value for name, value in found.items() if name in environment and value is not None}.items() <= (
            environment.items()
        )
    ours = (DEPLOY / "machines" / "spark-defaults.conf").read_text()
    jars = next(line.split()[1] for line in ours.splitlines() if line.startswith("spark.jars.packages"))
    assert f"--packages {jars} " in IMAGE.read_text()


def test_what_the_environment_sets_is_an_option(environment):
    names = {settings.environment_name(key) for key in BY_KEY} | {"DAGSTER_UNIFIED_DATA", "DAGSTER_UNIFIED_OUTPUT"}
    assert [name for name in environment if name.startswith(settings.PREFIX) and name not in names] == []


def test_values_name_what_is_beside_them():
    values = yaml.safe_load((DEPLOY / "kubernetes" / "values.yaml").read_text())
    there = {one["metadata"]["name"] for one in yaml.safe_load_all((DEPLOY / "kubernetes" / "spark.yaml").read_text())}
    launcher = values["runLauncher"]["config"]["k8sRunLauncher"]
    pod = launcher["runK8sConfig"]["podSpecConfig"]
    named = {one["name"] for one in launcher["envConfigMaps"]} | {pod["serviceAccountName"]}
    assert named | {one["configMap"]["name"] for one in pod["volumes"]} <= there


def test_the_image_of_pods_is_of_these_versions():
    image = IMAGE.read_text()
    assert f"--from=apache/spark:{pyspark.__version__} " in image
    assert "FROM python:3.11" in (DEPLOY / "compose" / "Dockerfile").read_text()
    assert f"SPARK_HOME={Path(PROGRAMS).parent}/lib/python3.11/site-packages/pyspark" in image
    files = (DEPLOY / "kubernetes" / "spark.yaml", DEPLOY / "kubernetes" / "values.yaml")
    assert [path.name for path in files if "registry.example/dagster-unified" not in path.read_text()] == []
    assert "registry.example/dagster-unified:1" in image


def test_units_run_as_nobody_special_and_are_started_again():
    for unit in UNITS:
        found = service(unit)
        assert (found["User"], found["Restart"]) == (["dagster"], ["on-failure"])
        assert found["EnvironmentFile"] == ["/etc/dagster-unified/environment", "/etc/dagster-unified/secrets"]
