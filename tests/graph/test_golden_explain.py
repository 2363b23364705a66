"""`explain` of a pipeline with side outputs, a union and columns, against texts in `golden/` that a person can review.

To renew them after a deliberate change: `UPDATE_GOLDEN=1 pytest tests/graph/test_golden_explain.py`, then read the
diff.
"""

import os
import re
from pathlib import Path

import pytest

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
