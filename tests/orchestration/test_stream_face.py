"""The picture and the table of a running stream, from its last epochs and the watermarks of its operators."""

import base64
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from dagster_unified.api import Pipeline, WatermarkStrategy
from dagster_unified.connectors import CsvSource, DeltaSink
from dagster_unified.engine.events import EpochCommitted, Written
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.control import ControlFile
from dagster_unified.operators.drivers.key_groups import ControlEvent
from dagster_unified.operators.metrics import Metrics
from dagster_unified.operators.time import MAX_TIMESTAMP
from dagster_unified.orchestration.stream_face import Committed, StreamFace

SVG = "{http://www.w3.org/2000/svg}"
NOON = 1_706_702_400_000


class Sale(NamedTuple):
    shop: str
    at: int
    amount: int


@pytest.fixture
def shops(tmp_path):
    pipeline = Pipeline("shops")
    in_time = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
    sales = pipeline.from_source(CsvSource("in", Sale, name="sales", monitor=True), in_time)
    totals = sales.key_by("shop").reduce(lambda a, b: a).name("total")
    totals.sink_to(DeltaSink("totals", mode="upsert", key="shop")).name("totals")
    totals.filter(lambda sale: sale.amount > 9).name("large").sink_to(DeltaSink("large")).name("large ones")
    plan = pipeline.plan({"execution.runtime-mode": "STREAMING"})
    return plan, CheckpointDirectory(str(tmp_path), "shops")


def epoch(number, at, rows, watermark=None, **more):
    written = {"totals": Written(rows, 10), "large ones": Written(0, 0)}
    return Committed(EpochCommitted("main", number, rows, 0.5, watermark, Metrics(), written, **more), at)


def drawn(metadata):
    svg = base64.b64decode(metadata["operators"].value.partition("base64,")[2].rstrip(")"))
    return [text.text.replace("\xa0", " ") for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_each_operator_says_what_is_known_of_it(shops):
    plan, directory = shops
    (total,) = [node for node in plan.graph.nodes if node.name == "total"]
    control = ControlFile(str(directory.path / "control/main"))
    control.write(ControlEvent(1, watermarks={total.uid: NOON - 4_000, "gone": 1}))
    (sales,) = [node.uid for node in plan.graph.sources]
    epochs = [
        epoch(6, NOON - 300_000, 9_999, read={sales: 9_999}),
        epoch(7, NOON - 9_500, 1_000, read={sales: 700, "other": 300}),
        epoch(8, NOON - 500, 500, NOON - 2_000, state_rows=3, backlog={"sales": 1_234}, read={sales: 500}),
    ]
    texts = drawn(StreamFace(plan, directory).metadata(epochs, NOON))
    header = texts[-1]
    assert header == ("main: epoch 8, 150/s read, 10% busy, watermark 2024-01-31 11:59:58, 2 s behind, 3 rows of state")
    below = {name: texts[texts.index(name) + 1 :] for name in ("source sales", "reduce total", "sink totals")}
    assert below["source sales"][:2] == ["  120/s read", "  1,234 records wait"]
    assert below["reduce total"][0] == "  watermark 2024-01-31 11:59:56, 4 s behind"
    assert below["sink totals"][0] == "  150/s written"
    assert "  0.0/s written" in texts
    assert "by shop" in texts
    filtered = texts[texts.index("filter large") + 1]
    assert not filtered.startswith(" ")


def test_rates_of_a_stream_that_rests_fall(shops):
    plan, directory = shops
    texts = drawn(StreamFace(plan, directory).metadata([epoch(6, NOON - 999_500, 1_000)], NOON))
    assert texts[-1] == "main: epoch 6, 1.0/s read, 0% busy"


def test_a_watermark_at_the_end_of_the_input_is_no_time(shops):
    plan, directory = shops
    texts = drawn(StreamFace(plan, directory).metadata([epoch(6, NOON, 0, MAX_TIMESTAMP)], NOON))
    assert texts[-1].endswith("watermark at the end")


def test_the_last_epochs_are_a_table_the_latest_first(shops):
    plan, directory = shops
    epochs = [epoch(number, NOON, number, NOON) for number in range(30)]
    table = StreamFace(plan, directory).metadata(epochs, NOON)["last epochs"]
    assert [record.data["epoch"] for record in table.records] == list(range(29, 17, -1))
    assert table.records[0].data == {
        "query": "main",
        "epoch": 29,
        "rows in": 29,
        "written": "29 to totals, 0 to large ones",
        "seconds": 0.5,
        "watermark": "2024-01-31 12:00:00+00:00",
    }


def test_tasks_are_drawn_side_by_side(shops):
    plan, directory = shops
    svg = base64.b64decode(
        StreamFace(plan, directory).metadata([epoch(1, NOON, 1)], NOON)["operators"].value.partition("base64,")[2][:-1]
    )
    boxes = [box for box in ElementTree.fromstring(svg).iter(f"{SVG}rect") if box.get("rx")]
    assert len(boxes) == len(plan.tasks)
    assert len({box.get("x") for box in boxes}) > 1
