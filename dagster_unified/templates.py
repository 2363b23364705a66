"""The files of a new project, or a new component: text by path. Runs nothing."""

from __future__ import annotations

import re

_PIPELINE = '''"""Totals of sales, by shop."""

from typing import NamedTuple

{imports}


class Sale(NamedTuple):
    shop: str
    amount: int


def add(a: Sale, b: Sale) -> Sale:
    return Sale(a.shop, a.amount + b.amount)


pipeline = Pipeline("{name}")
sales = {source}
totals = sales.key_by("shop").reduce(add).name("totals")
totals.{sink}
'''


def pipeline_over_files(name: str) -> str:
    """From CSV files in `data/sales` to a Delta table."""
    return _PIPELINE.format(
        name=name,
        imports="from dagster_unified.api import Pipeline\nfrom dagster_unified.connectors import CsvSource, DeltaSink",
        source='pipeline.from_source(CsvSource("data/sales", Sale, name="sales"))',
        sink='sink_to(DeltaSink("data/totals", mode="upsert", key="shop", name="totals"))',
    )


def pipeline_over_literals(name: str) -> str:
    """From records in the program to standard output: it needs no data."""
    return _PIPELINE.format(
        name=name,
        imports="from dagster_unified.api import Pipeline",
        source='pipeline.from_collection([Sale("north", 3), Sale("south", 5), Sale("north", 4)])',
        sink="print()",
    )


_DEFINITIONS = '''"""The code location: what `dagster dev` loads."""

from dagster_unified.orchestration import unified_definitions
from {name}.pipeline import pipeline

defs = unified_definitions(pipeline)
'''

_TEST = '''"""The pipeline over literal input, in both modes, with no JVM."""

from dagster_unified.api import Pipeline
from dagster_unified.testing import assert_same_in_both_modes, run_pipeline
from {name}.pipeline import Sale, add


def test_a_shop_has_the_sum_of_its_sales():
    pipeline = Pipeline("test")
    pipeline.from_collection([Sale("north", 3), Sale("north", 4)]).key_by("shop").reduce(add).print()
    assert run_pipeline(pipeline, "BATCH").only() == [Sale("north", 7)]
    assert_same_in_both_modes(pipeline)
'''

_PYPROJECT = """[project]
name = "{distribution}"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["dagster-unified", "dagster-webserver"]

[dependency-groups]
dev = ["pytest"]

[tool.dagster]
module_name = "{name}.definitions"

[tool.pytest.ini_options]
pythonpath = ["."]
"""

_README = """# {project}

| command | what it does |
|---|---|
| `dagster-unified run {name}.pipeline` | runs the pipeline in BATCH, through Dagster |
| `dagster-unified explain {name}.pipeline` | shows its stages before anything runs |
| `dagster-unified run {name}.pipeline -D execution.runtime-mode=STREAMING` | runs it as a stream, to its end |
| `dagster dev` | shows it in Dagster's UI |
| `pytest` | tests it, with no JVM |

The last two are packages of their own: `pip install dagster-webserver pytest`.
"""

_SALES = "shop,amount\nnorth,3\nsouth,5\nnorth,4\n"

_IGNORED = "__pycache__/\n.dagster_unified/\n.dagster_home/\n.tmp_dagster_home*/\ndata/totals/\n"


def project_files(package: str, project: str) -> dict[str, str]:
    """The files of a new project: text by path."""
    templates = {
        f"{package}/__init__.py": "",
        f"{package}/definitions.py": _DEFINITIONS,
        f"tests/test_{package}.py": _TEST,
        "pyproject.toml": _PYPROJECT,
        "_README.md": _README,
        "data/sales/2024-01-01.csv": _SALES,
        ".gitignore": _IGNORED,
    }
    distribution = re.sub("_+", "-", package).strip("-")  # not every folder's name is one that pip takes
    names = {"name": package, "project": project, "distribution": distribution}
    written = {place: text.format(**names) for place, text in templates.items()}
    return {**written, f"{package}/pipeline.py": pipeline_over_files(package)}
