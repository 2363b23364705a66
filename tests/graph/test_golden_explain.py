"""`explain` and the picture of a pipeline, against texts in `golden/` that a person can review.

To renew them after a deliberate change: `UPDATE_GOLDEN=1 pytest tests/graph/test_golden_explain.py`, then read the
diff.
"""

import os
import re
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from dagster_unified.api import Pipeline
from dagster_unified.graph.drawing import as_svg
from tests.graph.golden_pipeline import build

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize(
    ("file", "format", "options"),
    [
        ("visits.txt", "text", {}),
        ("visits_streaming.txt", "text", {"execution.runtime-mode": "STREAMING"}),
        ("visits_pipelined.txt", "text", {"execution.batch-shuffle-mode": "ALL_EXCHANGES_PIPELINED"}),
        ("visits.mmd", "mermaid", {}),
        ("visits.json", "json", {}),
        ("visits_physical.txt", "physical", {}),
        ("visits_physical_streaming.txt", "physical", {"execution.runtime-mode": "STREAMING"}),
    ],
)
def test_explain_prints_the_golden_text(file, format, options, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    shown = re.sub(r'"fingerprint": "\w{16}"', '"fingerprint": "…"', build().explain(options, format)) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        (GOLDEN / file).write_text(shown)
    assert shown == (GOLDEN / file).read_text()


def test_an_unknown_format_is_an_error_that_lists_the_known_ones():
    with pytest.raises(Exception, match="explain knows the formats text, mermaid, json, physical, not 'svg'"):
        build().explain(format="svg")


SVG = "{http://www.w3.org/2000/svg}"


def texts(drawn):
    return [t.text for t in drawn.iter(f"{SVG}text")]


def test_each_stage_is_a_box_with_its_operators_and_each_barrier_an_arrow():
    plan = build().plan()
    drawn = ElementTree.fromstring(as_svg(plan, plan.region("totals")))
    assert texts(drawn)[:3] == ["by city", "by city", "RESCALE"]
    assert texts(drawn)[-5:] == ["rolled", "reduce rolled", "long", "filter long", "sink rolled"]
    boxes = [r for r in drawn.iter(f"{SVG}rect") if r.get("rx")]
    assert len(boxes) == 4
    assert [r.get("fill") == "#e6e4fa" for r in boxes] == [False, True, False, False]
    assert not any(_overlap(a, b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_names_that_xml_would_read_as_its_own_are_shown_as_they_are():
    class Amount(NamedTuple):
        n: int

    pipeline = Pipeline("p")
    pipeline.from_collection([Amount(1)], name="a < b & c").print()
    plan = pipeline.plan()
    assert "source a < b & c" in texts(ElementTree.fromstring(as_svg(plan, plan.regions[0])))


def _overlap(one, other):
    def spans(box, start, size):
        return float(box.get(start)), float(box.get(start)) + float(box.get(size))

    return all(
        a[0] < b[1] and b[0] < a[1]
        for a, b in ((spans(one, *axis), spans(other, *axis)) for axis in (("x", "width"), ("y", "height")))
    )
