"""A stage's fingerprint changes with what the stage does, and with nothing else."""

import json
import os
import subprocess
import sys
from datetime import timedelta
from typing import NamedTuple

import pytest

from dagster_unified.api import Pipeline, WatermarkStrategy
from dagster_unified.connectors import CollectionSource, FileSink
from dagster_unified.graph.fingerprint import fingerprint, fingerprint_of
from dagster_unified.graph.upgrade import changes, deployed_code

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def module(tmp_path, monkeypatch, text, name="user_code"):
    """A module of the author's, freshly imported."""
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return __import__(name)


CHANGES = {
    "bytecode": ("def f(v): return v § 1", "+", "-"),
    "constant": ("def f(v): return v + §", "1", "2"),
    "default": ("def f(v, by=§): return v", "1", "2"),
    "keyword default": ("def f(v, *, by=§): return v", "1", "2"),
    "closure": ("def m(n): return lambda v: v + n\nf = m(§)", "1", "2"),
    "global constant": ("G = §\ndef f(v): return v + G", "1", "2"),
    "global dict": ("G = {1: §}\ndef f(v): return G[v]", "2", "3"),
    "global helper": ("def g(v): return §\ndef f(v): return g(v)", "1", "2"),
    "helper of a helper": ("def h(): return §\ndef g(): return h()\ndef f(v): return g()", "1", "2"),
    "nested function": ("def f(v): return [w + § for w in v]", "1", "2"),
    "method": ("class F:\n def map(self, v): return §\nf = F()", "1", "2"),
    "attribute": ("class F:\n def __init__(self, n): self.n = n\nf = F(§)", "1", "2"),
    "class attribute": ("class F:\n n = §\nf = F()", "1", "2"),
    "class attribute, dict": ("class F:\n n = {1: §}\nf = F()", "2", "3"),
    "class attribute, timedelta": ("from datetime import timedelta\nclass F:\n n = timedelta(§)\nf = F()", "1", "2"),
    "property": ("class F:\n @property\n def n(self): return §\nf = F()", "1", "2"),
    "base class": ("class B:\n def n(self): return §\nclass F(B): pass\nf = F()", "1", "2"),
    "partial": ("from functools import partial\ndef g(n, v): return v\nf = partial(g, §)", "1", "2"),
    "operator method": ("class F:\n def __add__(self, v): return §\nf = F()", "1", "2"),
    "function's attribute": ("def f(v): return f.rate\nf.rate = §", "1", "2"),
    "order of a dict": ("G = {§}\ndef f(v): return G", "1: 2, 3: 4", "3: 4, 1: 2"),
    "global set": ("G = {1, §}\ndef f(v): return v in G", "2", "3"),
    "bound builtin": ("S = {1, §}\nG = S.__contains__\ndef f(v): return G(v)", "2", "3"),
    "generic alias": ("G = dict[str, §]\ndef f(v): return G", "int", "float"),
    "logger": ("import logging\nG = logging.getLogger('§')\ndef f(v): G.info(v)", "a", "b"),
    "end of a long pattern": ("import re\nG = re.compile('a' * 300 + '§')\ndef f(v): return G", "b", "c"),
    "numpy array": ("import numpy as np\nG = np.arange(5000)\n§def f(v): return G[v]", "", "G[2500] = 0\n"),
    "struct's default": ("import msgspec\nclass S(msgspec.Struct):\n x: int = §\ndef f(v): return S()", "1", "2"),
    "enum's value": ("import enum\nclass E(enum.Enum):\n A = §\ndef f(v): return E.A", "1", "2"),
    "cached function": ("import functools\n@functools.cache\ndef g(v): return v + §\ndef f(v): return g(v)", "1", "2"),
    "what a cache starts from": ("G = {0: §}\ndef f(v):\n G[v] = v\n return G", "1", "2"),
    "how an open file is opened": ("import os\nG = open(os.devnull§)\ndef f(v): return G", "", ", 'rb'"),
    "attribute that a setter set": (
        "class F:\n n = 0\n def with_n(self, n):\n  self.n = n\n  return self\n def __call__(self, v): return self.n\n"
        "f = F().with_n(§)",
        "1",
        "2",
    ),
    "installed object": ("import string\nG = string.Template('§')\ndef f(v): return G", "a", "b"),
    "state descriptor": (
        "from dagster_unified.api import ValueStateDescriptor as V\nG = V('a', list[§])\ndef f(v): return G",
        "int",
        "float",
    ),
    "slots": (
        "class S:\n __slots__ = ('n',)\n def __init__(self, n): self.n = n\nG = [S(1), S(§)]\ndef f(v): return G",
        "2",
        "3",
    ),
}
"""Code with one place, and what is there before and after."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_functions_fingerprint_changes_with(change, tmp_path, monkeypatch):
    code, *parts = CHANGES[change]
    before, after = (fingerprint(module(tmp_path, monkeypatch, code.replace("§", part)).f) for part in parts)
    assert before != after


@pytest.mark.parametrize(
    "using",
    [
        "import user_helpers\ndef f(v): return user_helpers.rate(v)",
        "def f(v):\n from user_helpers import rate\n return rate(v)",
    ],
)
def test_a_helpers_module_counts_wherever_it_is_imported(using, tmp_path, monkeypatch):
    def with_helper(text):
        (tmp_path / "user_helpers.py").write_text(text)
        monkeypatch.delitem(sys.modules, "user_helpers", raising=False)
        return fingerprint(module(tmp_path, monkeypatch, using).f)

    assert with_helper("def rate(v): return 1") != with_helper("def rate(v): return 2")


def test_a_fingerprint_says_where_its_parts_come_from(tmp_path, monkeypatch):
    text = (
        "import logging\nLOG = logging.getLogger('a')\nRATES = {1: %s}\ndef rate(v): return RATES[v]\ndef f(v): return"
        " rate(v)"
    )
    before, after = (fingerprint_of(module(tmp_path, monkeypatch, text % n).f).parts for n in (2, 3))
    assert set(before) == {"user_code.f", "user_code.rate", "user_code.RATES"}
    assert [place for place in before if before[place] != after[place]] == ["user_code.RATES"]


def test_a_class_that_names_the_type_that_changed_elsewhere_has_not_changed(tmp_path, monkeypatch):
    text = (
        "from typing import NamedTuple\nKIND = %s\nclass Out(NamedTuple):\n total: float\ndef f(v): return Out(KIND(v))"
    )
    before, after = (fingerprint_of(module(tmp_path, monkeypatch, text % kind).f).parts for kind in ("int", "float"))
    assert [place for place in before if before[place] != after[place]] == ["user_code.f"]


def test_what_cannot_be_told_is_left_out_and_named(tmp_path, monkeypatch):
    text = (
        "import itertools, os\nNUMBERS = itertools.count()\nFILE = open(os.devnull)\ndef f(v): return FILE.read(),"
        " next(NUMBERS)"
    )
    assert fingerprint_of(module(tmp_path, monkeypatch, text).f).left_out == {
        "user_code.FILE": "a _io.TextIOWrapper",
        "user_code.NUMBERS": "a itertools.count, which changes when it is read",
    }


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("def f(v): return v + 1", "\n\n# a remark\ndef f(v):\n    return v + 1"),
        ("G = 1\ndef f(v): return v", "G = 2\ndef f(v): return v"),
    ],
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
    stream = pipeline.from_source(CollectionSource([row(*d) for d in data], row, "rows")).map(step, row).name("step")
    keyed = stream.key_by(key)
    (keyed.max("value") if reduce else keyed.max_by("value")).name("last").sink_to(FileSink("/tables/x"))
    return {r.name: r.fingerprint for r in pipeline.plan(options).regions}


def test_the_same_pipeline_has_the_same_fingerprints():
    assert marks() == marks()


@pytest.mark.parametrize(
    "changed",
    [
        {"row": WideRow},
        {"row": RealRow},
        {"data": (("a", 2),)},
        {"step": lambda r: r._replace(value=0)},
        {"options": {"execution.incremental-updates": True}},
    ],
    ids=["a field", "a type", "the input", "the code", "the configuration"],
)
def test_a_change_upstream_changes_every_stage_after_it(changed):
    before, after = marks(), marks(**changed)
    assert [before[name] != after[name] for name in before] == [True, True]


def test_the_bound_of_a_watermark_strategy_is_part_of_a_deployment():
    def code(seconds):
        pipeline = Pipeline("p")
        strategy = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(seconds=seconds)).with_timestamp_assigner(
            "value"
        )
        pipeline.from_collection([Row("a", 1)]).assign_timestamps_and_watermarks(strategy).name("times").uid(
            "times"
        ).print()
        return deployed_code(pipeline.plan())

    assert changes(code(1), code(1)) == []
    assert changes(code(1), code(2)) == ["operator 'times'"]


def test_a_change_downstream_leaves_the_stages_before_it():
    before, after = list(marks().values()), list(marks(reduce=False).values())
    assert [b == a for b, a in zip(before, after, strict=True)] == [True, False]


@pytest.mark.parametrize("seed", ["1", "77"])
def test_another_process_with_another_hash_seed_finds_the_same_fingerprints(seed):
    program = (
        "import json; from tests.graph.golden_pipeline import build; print(json.dumps([r.fingerprint for r in"
        " build().plan().regions]))"
    )
    from tests.graph.golden_pipeline import build

    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == str([r.fingerprint for r in build().plan().regions]).replace("'", '"')


PROGRAM = """
import json, sys
from tests.graph import reachable
from dagster_unified.graph.fingerprint import fingerprint
if sys.argv[1] == "worked":
    reachable.work()
found = {name: fingerprint(function) for name, function in reachable.FUNCTIONS.items()}
again = {name: fingerprint(function) for name, function in reachable.FUNCTIONS.items()}
print(json.dumps([found, again]))
"""


@pytest.fixture(scope="module")
def taken():
    """The fingerprints of three fresh processes, each taken twice."""

    def begin(seed, what):
        command = [sys.executable, "-c", PROGRAM, what]
        return subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True
        )

    started = [begin("1", "fresh"), begin("77", "fresh"), begin("5", "worked")]
    outputs = [process.communicate()[0] for process in started]
    return [found for output in outputs for found in json.loads(output)]


def names():
    from tests.graph.reachable import FUNCTIONS

    return list(FUNCTIONS)


@pytest.mark.parametrize("name", names())
def test_every_process_finds_the_same_fingerprint_of(name, taken):
    assert len({found[name] for found in taken}) == 1
