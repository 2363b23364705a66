"""The examples in docstrings run as they stand, in the harness.

They begin with the code at the top of the reference's first page.
"""

import doctest
import importlib
import inspect
import pkgutil
import re
import sys
import types
from pathlib import Path

import pytest

import dagster_unified.api
import dagster_unified.api.types
import dagster_unified.api.windows
import dagster_unified.connectors
import dagster_unified.testing
from tests.docs.reference import OUTLINES

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "api.md"
PUBLIC = (
    dagster_unified.api,
    dagster_unified.api.types,
    dagster_unified.api.windows,
    dagster_unified.connectors,
    dagster_unified.testing,
)


def exported():
    for package in PUBLIC:
        for name in package.__all__:
            value = getattr(package, name)
            if not isinstance(value, int):
                yield name, value


def examples():
    modules = {
        f.name
        for package in PUBLIC
        for f in pkgutil.iter_modules(getattr(package, "__path__", ()), f"{package.__name__}.")
    }
    modules |= {value.__module__ for _, value in exported()}
    modules |= {"dagster_unified.state.savepoint", "dagster_unified.operators.functions.iterations"}
    finder = doctest.DocTestFinder(exclude_empty=True)
    for name in sorted(modules):
        for test in finder.find(importlib.import_module(name), name):
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


def described(value):
    """The docstrings of something public: its own, and those of its methods."""
    kind = value if inspect.isroutine(value) or inspect.isclass(value) else type(value)
    members = vars(kind).values() if inspect.isclass(kind) else ()
    return [inspect.getdoc(one) or "" for one in (kind, *members)]


@pytest.mark.parametrize(("name", "value"), [pytest.param(*each, id=each[0]) for each in exported()])
def test_what_is_public_has_an_example_or_says_where_there_is_one(name, value):
    docs = described(value)
    if not any(">>>" in text for text in docs):
        elsewhere = re.search(r"example at\s+`([\w.]+)`", docs[0])
        assert elsewhere is not None, f"{name} has no example"
        where, *member = elsewhere[1].split(".")
        (shown,) = {getattr(package, where) for package in PUBLIC if hasattr(package, where)}
        for part in member:
            shown = getattr(shown, part)
        assert any(">>>" in text for text in described(shown)), f"{elsewhere[1]} has no example"


def test_what_is_public_is_on_a_page_of_the_reference():
    pages = "".join(outline.read_text() for outline in OUTLINES.iterdir())
    listed = {
        *re.findall(r"^        - (\w+)$", pages, re.MULTILINE),
        *re.findall(r"dagster_unified\.api\.(\w+)", pages),
    }
    of_testing = set(dagster_unified.testing.__all__)
    assert {name for name, _ in exported()} - of_testing - listed == set()
