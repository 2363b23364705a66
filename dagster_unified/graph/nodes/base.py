"""What all nodes of a graph have in common, and what they are put together with: keys, exchanges, places, names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from dagster_unified.operators.layout import ComputedKey
from dagster_unified.records import RecordType

if TYPE_CHECKING:
    from dagster_unified.operators.program.step import Step


@dataclass(frozen=True)
class Finding:
    """One thing the lint found: its rule, its severity (`warning` or `note`), the operator, and what to do.

    `node` is None where the operator leads to no sink, and so is not in the plan.
    """

    rule: str
    severity: str
    node: int | None
    message: str


@dataclass(frozen=True)
class Location:
    """A line of the author's program."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Chaining(Enum):
    """Flink's chaining strategy: whether an operator may be chained to the one before it, and the one after to it."""

    ALWAYS = "always"
    HEAD = "head"
    NEVER = "never"


class Naming(IntEnum):
    """Where an operator's name comes from.

    The higher, the more it says of what the operator computes: stages are named after it.
    """

    HELPER = -1
    """The library's, for an operator that planning adds beside the author's."""
    LIBRARY = 0
    """The library's word for the operator, such as `map`."""
    SOURCE = 1
    """The name of a source: it says what is read."""
    FUNCTION = 2
    """The name of the operator's function or class."""
    AUTHOR = 3
    """Given with `name(...)`, or the name of a sink."""


class ExchangeKind(Enum):
    """How records travel along an edge."""

    FORWARD = "FORWARD"
    HASH = "HASH"
    REBALANCE = "REBALANCE"
    RESCALE = "RESCALE"
    SHUFFLE = "SHUFFLE"
    BROADCAST = "BROADCAST"
    GLOBAL = "GLOBAL"
    CUSTOM = "CUSTOM"


@dataclass(frozen=True)
class Key:
    """The key of a stream: fields of the record, or what a function gives."""

    fields: tuple[str, ...] = ()
    computed: ComputedKey | None = None

    def describe(self) -> str:
        """For plans and messages."""
        if self.computed is None:
            return ", ".join(self.fields)
        return getattr(self.computed.function, "__name__", type(self.computed.function).__name__)


@dataclass(frozen=True)
class Partitioning:
    """The exchange that an author asked for; FORWARD stands for "not said", unless `explicit`."""

    kind: ExchangeKind = ExchangeKind.FORWARD
    key: Key | None = None
    partitioner: Any = None
    explicit: bool = False


Lineage = dict[str, frozenset[tuple[int, str]]]
"""For each column, the (node of an earlier region or source, column) pairs that it comes from."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Node:
    """A transformation. `records` is its output type; `timestamped` says whether its records carry event times.

    What the rest of the library asks of an operator it asks of its node: these are its traits. A class of nodes states
    those in which it differs from what stands here.
    """

    id: int
    name: str
    naming: Naming = Naming.LIBRARY
    uid: str = ""
    given_uid: bool = False
    location: Location | None = None
    records: RecordType | None = None
    timestamped: bool = False
    parallelism: int | None = None
    chaining: Chaining = Chaining.ALWAYS
    in_python: bool = False
    """Whether its function is called for each record, also where its source says what it computes."""

    key: Key | None = None
    """What its input is keyed by, where a driver gives it one key after another.

    A key of no fields is the same for all records.
    """

    # Who runs it

    step: ClassVar[type[Step] | None] = None
    """Its step in a program, if it runs in Python."""

    native: ClassVar[bool] = False
    """Whether Catalyst runs it, on columns."""

    # What it does to records

    keeps_records: ClassVar[bool] = False
    """Whether it emits only records that it was given, unchanged."""

    emits_updates: ClassVar[bool] = False
    """Whether in STREAMING it emits a key's result again with each record, so that only the last one is final."""

    keyed_form: ClassVar[str] = ""
    """What runs it on a keyed stream if its function holds state, in `KEYED_FORMS`."""

    has_side_outputs: ClassVar[bool] = False
    has_broadcast_input: ClassVar[bool] = False
    """Whether what comes over BROADCAST exchanges is a stream of its own, apart from its main input."""

    holds_subtask_state: ClassVar[bool] = False
    """Whether its state is that of its subtasks, which have no keys."""

    merges_partials: ClassVar[bool] = False
    """Whether it is the global part of a column aggregate."""

    product: ClassVar[str] = "output is"
    """What it computes, and the verb."""

    # What it knows of time

    has_timers: ClassVar[bool] = False
    """Whether it may register timers, and so has to know the time."""

    has_native_windows: ClassVar[bool] = False
    """Whether Catalyst collects its input in windows, which the watermark closes."""

    @property
    def kind(self) -> str:
        """`map`, `keyed process`, `source`: what it is, in words."""
        name = type(self).__name__.removesuffix("Node")
        return "".join(f" {c.lower()}" if c.isupper() else c for c in name).strip()

    @property
    def is_told_watermark(self) -> bool:
        """Whether in STREAMING it is told how far event time is."""
        return self.has_timers

    @property
    def carries_state(self) -> bool:
        """Whether some of its state goes on where a partition, or a run, ends."""
        return self.holds_state

    @property
    def holds_state(self) -> bool:
        """Whether it holds state of keys."""
        return self.key is not None

    @property
    def runs_by_key(self) -> bool:
        """Whether a driver runs it key by key."""
        return self.key is not None and not self.native

    @property
    def aggregates_natively(self) -> bool:
        """Whether Catalyst aggregates its input by key."""
        return self.key is not None and self.native

    @property
    def user_function(self) -> Any:
        """The author's code that it calls for each record, if any."""
        return None

    @property
    def runnable(self) -> Any:
        """What its operator in Python calls: the author's function, or what wraps it."""
        return self.user_function

    @property
    def needs_worker(self) -> bool:
        """Whether it needs a Python worker also where it stands alone between operators of Catalyst."""
        return self.step is not None

    @property
    def counts_records(self) -> bool:
        """Whether its result depends on how many records reach it, even if these are updates of one result."""
        return True

    @property
    def sees_all_partitions(self) -> bool:
        """Whether it would see the records of all partitions that run in one Spark job."""
        return False

    @property
    def not_carried(self) -> str | None:
        """Say what carry_state cannot do for it, and what to do instead.

        None where its state goes on to the next partition.
        """
        return None

    @property
    def depends_on_order(self) -> bool:
        """Whether its result may depend on the order of a key's records."""
        return False

    @property
    def drops_late_records(self) -> object | None:
        """What of it drops late records in STREAMING, if anything: itself, or its function."""
        return None

    def step_arguments(self) -> dict[str, Any]:
        """Return the arguments of its step, beyond those that all steps have."""
        return {}

    def windows_of(self, record: Any, timestamp: int | None) -> Sequence[Any]:
        """Return the windows in which Catalyst collects a record."""
        return ()

    def code(self) -> tuple[Any, ...]:
        """Return the author's code that it was given, and what says how that is called."""
        return () if self.user_function is None else (self.user_function,)

    def settings(self, with_input: bool = True) -> list[object]:
        """Return what else decides its result, as text or as what prints the same in every process.

        Without `with_input` it leaves out what a source holds just now.
        """
        values = [getattr(self, f.name) for f in fields(self) if f.name not in _COMMON]
        code = [id(value) for value in self.code()]
        return [self.key.fields if self.key else (), *(repr(value) for value in values if id(value) not in code)]

    def describe(self) -> str:
        """Say what it does beyond its name, for `explain`."""
        return ""

    @property
    def resource_keys(self) -> frozenset[str]:
        """The keys of the resources that it connects by."""
        return frozenset()

    def connected(self, resources: Mapping[str, object]) -> Node:
        """Return the node that connects by these resources; raises `ConfigurationError` where one is missing."""
        return self

    def state(self) -> list[dict[str, str]]:
        """Return the state that it holds, as far as its code shows it: name and kind of each."""
        return []

    def disorder(self, field: str | int) -> int | None:
        """By how many milliseconds a record comes, at most, after one whose time in `field` is later.

        None where it does not know.
        """
        return None

    def lineage(self, before: Lineage) -> Lineage | None:
        """Where its columns come from, if its input's come from `before`; None where that is not known."""
        return before if self.keeps_records else None

    def parity(self) -> list[Finding]:
        """Return how its result differs by mode, beyond what the lint finds out for all operators."""
        return []

    def warning(self, rule: str, message: str) -> Finding:
        return Finding(rule, "warning", self.id, f"'{self.name}' {message}")

    def note(self, rule: str, message: str) -> Finding:
        return Finding(rule, "note", self.id, f"'{self.name}' {message}")


_COMMON = frozenset(f.name for f in fields(Node))
