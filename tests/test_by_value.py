"""What is shipped by value arrives whole in a process that cannot import its module."""

import dataclasses
import subprocess
import sys

import msgspec
import pytest
from pyspark import cloudpickle

from dagster_unified.by_value import by_value_bytes

MODULE = """
from typing import Annotated, ClassVar
import msgspec
from dagster_unified.connectors.protocol.commits import Committable

class Point(msgspec.Struct, frozen=True, order=True, tag="p"):
    x: int
    y: float = 1.5
    tags: list[str] = msgspec.field(default_factory=list)
    other: Annotated[int, msgspec.Meta(ge=0)] = msgspec.field(default=3, name="o")
    unit: ClassVar[str] = "m"

    def __post_init__(self):
        if self.x < 0:
            raise ValueError("behind the origin")

    def twin(self) -> "Point":
        return Point(self.x + 1)

    @property
    def twice(self) -> int:
        return 2 * self.x

class Named(Point, frozen=True, kw_only=True):
    name: str

class Staged(Committable, frozen=True, kw_only=True):
    file: str
"""

SENDER = """
import sys, pathlib
sys.path.insert(0, {folder!r})
import shapes
sys.modules["figures"] = shapes  # another name for it, as PySpark has for modules of its own
from dagster_unified.by_value import by_value_bytes
use = lambda: (shapes.Point(1).twin(), shapes.Named(2, name="n"), shapes.Staged(file="f", rows=3))
pathlib.Path({file!r}).write_bytes(by_value_bytes((use, shapes.Point, shapes.Named)))
"""

RECEIVER = """
import pathlib, msgspec
from pyspark import cloudpickle
use, Point, Named = cloudpickle.loads(pathlib.Path({file!r}).read_bytes())
twin, named, staged = use()
assert (twin, type(twin)) == (Point(2), Point)
assert (twin.twice, Point.unit, twin < Point(3)) == (4, "m", True)
assert (named.name, named.y, isinstance(named, Point)) == ("n", 1.5, True)
assert (staged.file, staged.rows, staged.bytes) == ("f", 3, 0)
assert msgspec.json.encode(Point(1, tags=["a"])) == b'{{"type":"p","x":1,"y":1.5,"tags":["a"],"o":3}}'
assert msgspec.msgpack.decode(msgspec.msgpack.encode(named), type=Named) == named
for make in (lambda: Point(-1), lambda: msgspec.convert({{"x": -1, "type": "p"}}, Point), lambda: Named(-1, name="")):
    try:
        make()
        raise SystemExit("nobody looked at it")
    except ValueError:
        pass
try:
    msgspec.json.decode(b'{{"type":"p","x":1,"o":-1}}', type=Point)
except msgspec.ValidationError:
    print("whole")
"""


FORWARD = """
import dataclasses
from typing import Annotated, Literal, NamedTuple, Optional

@dataclasses.dataclass(frozen=True)
class Order:
    shop: str
    place: Optional["Place"]
    text: "Place | None"
    noted: Annotated[list["Place"], "a note"]

class Orders(NamedTuple):
    orders: list["Order"]
    places: dict[str, "Place"]

@dataclasses.dataclass(frozen=True)
class Place:
    x: int
"""

SEND_FORWARD = """
import sys, pathlib
sys.path.insert(0, {folder!r})
from forward import *
from dagster_unified.by_value import by_value_bytes
one = Order("a", Place(1), None, [Place(2)])
pathlib.Path({file!r}).write_bytes(by_value_bytes((Orders([one], {{"b": Place(3)}}), one)))
"""

RECEIVE_FORWARD = """
import pathlib
from pyspark import cloudpickle
from dagster_unified.records import record_type
for record in cloudpickle.loads(pathlib.Path({file!r}).read_bytes()):
    kind = record_type(type(record))
    assert kind.from_batch(kind.to_batch([record])) == [record]
print("whole")
"""


@pytest.mark.parametrize(
    ("module", "sender", "receiver"), [(MODULE, SENDER, RECEIVER), (FORWARD, SEND_FORWARD, RECEIVE_FORWARD)]
)
def test_a_class_keeps_its_fields_its_settings_and_its_methods(tmp_path, module, sender, receiver):
    (tmp_path / "author").mkdir()
    (tmp_path / "author" / ("shapes.py" if module is MODULE else "forward.py")).write_text(module)
    names = {"folder": str(tmp_path / "author"), "file": str(tmp_path / "shipped")}
    for program in (sender, receiver):
        done = subprocess.run(
            [sys.executable, "-c", program.format(**names)], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "whole"


def test_what_is_installed_is_known_where_the_environment_is_reached_by_a_link(tmp_path):
    """The path of `pyspark.zip` is one without links, since the JVM resolves them."""
    (tmp_path / "current").symlink_to(sys.prefix)
    program = (
        "import os, msgspec; from dagster_unified.graph.fingerprint import is_installed_file;"
        " print(*map(is_installed_file, (msgspec.__file__, os.path.realpath(msgspec.__file__), '/home/author.py')))"
    )
    command = [str(tmp_path / "current/bin/python"), "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "True True False\n", done.stderr


def test_a_dataclass_has_no_default_where_it_had_none():
    @dataclasses.dataclass
    class Total:
        total: int
        blocked: bool
        seen: list[str] = dataclasses.field(default_factory=list)

    shipped = cloudpickle.loads(by_value_bytes(Total))
    assert msgspec.convert({"total": 1, "blocked": True}, shipped).seen == []
    with pytest.raises(msgspec.ValidationError, match="missing required field `blocked`"):
        msgspec.convert({"total": 1}, shipped)
    assert [field.default is dataclasses.MISSING for field in dataclasses.fields(shipped)] == [True, True, True]
