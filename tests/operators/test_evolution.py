"""Which types' values may be read as those of another type, where msgpack has fields by their places."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import NamedTuple

import pytest

from dagster_unified.operators.state.evolution import can_read, layout_of, shown


class Colour(Enum):
    RED = "red"


@dataclass
class Named:
    a: int
    b: int = 0


@dataclass
class NamedOtherwise:
    b: int
    a: int
    c: str = ""


@dataclass
class NamedText:
    a: str


@dataclass
class Tree:
    value: int
    children: list["Tree"] = field(default_factory=list)


class Placed(NamedTuple):
    named: Named
    at: datetime | None = None


class PlacedOtherwise(NamedTuple):
    named: NamedOtherwise
    at: datetime


@pytest.mark.parametrize(
    ("declared", "stored", "reads"),
    [
        (Named, NamedOtherwise, True),
        (NamedText, Named, False),
        (Placed, PlacedOtherwise, True),
        (list[Placed], set[PlacedOtherwise], True),
        (dict[str, Placed], dict[str, list[Placed]], False),
        (Colour, str, True),
        (Colour, int, False),
        (tuple[int, str], tuple[int, str], True),
        (tuple[int, str, int], tuple[int, str], False),
        (int | str, str | int, True),
        (int | str | bool, int | str, False),
        (Tree, Tree, True),
        (bool, int, False),
    ],
)
def test_what_reads_what(declared, stored, reads):
    assert can_read(layout_of(declared), layout_of(stored)) is reads


def test_a_layout_is_shown_as_a_type():
    assert shown(layout_of(dict[str, list[Placed]])) == "dict[str, list[{named: {a: int, b: int}, at: datetime}]]"
    assert shown(layout_of(tuple[int, Colour | None])) == "tuple[int, str]"
    assert shown(layout_of(Tree)) == "{value: int, children: list[Tree]}"
