"""A stage's fingerprint changes with what the stage does, and with nothing else."""

import os
import subprocess
import sys
from typing import NamedTuple

import pytest

from dagster_unified.api import CollectionSource, FileSink, Pipeline
from dagster_unified.graph.code import fingerprint
from dagster_unified.records import record_type

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def module(tmp_path, monkeypatch, text, name="user_code"):
    """A module of the author's, freshly imported."""
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return __import__(name)


CHANGES = {
    "bytecode": ("def f(v): return v + 1", "def f(v): return v - 1"),
    "constant": ("def f(v): return v + 1", "def f(v): return v + 2"),
    "default": ("def f(v, by=1): return v", "def f(v, by=2): return v"),
    "keyword default": ("def f(v, *, by=1): return v", "def f(v, *, by=2): return v"),
    "closure": ("def m(n): return lambda v: v + n\nf = m(1)", "def m(n): return lambda v: v + n\nf = m(2)"),
    "global constant": ("G = 1\ndef f(v): return v + G", "G = 2\ndef f(v): return v + G"),
    "global dict": ("G = {1: 2}\ndef f(v): return G[v]", "G = {1: 3}\ndef f(v): return G[v]"),
    "global helper": ("def g(v): return 1\ndef f(v): return g(v)", "def g(v): return 2\ndef f(v): return g(v)"),
    "helper of a helper": ("def h(): return 1\ndef g(): return h()\ndef f(v): return g()", "def h(): return 2\ndef g(): return h()\ndef f(v): return g()"),
    "nested function": ("def f(v): return [w + 1 for w in v]", "def f(v): return [w + 2 for w in v]"),
    "method": ("class F:\n def map(self, v): return 1\nf = F()", "class F:\n def map(self, v): return 2\nf = F()"),
    "attribute": ("class F:\n def __init__(self, n): self.n = n\nf = F(1)", "class F:\n def __init__(self, n): self.n = n\nf = F(2)"),
    "class attribute": ("class F:\n n = 1\nf = F()", "class F:\n n = 2\nf = F()"),
    "class attribute, dict": ("class F:\n n = {1: 2}\nf = F()", "class F:\n n = {1: 3}\nf = F()"),
    "class attribute, timedelta": ("from datetime import timedelta\nclass F:\n n = timedelta(1)\nf = F()", "from datetime import timedelta\nclass F:\n n = timedelta(2)\nf = F()"),
    "property": ("class F:\n @property\n def n(self): return 1\nf = F()", "class F:\n @property\n def n(self): return 2\nf = F()"),
    "base class": ("class B:\n def n(self): return 1\nclass F(B): pass\nf = F()", "class B:\n def n(self): return 2\nclass F(B): pass\nf = F()"),
    "partial": ("from functools import partial\ndef g(n, v): return v\nf = partial(g, 1)", "from functools import partial\ndef g(n, v): return v\nf = partial(g, 2)"),
    "slots": (
        "class S:\n __slots__ = ('n',)\n def __init__(self, n): self.n = n\nG = [S(1), S(2)]\ndef f(v): return G",
        "class S:\n __slots__ = ('n',)\n def __init__(self, n): self.n = n\nG = [S(1), S(3)]\ndef f(v): return G",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_functions_fingerprint_changes_with(change, tmp_path, monkeypatch):
    before, after = (fingerprint(module(tmp_path, monkeypatch, text).f) for text in CHANGES[change])
    assert before != after


def test_a_function_reached_through_its_module_counts(tmp_path, monkeypatch):
    def with_helper(text):
        module(tmp_path, monkeypatch, text, "user_helpers")
        return fingerprint(module(tmp_path, monkeypatch, "import user_helpers\ndef f(v): return user_helpers.rate(v)").f)

    assert with_helper("def rate(v): return 1") != with_helper("def rate(v): return 2")


@pytest.mark.parametrize(
    ("before", "after"),
    [("def f(v): return v + 1", "\n\n# a remark\ndef f(v):\n    return v + 1"), ("G = 1\ndef f(v): return v", "G = 2\ndef f(v): return v")],
    ids=["layout and remarks", "a global that is not used"],
)
def test_what_a_function_does_not_depend_on_leaves_its_fingerprint(before, after, tmp_path, monkeypatch):
    assert fingerprint(module(tmp_path, monkeypatch, before).f) == fingerprint(module(tmp_path, monkeypatch, after).f)


class Row(NamedTuple):
    key: str
    value: int


class WideRow(NamedTuple):
    key: str
    value: int
    note: str = ""


class RealRow(NamedTuple):
    key: str
    value: float


def marks(row=Row, data=(("a", 1),), step=lambda r: r, key="key", options=None, reduce=True):
    """The fingerprints of `rows` → key_by → sink."""
    pipeline = Pipeline("p")
    stream = pipeline.from_source(CollectionSource("rows", record_type(row), tuple(row(*d) for d in data))).map(step, row).name("step")
    keyed = stream.key_by(key)
    (keyed.max("value") if reduce else keyed.max_by("value")).name("last").sink_to(FileSink("/tables/x"))
    return {r.name: r.fingerprint for r in pipeline.plan(options).regions}


def test_the_same_pipeline_has_the_same_fingerprints():
    assert marks() == marks()


@pytest.mark.parametrize(
    "changed",
    [{"row": WideRow}, {"row": RealRow}, {"data": (("a", 2),)}, {"step": lambda r: r._replace(value=0)}, {"options": {"execution.incremental-updates": True}}],
    ids=["a field", "a type", "the input", "the code", "the configuration"],
)
def test_a_change_upstream_changes_every_stage_after_it(changed):
    before, after = marks(), marks(**changed)
    assert [before[name] != after[name] for name in before] == [True, True]


def test_a_change_downstream_leaves_the_stages_before_it():
    before, after = list(marks().values()), list(marks(reduce=False).values())
    assert [b == a for b, a in zip(before, after, strict=True)] == [True, False]


@pytest.mark.parametrize("seed", ["1", "77"])
def test_another_process_with_another_hash_seed_finds_the_same_fingerprints(seed):
    program = "import json; from tests.graph.golden_pipeline import build; print(json.dumps([r.fingerprint for r in build().plan().regions]))"
    from tests.graph.golden_pipeline import build

    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str([r.fingerprint for r in build().plan().regions]).replace("'", '"')
