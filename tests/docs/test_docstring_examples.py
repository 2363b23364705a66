"""The examples in docstrings run as they stand, in the harness.

They begin with the code at the top of the reference's first page.
"""

import doctest
import importlib
import pkgutil
import re
import sys
import types
from pathlib import Path

import pytest

import dagster_unified.api
import dagster_unified.testing

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "api.md"


def examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    for package in (dagster_unified.api, dagster_unified.testing):
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(found.name)
            for test in finder.find(module, module.__name__):
                if test.examples:
                    yield pytest.param(test, id=test.name.removeprefix("dagster_unified."))


@pytest.mark.parametrize("test", examples())
def test_the_example_gives_what_it_says(test, monkeypatch):
    module = types.ModuleType("example")  # where the types that an example defines are looked up
    monkeypatch.setitem(sys.modules, "example", module)
    exec(re.search(r"```python\n(.*?)```", REFERENCE.read_text(), re.DOTALL)[1], vars(module))
    test.globs = vars(module)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    said = []
    assert runner.run(test, out=said.append).failed == 0, "".join(said)
