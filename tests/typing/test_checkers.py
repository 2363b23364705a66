"""Both checkers agree with the files of this folder."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def check(*command):
    run = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_mypy_agrees():
    check("mypy", "tests/typing")


def test_pyright_agrees(monkeypatch):
    monkeypatch.setitem(os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS", "1")
    check("pyright", "--pythonpath", sys.executable)
