"""No value is changed without a word: what each declared type takes, what is read back, and what is an error.

`docs/types.md` has the same table, which is held to what happens.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Annotated, Generic, NamedTuple, TypeVar
from uuid import UUID

import msgspec
import numpy as np
import pandas as pd
import pendulum
import pyarrow as pa
import pytest

from dagster_unified.api import MapFunction, OutputTag, Pipeline, ProcessFunction
from dagster_unified.errors import RecordTypeError
from dagster_unified.records import record_type
from dagster_unified.testing import run_pipeline
from tests.support import MODES, results

DECLARED = (int, float, bool, str, bytes, datetime, date, timedelta, Decimal)
NOON = datetime(2024, 2, 29, 12)

GIVEN = {
    "`3`": 3,
    "`2**53 + 1`": 2**53 + 1,
    "`2**63`": 2**63,
    "`58.37`": 58.37,
    "`58.0`": 58.0,
    "`nan`": float("nan"),
    "`True`": True,
    "`'x'`": "x",
    "`b'x'`": b"x",
    "`bytearray(b'x')`": bytearray(b"x"),
    "naive `datetime`": NOON,
    "aware `datetime`": NOON.replace(tzinfo=timezone.utc),
    "`pendulum.DateTime`": pendulum.datetime(2024, 2, 29, 12, tz="Europe/Rome"),
    "`pandas.Timestamp` with nanoseconds": pd.Timestamp("2024-02-29 12:00:00.000000001"),
    "`datetime` before year 1 in UTC": datetime.min.replace(tzinfo=timezone(timedelta(hours=5))),
    "`pandas.NaT`": pd.NaT,
    "`date`": NOON.date(),
    "`time`": time(12),
    "`timedelta`": timedelta(seconds=1),
    "`pendulum.Duration`": pendulum.duration(months=1, hours=2),
    "`timedelta.max`": timedelta.max,
    "`Decimal('1.5')`": Decimal("1.5"),
    "`Decimal('1e-19')`": Decimal("1e-19"),
    "`Decimal('1e20')`": Decimal("1e20"),
    "`Decimal('NaN')`": Decimal("NaN"),
    "`numpy.int64(3)`": np.int64(3),
    "`numpy.float64(1.5)`": np.float64(1.5),
    "`numpy.float32(1.5)`": np.float32(1.5),
    "`numpy.bool_(True)`": np.bool_(True),
    "`numpy.str_('x')`": np.str_("x"),
    "`numpy.datetime64('2024-02-29')`": np.datetime64("2024-02-29"),
    "member of an `IntEnum`": IntEnum("Level", ["LOW"]).LOW,
    "member of a `StrEnum`": StrEnum("Color", ["RED"]).RED,
    "`UUID`": UUID(int=1),
    "`None`": None,
}


def read_back(python, *values):
    kind = record_type(python)
    return kind.from_batch(kind.to_batch(values))


def cell(python, value):
    try:
        (back,) = read_back(python, value)
    except RecordTypeError:
        return "error"
    same = type(back) is type(value) and (back == value or value != value)
    return "as it is" if same else f"`{python.__name__}`"


def table():
    names = [f"`{t.__name__}`" for t in DECLARED]
    rows = [["returned", *names], ["---"] * (len(names) + 1)]
    rows += [[name, *(cell(t, value) for t in DECLARED)] for name, value in GIVEN.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def test_the_page_on_types_says_what_happens():
    page = Path(__file__).parents[2].joinpath("docs/types.md").read_text()
    assert table() in page, f"docs/types.md should have this table:\n\n{table()}"


@pytest.mark.parametrize("python", DECLARED, ids=lambda t: t.__name__)
@pytest.mark.parametrize("given", GIVEN)
def test_what_is_read_back_equals_what_was_returned_or_is_an_error(python, given):
    value = GIVEN[given]
    for column in ([value], [value, value]):
        try:
            found = read_back(python, *column)
        except RecordTypeError:
            continue
        assert [type(back) for back in found] == [python] * len(column)
        for back in found:
            naive = isinstance(back, datetime) and value.tzinfo is None
            assert (back.replace(tzinfo=None) if naive else back) == value or value != value


class Place(NamedTuple):
    city: str
    floor: int | None


class Door(NamedTuple):
    width: str
    height: int | None


@dataclass
class Size:
    width: float


@dataclass
class Box(Size):
    depth: float


class Tags(msgspec.Struct):
    tags: list[str]


@pytest.mark.parametrize(
    ("python", "value", "back"),
    [
        (list[int], [1, 2], [1, 2]),
        (tuple[int, ...], (1, 2), (1, 2)),
        (tuple[str, float], ("a", 1), ("a", 1.0)),
        (dict[str, int], {"a": 1}, {"a": 1}),
        (Place, ("Rome", 1), Place("Rome", 1)),
        (list[Place], [Place("Rome", None), ("Bern", 2)], [Place("Rome", None), Place("Bern", 2)]),
        (dict[str, Size], {"a": Size(1)}, {"a": Size(1.0)}),
        (list[datetime], [pendulum.datetime(2024, 1, 1)], [datetime(2024, 1, 1, tzinfo=timezone.utc)]),
        (int | None, None, None),
        (list[int | None], [None], [None]),
    ],
    ids=str,
)
def test_what_is_nested_is_read_back_as_it_was(python, value, back):
    assert read_back(python, value) == [back]


@pytest.mark.parametrize(
    ("python", "value", "words"),
    [
        (
            tuple[int, list[int]],
            (1, [1, 2.5]),
            (
                r"field 'f1\[\]' of tuple\[int, list\[int\]\] is declared int, and is 2.5 \(float\) in \(1, \[1,"
                r" 2.5\]\); round it"
            ),
        ),
        (
            list[int],
            [None],
            r"field 'value\[\]' of list\[int\] is None .*its type, int, does not allow None; annotate it as '\| None'",
        ),
        (list[int], (1, 2), r"the value is declared list\[int\], and is \(1, 2\) \(tuple\); use list"),
        (list[int], np.array([1]), r"declared list\[int\], and is array\(\[1\]\) \(ndarray\)"),
        (list[str], "ab", r"declared list\[str\], and is 'ab' \(str\)"),
        (tuple[int, ...], [1], r"declared tuple\[int, \.\.\.\], and is \[1\] \(list\); use tuple"),
        (dict[str, int], {"a": None}, r"field 'value\.values\(\)' .* is None"),
        (dict[str, int], {1: 1}, r"field 'value\.keys\(\)' .* is declared str, and is 1 \(int\)"),
        (dict[str, int], [("a", 1)], r"declared dict\[str, int\], and is \[\('a', 1\)\] \(list\)"),
        (
            list[Place],
            [Place("Rome", 1.5)],
            r"field 'value\[\]\.floor' .* is declared int \| None, and is 1.5 \(float\)",
        ),
        (list[Place], [("Rome",)], r"declared Place, and is \('Rome',\) \(tuple\)"),
        (dict[str, Size], {"a": Box(1.0, 2.0)}, r"declared Size, and is Box\(width=1.0, depth=2.0\) \(Box\)"),
        (Place, Door("1", 2), r"expected a Place\(.*\), got Door\(width='1', height=2\) \(Door\)"),
        (Place, ["Rome", 1], r"expected a Place\(.*\), got \['Rome', 1\] \(list\)"),
        (tuple[str, str], "ab", r"expected a tuple\[str, str\]\(.*\), got 'ab' \(str\)"),
        (Size, Box(1.0, 2.0), r"expected a Size\(.*\), got Box\(width=1.0, depth=2.0\) \(Box\)"),
        (
            Tags,
            Tags(["a", b"b"]),
            r"field 'tags\[\]' of Tags is declared str, and is b'b' \(bytes\) in Tags\(.*\); decode it",
        ),
        (
            datetime,
            1_700_000_000_000,
            (
                r"declared datetime, and is 1700000000000 \(int\); make a datetime of it, such as"
                r" datetime.fromtimestamp\(milliseconds / 1000"
            ),
        ),
        (
            datetime | None,
            date(2024, 1, 1),
            r"declared datetime \| None, and is datetime.date\(2024, 1, 1\) \(date\); make a datetime",
        ),
        (Annotated[datetime, msgspec.Meta(tz=True)], NOON, "declared datetime with a time zone"),
        (
            Annotated[datetime, msgspec.Meta(tz=False)],
            NOON.replace(tzinfo=timezone.utc),
            "declared datetime without a time zone",
        ),
        (list[datetime], [datetime.max.replace(tzinfo=timezone(timedelta(hours=-5)))], "in the years 1 to 9999"),
        (str, "\ud800", r"the value is declared str, and cannot hold '\\ud800'; it has one half of a surrogate pair"),
    ],
)
def test_a_value_of_another_type_is_an_error_that_names_its_place_and_what_to_do(python, value, words):
    with pytest.raises(RecordTypeError, match=words):
        read_back(python, value)


def test_the_record_that_does_not_fit_is_found_among_others():
    with pytest.raises(
        RecordTypeError,
        match=r"field 'floor' of Place is declared int \| None, and is 1.5 \(float\) in Place\(city='b', floor=1.5\)",
    ):
        read_back(Place, Place("a", 1), Place("b", 1.5), Place("c", None))


class Fare(NamedTuple):
    line: str
    price: int


class Departure(NamedTuple):
    line: str
    at: datetime


def to_fare(line: str) -> Fare:
    return Fare(line, 58.37)


def to_departure(line: str) -> Departure:
    return Departure(line, 1_357_000_000_000)


class Split(ProcessFunction):
    def process_element(self, value: str, ctx) -> Iterable[str]:
        yield value
        ctx.output(OutputTag("fares", Fare), Fare(value, 58.37))


def line_of(fare) -> int:
    return fare.price / 2


@MODES
@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda s: s.map(to_fare).print("out"),
            (
                r"p: stage '\w+', operator 'to_fare': field 'price' of Fare is declared int, and is 58.37 \(float\) in"
                r" Fare\(line='a', price=58.37\); round it, or declare float"
            ),
        ),
        (
            lambda s: s.map(to_departure).print("out"),
            (
                r"p: stage '\w+', operator 'to_departure': field 'at' of Departure is declared datetime, and is"
                r" 1357000000000 \(int\)"
            ),
        ),
        (
            lambda s: s.process(Split()).get_side_output(OutputTag("fares", Fare)).print("out"),
            r"operator 'Split', side output 'fares': field 'price' of Fare is declared int, and is 58.37",
        ),
        (
            lambda s: s.map(lambda line: Fare(line, 3), Fare).key_by(line_of).sum("price").print("out"),
            r"p: key_by\(line_of\): a key is not of the type .*: the value is declared int, and is 1.5 \(float\)",
        ),
    ],
    ids=["float for int", "int for datetime", "side output", "key"],
)
def test_a_wrong_value_is_an_error_that_names_its_operator_in_both_modes(mode, build, words):
    pipeline = Pipeline("p")
    build(pipeline.from_collection(["a"]))
    with pytest.raises(RecordTypeError, match=words):
        run_pipeline(pipeline, mode)


def batch_of(array):
    return lambda batch: pa.RecordBatch.from_arrays([array], names=["value"])


@pytest.mark.parametrize(
    ("array", "python", "back"),
    [
        (pa.array([1], pa.int32()), int, 1),
        (pa.array([1]), float, 1.0),
        (pa.array(["a"]).dictionary_encode(), str, "a"),
        (pa.array(["a"], pa.large_string()), str, "a"),
        (pa.array([0], pa.timestamp("s")), datetime, datetime(1970, 1, 1, tzinfo=timezone.utc)),
        (pa.array([[1]], pa.large_list(pa.int32())), list[int], [1]),
    ],
)
def test_a_column_of_a_narrower_type_is_cast(array, python, back):
    made = Pipeline("p").from_collection([1]).map_batches(batch_of(array), output_type=python)
    assert results(made, "BATCH") == [back]


@pytest.mark.parametrize(
    ("array", "python", "words"),
    [
        (
            pa.array([58.0]),
            int,
            "column 'value' of the returned batch is a double, and int.* has a int64; cast it in the function",
        ),
        (pa.array([1]), datetime, "is a int64, and datetime.* has a timestamp"),
        (pa.array(["1"]), int, "is a string"),
        (pa.array([b"a"]), str, "is a binary"),
        (pa.array([1]), bool, "is a int64"),
        (pa.array([0], pa.timestamp("us")), date, "is a timestamp"),
        (pa.array([2**53 + 1]), float, "does not fit"),
        (pa.array([1], pa.timestamp("ns")), datetime, "does not fit"),
        (pa.array([[1.5]]), list[int], "is a list"),
    ],
)
def test_a_column_of_another_type_is_an_error(array, python, words):
    made = Pipeline("p").from_collection([1]).map_batches(batch_of(array), output_type=python)
    with pytest.raises(RecordTypeError, match=words):
        results(made, "BATCH")


T = TypeVar("T")


@dataclass(frozen=True)
class Box(Generic[T]):
    value: T


class Pair(NamedTuple, Generic[T]):
    value: T


@dataclass(frozen=True)
class Boxes(Box[list[int]]):
    nested: Box[int]
    pair: Pair[str]


def test_a_generic_class_is_a_records_type_by_a_class_of_its_own():
    with pytest.raises(RecordTypeError, match=r"Box\[int\] is no class of its own.*class OfBox\("):
        record_type(Box[int])
    boxes = [Boxes([1, 2], Box(3), Pair("a"))]
    assert record_type(Boxes).from_batch(record_type(Boxes).to_batch(boxes)) == boxes


class Counted(MapFunction[T, tuple[T, int]], Generic[T]):
    def map(self, value):
        return (value, 1)


class CountedStrings(Counted[str]):
    pass


def test_what_a_generic_function_gives_follows_from_what_its_subclass_says():
    made = Pipeline("p").from_collection(["a"]).map(CountedStrings())
    assert results(made, "BATCH") == [("a", 1)]
