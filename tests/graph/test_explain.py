"""What `explain` prints, held against texts that a person can read: see `golden/`."""

import json
from pathlib import Path

import pytest

from tests.graph.example import pipeline

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize(("format", "file"), [("text", "example.txt"), ("mermaid", "example.mmd")])
def test_explain_prints_what_the_golden_file_holds(format, file):
    assert pipeline().explain(format=format) + "\n" == (GOLDEN / file).read_text()


def test_explain_as_json_gives_tasks_exchanges_and_regions():
    plan = json.loads(pipeline().explain(format="json"))
    assert [r["name"] for r in plan["regions"]] == ["big", "totals", "table"]
    assert [(e["kind"], e["blocking"]) for e in plan["exchanges"]] == [("HASH", True), ("HASH", True)]
    assert plan["tasks"][1]["names"] == ["Follow", "totals"]
    assert plan["operators"][4]["state"] == [{"name": "seen", "kind": "value"}]
    assert {f["rule"] for f in plan["lint"]} >= {"order"}
