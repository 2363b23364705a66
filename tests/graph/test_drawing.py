"""The picture of a plan, as an SVG that a browser and any XML parser reads."""

from typing import NamedTuple
from xml.etree import ElementTree

from dagster_unified.api import Pipeline
from dagster_unified.graph.drawing import as_svg
from tests.graph.golden_pipeline import build

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
