"""Records with enums on Spark: from a file, through Catalyst, a keyed function and its state, to a table."""

from collections.abc import Iterable
from enum import Enum, IntEnum
from typing import NamedTuple

import pytest
from deltalake import DeltaTable

from dagster_unified.api import KeyedProcessFunction, Pipeline, ValueStateDescriptor
from dagster_unified.api import functions as F
from dagster_unified.connectors import CsvSource, DeltaSink
from dagster_unified.errors import MalformedInputError
from tests.support import MODES


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Size(IntEnum):
    SMALL = 1
    LARGE = 2


class Ball(NamedTuple):
    number: int
    color: Color
    size: Size | None


class Largest(NamedTuple):
    color: Color
    size: Size
    repr: str


class Grow(KeyedProcessFunction):
    def open(self, context):
        self.size = context.get_state(ValueStateDescriptor("size", Size))

    def process_element(self, value: Ball, ctx) -> Iterable[Largest]:
        size = max(value.size or Size.SMALL, self.size.value() or Size.SMALL)
        self.size.update(size)
        yield Largest(ctx.get_current_key(), size, f"{ctx.get_current_key()} {size!r}")


def balls(tmp_path, rows, on_malformed="fail"):
    (tmp_path / "balls.csv").write_text(f"number,color,size\n{rows}")
    pipeline = Pipeline("balls")
    source = CsvSource(str(tmp_path / "balls.csv"), Ball, on_malformed=on_malformed)
    stream = pipeline.from_source(source).where((F.col("color") == Color.RED) | F.col("size").isin([Size.LARGE]))
    stream.key_by("color").process(Grow()).sink_to(DeltaSink(str(tmp_path / "out"), name="out"))
    return pipeline


@pytest.mark.a_day(1)
@MODES
def test_enums_are_stored_as_values_and_are_members_to_every_function(run_in, mode, tmp_path):
    run_in[mode](balls(tmp_path, "1,red,1\n2,blue,2\n3,blue,1\n4,red,\n"))
    table = DeltaTable(str(tmp_path / "out")).to_pyarrow_table()
    assert sorted(table.to_pylist(), key=lambda row: row["color"]) == [
        {"color": "blue", "size": 2, "repr": "Color.BLUE <Size.LARGE: 2>"},
        {"color": "red", "size": 1, "repr": "Color.RED <Size.SMALL: 1>"},
        {"color": "red", "size": 1, "repr": "Color.RED <Size.SMALL: 1>"},
    ]


def test_a_text_that_is_no_member_makes_a_row_malformed(run_on_spark, tmp_path):
    rows = "1,red,1\n2,green,2\n"
    with pytest.raises(
        MalformedInputError,
        match=r"balls.csv, line 3: field 'color' is not a value of Color, which has 'red', 'blue'; it is 'green'",
    ):
        run_on_spark(balls(tmp_path, rows))
    manifests = run_on_spark(balls(tmp_path, rows, "drop"))
    assert manifests[0].counters == {"malformed rows dropped": 1}
