"""A copied record is equal to its original, and shares nothing with it that can change."""

from copy import deepcopy
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import pytest

from dagster_unified.records import record_type


@dataclass(frozen=True)
class Frozen:
    numbers: list[int]


@dataclass(slots=True)
class Slotted:
    number: int
    inner: Frozen | None = None


@dataclass
class Plain:
    name: str
    counts: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seen = [self.name]


@dataclass
class PartlySlotted(Slotted):
    more: int = 0


class FrozenStruct(msgspec.Struct, frozen=True):
    numbers: list[int]
    plain: Plain | None = None


class Named(NamedTuple):
    struct: FrozenStruct
    pair: tuple[list[int], int]
    many: list[Slotted]


def change(value):
    """Changes whatever can be changed, at every depth."""
    if isinstance(value, (str, int)) or value is None:
        return
    if isinstance(value, dict):
        for one in value.values():
            change(one)
        value["changed"] = [0]
    elif isinstance(value, (list, tuple)):
        for one in value:
            change(one)
        if isinstance(value, list):
            value.append(value[0] if value else 0)
    else:
        for name in getattr(value, "__struct_fields__", None) or value.__dataclass_fields__:
            inner = getattr(value, name)
            if isinstance(inner, int):
                try:
                    setattr(value, name, inner + 1)
                except AttributeError:  # it is frozen
                    continue
            change(inner)


RECORDS = [
    (Plain, Plain("a", {"x": [1], "y": []})),
    (Slotted, Slotted(1, Frozen([1, 2]))),
    (Slotted, Slotted(1, None)),
    (PartlySlotted, PartlySlotted(1, Frozen([]), 2)),
    (FrozenStruct, FrozenStruct([1], Plain("b"))),
    (Named, Named(FrozenStruct([2]), ([1], 2), [Slotted(1), Slotted(2, Frozen([3]))])),
    (tuple[list[int], str], ([1], "a")),
    (list[list[int]], [[1], []]),
    (dict[str, Slotted], {"a": Slotted(1)}),
]


@pytest.mark.parametrize(("kind", "record"), RECORDS)
def test_a_copy_is_equal_and_shares_nothing_that_can_change(kind, record):
    copy, before = record_type(kind).copier, deepcopy(record)
    made = copy(record)
    assert type(made) is type(record)
    assert made == before
    change(record)
    assert made == before != record


def test_a_copy_has_what_else_the_record_has():
    assert record_type(Plain).copier(Plain("a")).seen == ["a"]


@pytest.mark.parametrize("kind", [int, str, tuple[str, int], tuple[str, ...], NamedTuple("Pair", [("a", int)])])
def test_what_cannot_change_is_not_copied(kind):
    assert record_type(kind).copier is None


@pytest.mark.parametrize("misfit", [None, 5, "text", [1], object()])
def test_what_is_of_another_type_goes_on_to_be_refused(misfit):
    assert record_type(Plain).copier(misfit) is misfit
