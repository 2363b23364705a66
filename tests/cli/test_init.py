"""`init`: a project that runs as it is."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from deltalake import DeltaTable
from packaging.requirements import Requirement

from dagster_unified.cli import main

BIN = Path(sys.executable).parent


def init(name):
    with pytest.raises(SystemExit) as ended:
        main(["init", name])
    return ended.value.code


@pytest.mark.spark
def test_a_new_project_runs_tests_itself_and_is_what_dagster_loads(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    assert init("corner-shops") == 0
    assert (
        capsys.readouterr().out
        == "corner-shops is there. Next: cd corner-shops && dagster-unified run corner_shops.pipeline\n"
    )
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
def test_a_new_project_has_a_name_that_pip_takes(tmp_path, monkeypatch, folder, name):
    monkeypatch.chdir(tmp_path)
    assert init(folder) == 0
    assert tomllib.loads((tmp_path / folder / "pyproject.toml").read_text())["project"]["name"] == name
    assert str(Requirement(name)) == name


def test_a_folder_with_something_in_it_is_left_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shops").mkdir()
    (tmp_path / "shops" / "mine.txt").touch()
    assert init("shops") == 2
    assert "init: shops is there and not empty; give the name of a new folder" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "shops").iterdir()] == ["mine.txt"]


def test_a_name_that_no_package_can_have_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("2024", "über-laden", "class"):
        assert init(name) == 2
        assert f"init: {name!r} is not the name of a project; use letters from a to z" in capsys.readouterr().err
    for name in ("json", "dagster", "sys"):
        assert init(name) == 2
        assert f"init: Python has a module {name} already" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
