"""Classes of records that do more than hold their fields: what cannot come back as it went is refused."""

from dataclasses import dataclass, field
from typing import NamedTuple, Optional

import msgspec
import pydantic
import pytest

from dagster_unified.api import KeyedProcessFunction, Pipeline, ValueStateDescriptor
from dagster_unified.errors import PipelineError, RecordTypeError, StateError, UserFunctionError
from dagster_unified.records import record_type
from dagster_unified.testing import run_pipeline
from tests.support import MODES, results


@dataclass(frozen=True)
class Cents:
    """Takes dollars."""

    amount: int

    def __post_init__(self):
        object.__setattr__(self, "amount", self.amount * 100)


class CentsStruct(msgspec.Struct):
    amount: int

    def __post_init__(self):
        self.amount *= 100


@dataclass
class Checked:
    """Leaves its fields alone, and has something more."""

    amounts: list[float]

    def __post_init__(self):
        self.amounts.sort()
        if self.amounts and self.amounts[0] < 0:
            raise ValueError("below zero")
        self.total = sum(self.amounts)


@dataclass(init=False)
class FromText:
    amount: int

    def __init__(self, text: str):
        self.amount = int(text)


class Bill(NamedTuple):
    cents: list[Cents]


@pytest.mark.parametrize(
    ("kind", "record", "words"),
    [
        (Cents, Cents(1), r"Cents\(amount=100\): made again of its fields, .* it is Cents\(amount=10000\)"),
        (CentsStruct, CentsStruct(1), r"it is CentsStruct\(amount=10000\); let CentsStruct leave fields as they are"),
        (Bill, Bill([Cents(1)]), r"field 'cents\[\]' of Bill .* made again of its fields"),
        (FromText, FromText("1"), r"it cannot be made again of its fields, .* unexpected keyword argument 'amount'"),
    ],
)
def test_a_record_that_is_another_one_when_it_is_made_again_is_refused(kind, record, words):
    with pytest.raises(RecordTypeError, match=words):
        record_type(kind).to_batch([record])


def test_a_class_may_check_its_fields_and_have_more():
    kind = record_type(Checked)
    (found,) = kind.from_batch(kind.to_batch([Checked([2.0, 1.0])]))
    assert (found.amounts, found.total) == ([1.0, 2.0], 3.0)
    assert kind.from_batch(kind.to_batch([Checked([float("nan")])]))[0].total != 0


class Held(KeyedProcessFunction):
    """Puts what it is made with into state."""

    def __init__(self, kind, value):
        self.kind, self.value = kind, value

    def open(self, runtime_context):
        self.state = runtime_context.get_state(ValueStateDescriptor("held", self.kind))

    def process_element(self, value, ctx) -> list[int]:
        self.state.update(self.value)
        return [value]


class Seen(NamedTuple):
    name: str
    count: int


class Other(NamedTuple):
    name: str
    count: int


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (Cents, Cents(1), "is declared Cents, .*made again of its fields"),
        (Seen, ("a", 1), r"is declared Seen, and was given \('a', 1\) \(tuple\)"),
        (Seen, Other("a", 1), "is declared Seen, and was given Other"),
        (list[Seen], [("a", 1)], r"'held\[\]' of key 1 is declared Seen"),
        (tuple[str, int], Seen("a", 1), r"is declared tuple\[str, int\], and was given Seen"),
    ],
)
@MODES
def test_state_takes_only_what_comes_back_as_it_went(mode, kind, value, words):
    made = Pipeline("p").from_collection([1]).key_by(lambda n: n, key_type=int).process(Held(kind, value))
    with pytest.raises(StateError, match=words):
        results(made, mode)


class Node(NamedTuple):
    name: str
    children: "list[Node]"


class Parent(NamedTuple):
    name: str
    parent: Optional["Parent"]


class Cases(NamedTuple):
    at: int
    At: int


@dataclass
class Computed:
    amount: int
    twice: int = field(init=False, default=0)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Node, "p: Node has records of its own type, however deep, which no columns hold"),
        (Parent, "p: Parent has records of its own type"),
        (Computed, "p: field 'twice' of Computed has init=False"),
        (Cases, "p: Cases has the fields 'at' and 'At', which are one column to Spark; rename one"),
        (list[Cases], "p has the fields 'at' and 'At', which are one column"),
    ],
)
def test_what_no_columns_hold_is_refused_where_the_type_is_given(kind, words):
    with pytest.raises(RecordTypeError, match=words):
        record_type(kind, "p")


class Model(pydantic.BaseModel):
    price: int


class Holder(NamedTuple):
    model: Model


@pytest.mark.parametrize(
    ("python", "place"), [(Model, "r"), (list[Model], "r"), (Holder, "r: field 'model' of Holder")], ids=str
)
def test_a_model_is_refused_with_what_to_use_instead(python, place):
    with pytest.raises(RecordTypeError, match=rf"^{place}: Model is a pydantic model, .*; declare a NamedTuple, or"):
        record_type(python, "r")


def test_a_model_is_refused_as_state():
    with pytest.raises(PipelineError, match=r"state 's': Model is a pydantic model, .*; declare a NamedTuple"):
        ValueStateDescriptor("s", Model)


@pydantic.dataclasses.dataclass
class Positive:
    price: pydantic.PositiveInt


@MODES
def test_a_dataclass_of_pydantics_is_a_record_that_validates(mode):
    def cheaper(record: Positive) -> Positive:
        return Positive(record.price - 1)

    pipeline = Pipeline("p")
    stream = pipeline.from_collection([Positive(3), Positive(2)]).map(cheaper)
    stream.key_by("price").reduce(lambda a, b: b).print()
    assert sorted(r.price for r in run_pipeline(pipeline, mode).only()) == [1, 2]
    pipeline = Pipeline("p")
    pipeline.from_collection([Positive(1)]).map(cheaper).print()
    with pytest.raises(UserFunctionError, match=r"operator 'cheaper': ValidationError: [\s\S]*greater than 0"):
        run_pipeline(pipeline, mode)
