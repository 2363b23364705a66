"""A pydantic model is refused with what to use instead; a dataclass of pydantic's is a record that validates."""

from typing import NamedTuple

import pydantic
import pytest

from dagster_unified.api import Pipeline, ValueStateDescriptor
from dagster_unified.errors import PipelineError, RecordTypeError, UserFunctionError
from dagster_unified.records import record_type
from dagster_unified.testing import run_pipeline
from tests.support import MODES


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
class Checked:
    price: pydantic.PositiveInt


@MODES
def test_a_dataclass_of_pydantics_is_a_record_that_validates(mode):
    def cheaper(record: Checked) -> Checked:
        return Checked(record.price - 1)

    pipeline = Pipeline("p")
    stream = pipeline.from_collection([Checked(3), Checked(2)]).map(cheaper)
    stream.key_by("price").reduce(lambda a, b: b).print()
    assert sorted(r.price for r in run_pipeline(pipeline, mode).only()) == [1, 2]
    pipeline = Pipeline("p")
    pipeline.from_collection([Checked(1)]).map(cheaper).print()
    with pytest.raises(UserFunctionError, match=r"operator 'cheaper': ValidationError: [\s\S]*greater than 0"):
        run_pipeline(pipeline, mode)
