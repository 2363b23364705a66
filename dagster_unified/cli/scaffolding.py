"""`init`: a new project that runs as it is. It loads neither Spark nor Dagster."""

from __future__ import annotations

import keyword
import re
import shlex
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

from dagster_unified import example
from dagster_unified.cli.terminal import out
from dagster_unified.errors import ConfigurationError

DEFINITIONS = '''"""The code location: what `dagster dev` loads."""

from dagster_unified.orchestration import unified_definitions
from {name}.pipeline import pipeline

defs = unified_definitions(pipeline)
'''

TEST = '''"""The pipeline over literal input, in both modes, with no JVM."""

from dagster_unified.api import Pipeline
from dagster_unified.testing import assert_same_in_both_modes, run_pipeline
from {name}.pipeline import Sale, add


def test_a_shop_has_the_sum_of_its_sales():
    pipeline = Pipeline("test")
    pipeline.from_collection([Sale("north", 3), Sale("north", 4)]).key_by("shop").reduce(add).print()
    assert run_pipeline(pipeline, "BATCH").only() == [Sale("north", 7)]
    assert_same_in_both_modes(pipeline)
'''

PYPROJECT = """[project]
name = "{distribution}"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["dagster-unified", "dagster-webserver"]

[tool.dagster]
module_name = "{name}.definitions"

[tool.pytest.ini_options]
pythonpath = ["."]
"""

README = """# {project}

| command | what it does |
|---|---|
| `dagster-unified run {name}.pipeline` | runs the pipeline in BATCH, through Dagster |
| `dagster-unified explain {name}.pipeline` | shows its stages before anything runs |
| `dagster-unified run {name}.pipeline -D execution.runtime-mode=STREAMING` | runs it as a stream, to its end |
| `dagster dev` | shows it in Dagster's UI |
| `pytest` | tests it, with no JVM |
"""

SALES = "shop,amount\nnorth,3\nsouth,5\nnorth,4\n"

IGNORED = "__pycache__/\n.dagster_unified/\n.dagster_home/\n.tmp_dagster_home*/\ndata/totals/\n"


def init(name: str, /) -> int:
    """Write a new project into the folder NAME.

    It has a pipeline, its data, its test, and the definitions that `dagster dev` loads.

    Parameters
    ----------
    name
        The folder to make, such as corner-shops. The package in it is corner_shops.
    """
    folder = Path(name)
    package = re.sub(r"\W", "_", folder.name).lower()
    if not re.fullmatch("[a-z][a-z0-9_]*", package) or keyword.iskeyword(package):
        raise ConfigurationError(
            f"init: {folder.name!r} is not the name of a project; use letters from a to z, digits and hyphens, such as"
            " corner-shops, and no word of Python's own"
        )
    if package in sys.stdlib_module_names or package in packages_distributions():
        raise ConfigurationError(
            f"init: Python has a module {package} already, which would be imported instead of the project's; give it"
            " another name, such as corner-shops"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(f"init: {folder} is there and not empty; give the name of a new folder")
    for place, text in files(package, folder.name).items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(text)
    out().print(
        f"{folder} is there. Next: cd {shlex.quote(str(folder))} && dagster-unified run {package}.pipeline",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def files(package: str, project: str) -> dict[str, str]:
    """What a new project consists of: text by path."""
    templates = {
        f"{package}/__init__.py": "",
        f"{package}/definitions.py": DEFINITIONS,
        f"tests/test_{package}.py": TEST,
        "pyproject.toml": PYPROJECT,
        "README.md": README,
        "data/sales/2024-01-01.csv": SALES,
        ".gitignore": IGNORED,
    }
    distribution = re.sub("_+", "-", package).strip("-")  # not every folder's name is one that pip takes
    names = {"name": package, "project": project, "distribution": distribution}
    written = {place: text.format(**names) for place, text in templates.items()}
    return {**written, f"{package}/pipeline.py": example.over_files(package)}
