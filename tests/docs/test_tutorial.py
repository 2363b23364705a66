"""The tutorial's pipeline, as the page has it, on a slice of the real flights.

It gives the same tables in both modes, and the numbers on the page.
"""

import importlib
import re
import sys
from pathlib import Path

import pytest
from deltalake import DeltaTable

from jobs.data import flights_csv

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
TABLES = ("carrier_delays", "returns", "idle_aircraft")
BROKEN = "2013,12,31,soon"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The file of the page's blocks, and the year of a few aircraft that were away for long."""
    folder = tmp_path_factory.mktemp("tutorial")
    (folder / "flights.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)))
    data = flights_csv(folder / "data")
    header, *lines = data.read_text().splitlines()
    kept = [line for line in lines if line.split(",")[11] in ("D942DN", "N725MQ", "N24211")]
    data.write_text("\n".join([header, *kept, BROKEN]) + "\n")
    return folder


@pytest.fixture(scope="module")
def pipeline(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        yield importlib.import_module("flights").pipeline
        del sys.modules["flights"]


def test_both_modes_end_with_the_tutorials_tables(pipeline, folder, run_on_spark, run_streaming):
    run_on_spark(pipeline)
    in_batch = tables(folder)
    assert len(in_batch["carrier_delays"]) == 3
    idle = {(row["tail"], row["last_seen"].date().isoformat(), row["dest"]) for row in in_batch["idle_aircraft"]}
    assert {("D942DN", "2013-02-11", "ATL"), ("D942DN", "2013-03-24", "MCO")} <= idle
    (folder / "tables").rename(folder / "tables of BATCH")
    assert run_streaming(pipeline) == "finished"
    assert tables(folder) == in_batch


def test_the_pipeline_has_the_stages_that_the_page_names(pipeline):
    assert [stage.name for stage in pipeline.plan().regions] == ["flights", *TABLES[:2]]


def tables(folder):
    return {
        name: sorted(DeltaTable(str(folder / "tables" / name)).to_pyarrow_table().to_pylist(), key=str)
        for name in TABLES
    }
