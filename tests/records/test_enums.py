"""An enum is stored as its members' values, and read back as its members: in records, keys, state and files."""

import enum
from collections.abc import Iterable
from enum import Enum, IntEnum, IntFlag, StrEnum
from typing import NamedTuple

import pyarrow as pa
import pytest

from dagster_unified.api import (
    KeyedProcessFunction,
    MapStateDescriptor,
    Pipeline,
    ValueStateDescriptor,
)
from dagster_unified.errors import PipelineError, RecordTypeError
from dagster_unified.records import record_type
from dagster_unified.testing import run_pipeline
from tests.support import MODES


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Size(IntEnum):
    SMALL = 1
    LARGE = 2


class Shape(StrEnum):
    ROUND = enum.auto()


class Access(IntFlag):
    READ = 1
    WRITE = 2


class Ball(NamedTuple):
    color: Color
    size: Size
    before: Color | None = None


RED = Ball(Color.RED, Size.SMALL)
BLUE = Ball(Color.BLUE, Size.LARGE, Color.RED)


def test_its_column_is_that_of_its_values():
    assert record_type(Ball).schema == pa.schema(
        [pa.field("color", pa.string(), False), pa.field("size", pa.int64(), False), pa.field("before", pa.string())]
    )


@pytest.mark.parametrize(
    ("python", "value", "stored"),
    [
        (Ball, BLUE, {"color": "blue", "size": 2, "before": "red"}),
        (Shape, Shape.ROUND, {"value": "round"}),
        (Access, Access.READ | Access.WRITE, {"value": 3}),
        (list[Color], [Color.RED], {"value": ["red"]}),
        (list[Color | None], [None, Color.RED], {"value": [None, "red"]}),
        (tuple[Color, ...], (Color.RED,), {"value": ["red"]}),
        (tuple[Color, int], (Color.RED, 1), {"f0": "red", "f1": 1}),
        (dict[Color, Size], {Color.RED: Size.LARGE}, {"value": [("red", 2)]}),
        (tuple[Ball, Color], (BLUE, Color.RED), {"f0": {"color": "blue", "size": 2, "before": "red"}, "f1": "red"}),
    ],
    ids=str,
)
def test_it_is_stored_as_its_value_and_read_back_as_its_member(python, value, stored):
    kind = record_type(python)
    batch = kind.to_batch([value])
    assert batch.to_pylist() == [stored]
    assert kind.from_batch(batch) == [value]
    assert repr(kind.from_batch(batch)[0]) == repr(value)


def test_a_value_that_is_no_member_is_an_error():
    with pytest.raises(
        RecordTypeError,
        match=r"field 'color' of Ball is declared Color, and is 'red' \(str\).*use a member, such as Color",
    ):
        record_type(Ball).to_batch([Ball("red", Size.SMALL)])


@pytest.mark.parametrize("values", [{"A": 1, "B": "b"}, {"A": 1.5}, {"A": (1, 2)}])
def test_its_values_have_to_be_of_one_kind(values):
    with pytest.raises(RecordTypeError, match=r"r: Odd cannot be used .* Enums must contain either all str or all int"):
        record_type(Enum("Odd", values), "r")


class Latest(KeyedProcessFunction):
    def open(self, context):
        self.last = context.get_state(ValueStateDescriptor("last", Color))
        self.seen = context.get_map_state(MapStateDescriptor("seen", Size, int))

    def process_element(self, value: Ball, ctx) -> Iterable[tuple[Color, Color | None, int]]:
        assert type(ctx.get_current_key()) is Color
        self.seen.put(value.size, (self.seen.get(value.size) or 0) + 1)
        yield value.color, self.last.value(), self.seen.get(value.size)
        self.last.update(value.color)


@MODES
@pytest.mark.parametrize("key", ["color", lambda ball: ball.color])
def test_it_is_a_key_and_has_a_place_in_state(mode, key):
    pipeline = Pipeline("p")
    stream = pipeline.from_collection([RED, BLUE, RED])
    (stream.key_by(key) if key == "color" else stream.key_by(key, key_type=Color)).process(Latest()).print()
    assert sorted(run_pipeline(pipeline, mode).only(), key=repr) == [
        (Color.BLUE, None, 1),
        (Color.RED, Color.RED, 2),
        (Color.RED, None, 1),
    ]


@MODES
@pytest.mark.parametrize(
    "build", [lambda s: s.map(lambda b: b, Ball), lambda s: s.key_by("color").reduce(lambda a, b: b)]
)
def test_a_returned_column_with_a_value_of_no_member_is_an_error(mode, build):
    def paint(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.set_column(0, "color", pa.array(["green"]))

    pipeline = Pipeline("p")
    build(pipeline.from_collection([RED]).map_batches(paint, output_type=Ball)).print()
    with pytest.raises(
        RecordTypeError,
        match=r"operator 'paint': field 'color' of Ball: 'green' is not a value of Color, which has 'red', 'blue'",
    ):
        run_pipeline(pipeline, mode)


def test_an_enum_has_no_sum():
    stream = Pipeline("p").from_collection([RED]).key_by("color")
    with pytest.raises(PipelineError, match="field 'size' is a Size, an enum, which has no sum"):
        stream.sum("size")
    with pytest.raises(PipelineError, match="field 'color' is a Color, an enum, which has no max"):
        stream.max("color")
    stream.max("size")
