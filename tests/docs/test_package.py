"""The wheel, installed into an environment of its own, runs the README's pipeline.

It does so from a folder that holds nothing else.
"""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    _uv("build", "--wheel", "--out-dir", str(folder), str(ROOT))
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_library_and_its_license_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"dagster_unified"}
    assert "License-Expression: Apache-2.0" in metadata
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert "dagster_unified/py.typed" in names


@pytest.mark.rotates("processes")
@pytest.mark.spark
def test_the_readmes_pipeline_runs_from_an_empty_folder_in_an_empty_environment(wheel, tmp_path):
    readme = (ROOT / "README.md").read_text()
    program = re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1]
    expected = re.search(r"```text\n(.*?)```", readme, re.DOTALL)[1]
    environment, folder = tmp_path / "environment", tmp_path / "empty"
    _uv("venv", "--quiet", "--python", sys.executable, str(environment))
    _uv(
        "pip",
        "install",
        "--quiet",
        "--python",
        str(environment / "bin" / "python"),
        "--constraint",
        str(ROOT / "requirements.lock"),
        str(wheel),
    )
    folder.mkdir()
    (folder / "shops.py").write_text(program)
    kept = {
        name: os.environ[name]
        for name in ("HOME", "JAVA_HOME", "PATH", "SPARK_SUBMIT_OPTS", "TMPDIR")
        if name in os.environ
    }
    command = [str(environment / "bin" / "dagster-unified"), "run", "shops.py"]
    done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("print> ")) == sorted(
        expected.splitlines()
    )


def _uv(*arguments):
    """Run uv on what its cache holds from the installation of this environment.

    Where that is not enough, it asks the package index.
    """
    done = subprocess.run([str(UV), *arguments, "--offline"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        done = subprocess.run([str(UV), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
