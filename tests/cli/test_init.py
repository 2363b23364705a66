"""`init`: a project that runs as it is."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from deltalake import DeltaTable
from packaging.requirements import Requirement

BIN = Path(sys.executable).parent


@pytest.mark.rotates("processes")
@pytest.mark.spark
def test_a_new_project_runs_tests_itself_and_is_what_dagster_loads(cli, tmp_path, monkeypatch):
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    said = "corner-shops is there. Next: cd corner-shops && dagster-unified run corner_shops.pipeline\n"
    assert cli("init", "corner-shops") == (0, said, "")
    project = tmp_path / "corner-shops"

    def run(*command):
        done = subprocess.run(
            [str(BIN / command[0]), *command[1:]], capture_output=True, text=True, cwd=project, timeout=600, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    assert "stage 2 of 2: totals" in run("dagster-unified", "run", "corner_shops.pipeline")
    rows = DeltaTable(str(project / "data" / "totals")).to_pyarrow_table().to_pylist()
    assert sorted(tuple(row.values()) for row in rows) == [("north", 7), ("south", 5)]
    assert "1 passed" in run("python", "-m", "pytest")
    module = tomllib.loads((project / "pyproject.toml").read_text())["tool"]["dagster"]["module_name"]
    assert module == "corner_shops.definitions"
    assert "Validation successful for code location corner_shops.definitions" in run(
        "dagster", "definitions", "validate"
    )


@pytest.mark.parametrize(
    ("folder", "name"), [("My Shop", "my-shop"), ("x-y-", "x-y"), ("corner.shops", "corner-shops")]
)
def test_a_new_project_has_a_name_that_pip_takes(cli, tmp_path, folder, name):
    assert cli("init", folder)[0] == 0
    assert tomllib.loads((tmp_path / folder / "pyproject.toml").read_text())["project"]["name"] == name
    assert str(Requirement(name)) == name


def test_a_folder_with_something_in_it_is_left_alone(cli, tmp_path):
    (tmp_path / "shops").mkdir()
    (tmp_path / "shops" / "mine.txt").touch()
    code, _, err = cli("init", "shops")
    assert code == 2
    assert "init: shops is there and not empty; give the name of a new folder" in err
    assert [path.name for path in (tmp_path / "shops").iterdir()] == ["mine.txt"]


NO_NAME, TAKEN = "{name!r} is not the name of a project; use letters from a to z", "Python has a module {name} already"


@pytest.mark.parametrize(
    ("names", "says"), [(("2024", "über-laden", "class"), NO_NAME), (("json", "dagster", "sys"), TAKEN)]
)
def test_a_name_that_no_package_can_have_is_an_error(cli, tmp_path, names, says):
    for name in names:
        code, _, err = cli("init", name)
        assert (code, f"init: {says.format(name=name)}" in err) == (2, True)
    assert list(tmp_path.iterdir()) == []
