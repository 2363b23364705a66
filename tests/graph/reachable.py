"""Everything that a function can reach, by name.

`work` does what a process may have done before it takes a fingerprint.
"""

import collections
import contextvars
import dataclasses
import datetime
import decimal
import enum
import functools
import itertools
import logging
import operator
import pathlib
import random
import re
import string
import struct
import threading
import typing
import uuid
import weakref
import zoneinfo
from collections.abc import Callable

import msgspec
import numpy as np
import pyarrow as pa

from dagster_unified.api import (
    AggregateFunction,
    AggregatingStateDescriptor,
    KeyedProcessFunction,
    MapStateDescriptor,
    OutputTag,
    Pipeline,
    ValueStateDescriptor,
)

np_late: typing.Any = None


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Right(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


@dataclasses.dataclass
class Point:
    x: int
    tags: set[str] = dataclasses.field(default_factory=set)

    @functools.cached_property
    def doubled(self) -> int:
        return self.x * 2


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: int
    names: frozenset[str] = frozenset({"a", "b", "c"})


class Packed(msgspec.Struct):
    x: int
    names: list[str] = []
    seen: set[str] = msgspec.field(default_factory=set)


class Meta:
    """Has no repr of its own."""


class Noted(typing.NamedTuple):
    x: typing.Annotated[int, Meta()]
    y: "list[Noted] | None" = None


class Client:
    """Keeps what it has worked out."""

    shared: typing.ClassVar[dict[str, int]] = {}

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self.calls = 0
        self.held: dict[int, int] = {}
        self.lock = threading.Lock()
        self.log = logging.getLogger("client")
        self.connection: typing.Any = None

    def ask(self, value: int) -> int:
        with self.lock:
            self.calls += 1
            self.held[value] = value * self.rate
            self.shared["last"] = value
            self.connection = object()
        return self.held[value]


class Slotted:
    __slots__ = ("count", "rate")

    def __init__(self) -> None:
        self.rate = 3
        self.count = 0

    def ask(self, value: int) -> int:
        self.count += 1
        return value * self.rate


class Mean(AggregateFunction):
    def create_accumulator(self) -> tuple[int, float]:
        return 0, 0.0

    def add(self, value: int, accumulator: tuple[int, float]) -> tuple[int, float]:
        return accumulator[0] + 1, accumulator[1] + value

    def get_result(self, accumulator: tuple[int, float]) -> float:
        return accumulator[1] / accumulator[0]

    def merge(self, a: tuple[int, float], b: tuple[int, float]) -> tuple[int, float]:
        return a[0] + b[0], a[1] + b[1]


class Keeping(KeyedProcessFunction):
    def open(self, runtime_context):
        self.state = runtime_context.get_map_state(MAP)

    def process_element(self, value, ctx):
        self.last = value
        yield value


class Words(dict):
    """A subclass of a container."""


@functools.cache
def cached(value: int) -> int:
    return value + 1


@functools.lru_cache(maxsize=4)
def bounded(value: int) -> int:
    return value + 2


@functools.singledispatch
def shown(value: object) -> str:
    return str(value)


@shown.register
def _(value: int) -> str:
    return f"{value:d}"


def counting(function):
    @functools.wraps(function)
    def wrapper(value):
        wrapper.calls += 1
        return function(value)

    wrapper.calls = 0
    return wrapper


@counting
def counted(value: int) -> int:
    return value


def recursive(value: int) -> int:
    return mutual(value - 1) if value else 0


def mutual(value: int) -> int:
    return recursive(value - 1) if value else 1


def closed(values: set[str], rate: float) -> Callable[[str], bool]:
    return lambda value: value in values and rate > 0


def generated():
    yield from range(9)


class Referent:
    pass


LOG = logging.getLogger(__name__)
MAP = MapStateDescriptor("counts", str, list[int])
VALUE = ValueStateDescriptor("last", tuple[int, float])
AGGREGATING = AggregatingStateDescriptor("mean", Mean(), tuple[int, float])
LOCK, RLOCK, EVENT, LOCAL = threading.Lock(), threading.RLock(), threading.Event(), threading.local()
CITIES = {"Rome", "Bern", "Oslo", "Paris"}
WITHIN = CITIES.__contains__
NESTED = {("a", frozenset({"x", "y"})): {"b", "c"}, "other": {1: None}}
COLOURS = {Colour.RED: 1, Colour.BLUE: 2}
PATTERN = re.compile(r"(\d+)" * 80)
POINT = Point(1, {"p", "q", "r"})
FROZEN = Frozen(2)
PACKED = Packed(3, ["a"])
CLIENT = Client(2)
SLOTTED = Slotted()
CACHE: dict[int, int] = {}
SEEN: set[str] = set()
COUNT = 0
WORDS = Words(a=1)
PARTIAL = functools.partial(operator.mul, 3)
REFERENT = Referent()
WEAK = weakref.ref(REFERENT)
WEAK_DICT: weakref.WeakValueDictionary[str, Referent] = weakref.WeakValueDictionary()
COUNTER = itertools.count(5)
GENERATOR = generated()
ITERATOR = iter([1, 2, 3])
CONTEXT: contextvars.ContextVar[int] = contextvars.ContextVar("depth", default=0)
CHANCE = random.Random()
GENERATOR_OF_NUMPY = np.random.default_rng()
ARRAY, SCALAR, KIND = np.array([1.5, 2.5]), np.int64(5), np.dtype("int32")
ARROW = pa.array([1, None, 3])
TABLE = pa.table({"a": [1, 2], "b": ["x", None]})
SCHEMA = pa.schema([pa.field("a", pa.list_(pa.int64()))], {"k": "v"})
DECODER = msgspec.json.Decoder(list[int])
LOADED = msgspec.json.Decoder(Packed)
TEMPLATE, FORMAT = string.Template("$a"), struct.Struct("<i")
TAG = OutputTag("odd", list[int])
MOMENTS = (
    datetime.datetime(2026, 1, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    datetime.timedelta(1),
    datetime.timezone.utc,
    decimal.Decimal("1.5"),
    uuid.UUID(int=5),
    pathlib.Path("a") / "b",
)
MISSING = object()
T = typing.TypeVar("T")
UserId = typing.NewType("UserId", int)
TYPES = [
    tuple[int, float],
    dict[str, Point],
    int | None,
    typing.Callable[[int], str],
    Noted | None,
    typing.Any,
    T,
    UserId,
    typing.Literal["a"],
    list["Later"],
]
DEFAULTS = collections.defaultdict(list, {"a": [1]})
DEQUE = collections.deque([1, 2], maxlen=3)
ITEM, ATTRIBUTE = operator.itemgetter("a", 1), operator.attrgetter("x.y")
FILE = open(__file__)  # noqa: SIM115
PIPELINE = Pipeline("mentioned")


def lazily(value):
    global np_late
    import csv

    import numpy

    np_late = numpy
    return csv, value


def remembering(value):
    global COUNT
    COUNT += 1
    SEEN.add(str(value))
    if value not in CACHE:
        CACHE[value] = value * 2
    return CACHE[value]


class Later:
    pass


class Methods:
    rate = 2

    def times(self, value: int) -> int:
        return value * self.rate

    @classmethod
    def made(cls, value: int) -> int:
        return value * cls.rate

    @staticmethod
    def still(value: int) -> int:
        return value


FUNCTIONS = {
    "a set of texts": lambda v: v in CITIES,
    "a constant set": lambda v: v in {"u", "v", "w"},
    "a bound builtin": lambda v: WITHIN(v),
    "a bound builtin itself": CITIES.__contains__,
    "nested containers": lambda v: NESTED,
    "an enum": lambda v: COLOURS[Colour(v)],
    "a flag": lambda v: Right.READ | Right.WRITE,
    "a pattern": lambda v: PATTERN.match(v),
    "a dataclass": lambda v: POINT.doubled,
    "a frozen dataclass": lambda v: FROZEN,
    "a struct": lambda v: PACKED,
    "a struct's class": lambda v: msgspec.convert(v, Packed),
    "an annotation with an object": lambda v: Noted(v),
    "a logger": lambda v: LOG.info(v),
    "descriptors": lambda v: (MAP, VALUE, AGGREGATING),
    "locks": lambda v: (LOCK, RLOCK, EVENT, LOCAL),
    "an object with working state": lambda v: CLIENT.ask(v),
    "a bound method": CLIENT.ask,
    "an object with slots": SLOTTED.ask,
    "caches of a module": remembering,
    "a subclass of dict": lambda v: WORDS[v],
    "a partial": PARTIAL,
    "a partial of a bound method": functools.partial(CLIENT.ask, 3),
    "a weak reference": lambda v: (WEAK(), WEAK_DICT),
    "iterators": lambda v: (next(COUNTER), next(GENERATOR), next(ITERATOR)),
    "a context variable": lambda v: CONTEXT.get(),
    "chance": lambda v: (CHANCE.random(), GENERATOR_OF_NUMPY.random()),
    "numpy": lambda v: (ARRAY, SCALAR, KIND, np.add),
    "arrow": lambda v: (ARROW, TABLE, SCHEMA),
    "decoders": lambda v: (DECODER.decode(v), LOADED.decode(v)),
    "templates": lambda v: (TEMPLATE, FORMAT),
    "an output tag": lambda v: TAG,
    "values": lambda v: MOMENTS,
    "a sentinel": lambda v: v is MISSING,
    "types": lambda v: TYPES,
    "containers": lambda v: (DEFAULTS, DEQUE),
    "getters": lambda v: (ITEM, ATTRIBUTE),
    "an open file": lambda v: FILE.name,
    "a cached function": lambda v: cached(v) + bounded(v),
    "single dispatch": lambda v: shown(v),
    "a decorated function": lambda v: counted(v),
    "functions that call each other": lambda v: recursive(v),
    "a closure": closed({"k", "l", "m"}, 0.5),
    "modules imported late": lambda v: (lazily(v), np_late),
    "an aggregate function": Mean(),
    "a keyed process function": Keeping(),
    "methods": lambda v: (Methods().times(v), Methods.made(v), Methods.still(v)),
    "a pipeline": lambda v: PIPELINE,
}


def work() -> None:
    """Uses everything that changes by being used."""
    import csv  # noqa: F401
    import xml.dom  # noqa: F401

    logging.basicConfig(level=logging.DEBUG, handlers=[logging.NullHandler()])
    LOG.isEnabledFor(logging.INFO)
    LOG.setLevel(logging.INFO)
    LOG.info("worked")
    logging.getLogger("client").info("asked")
    _ = PATTERN.match("12"), POINT.doubled, Right.READ | Right.WRITE, Right(3)
    LOCK.acquire()
    RLOCK.acquire()
    EVENT.set()
    LOCAL.value = 1
    CONTEXT.set(4)
    WEAK_DICT["a"] = REFERENT
    for number in range(40):
        for function in (
            remembering,
            lazily,
            cached,
            bounded,
            shown,
            counted,
            recursive,
            CLIENT.ask,
            SLOTTED.ask,
            FUNCTIONS["a cached function"],
        ):
            function(number)
    next(COUNTER), next(GENERATOR), next(ITERATOR), CHANCE.random(), GENERATOR_OF_NUMPY.random()
    msgspec.json.decode(b'{"x": 1}', type=Packed)
    hash(FROZEN), hash(MOMENTS), repr(POINT), str(TYPES), ARRAY.sum(), ARROW.null_count
    ARROW.to_pylist()
    FILE.read()
    typing.get_type_hints(Noted), typing.get_type_hints(Point)
    Keeping.process_element(FUNCTIONS["a keyed process function"], 1, None).__next__()
    FUNCTIONS["a keyed process function"].last = 5
    PIPELINE.from_collection([1]).print()
