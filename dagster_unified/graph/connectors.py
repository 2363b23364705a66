"""What planning must know of a source or a sink: its name, its records, its boundedness, its guarantee.

The connectors themselves, which read and write, are in `connectors/`; this module must not know how.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Generic, Protocol, Self, runtime_checkable
from urllib.parse import quote

from dagster_unified.errors import PipelineError
from dagster_unified.operators.functions.type_variables import In, Out
from dagster_unified.records import RecordType, shorten

WHOLE = "all"
"""The name under which a run without partitions is stored."""


@dataclass(frozen=True)
class TimeRange:
    """From `start` until before `end`; both know their time zone, in which the partition was declared."""

    start: datetime
    end: datetime


@dataclass(frozen=True)
class Dimensions:
    """The common form of partitions: the names of their dimensions, and which of those are in time.

    A sole dimension has the name ''.
    """

    names: tuple[str, ...]
    in_time: frozenset[str]

    def describe(self) -> str:
        """Return the names, for messages."""
        return ", ".join(f"'{name}'" for name in self.names if name) or "one dimension without a name"


@dataclass(frozen=True)
class Slice:
    """One partition: its key, and for each of its dimensions a range of time or a key.

    A sole dimension has the name ''.
    """

    key: str
    dimensions: Mapping[str, TimeRange | str]

    @property
    def name(self) -> str:
        """The key as a segment of a path, and the same on every file system: what is not plain is percent-encoded."""
        return "%61ll" if self.key == WHOLE else quote(self.key, safe="=+")

    @property
    def shape(self) -> Dimensions:
        """The form that it shares with the other partitions."""
        in_time = (name for name, value in self.dimensions.items() if isinstance(value, TimeRange))
        return Dimensions(tuple(self.dimensions), frozenset(in_time))

    def time(self) -> TimeRange | None:
        """Its range of time, where it has one."""
        return next((value for value in self.dimensions.values() if isinstance(value, TimeRange)), None)


class Boundedness(Enum):
    """Whether a source ends."""

    BOUNDED = "bounded"
    UNBOUNDED = "unbounded"


class Guarantee(Enum):
    """The promise of a sink when a run is repeated or retried."""

    EXACTLY_ONCE = "exactly-once"
    AT_LEAST_ONCE = "at-least-once"
    UPSERT = "upsert"


@dataclass(frozen=True)
class Capabilities:
    """The abilities of a sink's target, from which follows what the sink can promise."""

    transactional: bool = False
    """A commit is visible at once or not at all, and the target remembers who made it."""

    upsert: bool = False
    """A later record of a key replaces an earlier one."""

    replaces_partition: bool = False
    """A partition of the pipeline that runs again replaces what it had written."""

    replaces_all: bool = False
    """A run without partitions replaces all that is there."""

    refuses_repeats: bool = False
    """A partition of the pipeline that runs again is an error: what it had written can be neither replaced nor told."""

    replaces_stream: bool = False
    """A partition of the pipeline that runs in BATCH replaces what a STREAMING job has written of it, and no more."""

    undoes: bool = False
    """A deployment that goes back to a savepoint takes back what it wrote since."""

    @property
    def guarantee(self) -> Guarantee:
        """What a repeated or retried write does to the target."""
        if self.upsert:
            return Guarantee.UPSERT
        return Guarantee.EXACTLY_ONCE if self.transactional else Guarantee.AT_LEAST_ONCE

    def takes_again(self, partitioned: bool) -> bool:
        """Return whether a repeated write, of a partition or without one, replaces what was written before."""
        return self.upsert or (self.replaces_partition if partitioned else self.replaces_all)

    def describe(self) -> str:
        """Return the guarantee in words, and what comes twice nevertheless."""
        promised: str = self.guarantee.value
        if self.guarantee is not Guarantee.EXACTLY_ONCE:
            return promised
        cases = []
        if not self.replaces_partition and not self.refuses_repeats:
            cases.append("running a partition again")
        if not self.undoes:
            cases.append("going back to a savepoint")
        repeats = f", but {' or '.join(cases)} writes rows again" if cases else ""
        return promised + repeats + (", and running a partition again is refused" if self.refuses_repeats else "")


@dataclass(frozen=True)
class Place:
    """A table, a topic or a folder, by its identity: whoever reads or writes it, and however the path is written.

    `table` is the name by which others know it: `database.schema.table` in a database, else the `uri`.
    """

    uri: str
    table: str


@dataclass(frozen=True)
class Target:
    """A place that a sink writes to. `shared`: it only adds to what is there."""

    place: Place
    shared: bool = False


@runtime_checkable
class HasPath(Protocol):
    """What has the parts of a path, such as Dagster's `AssetKey`."""

    @property
    def path(self) -> Sequence[str]:
        """The parts."""


AssetName = HasPath | Sequence[str] | str
"""An asset's key as authors write it: Dagster's `AssetKey`, its parts, or one text with slashes between them."""


def asset_path(name: AssetName | None, where: str) -> tuple[str, ...]:
    """Return the parts of an asset's key; none where none is given. `where` begins the message of an error.

    Raises `PipelineError` for what is no key.
    """
    if name is None:
        return ()
    parts = name.path if isinstance(name, HasPath) else name.split("/") if isinstance(name, str) else name
    if isinstance(parts, Sequence) and parts and all(isinstance(part, str) and part for part in parts):
        return tuple(parts)
    raise PipelineError(
        f"{where}: asset={shorten(name)} is no key of an asset; write AssetKey(['lake', 'orders']), or 'lake/orders'"
    )


def check_is_one(value: object, base: type, what: str) -> None:
    """Raise `PipelineError` where what an author gives is no source, or no sink."""
    if isinstance(value, base):
        return
    if isinstance(value, type) and issubclass(value, base):
        raise PipelineError(f"{value.__name__} is a class; give an instance of it, {value.__name__}(...)")
    raise PipelineError(f"{shorten(value)} is no {what}; give one, such as {_EXAMPLES[what]}")


_EXAMPLES = {
    "source": "CsvSource(path, Record), or use from_collection for a list of records",
    "sink": "DeltaSink(path) or FileSink(path)",
}


class Source(ABC, Generic[Out]):
    """A declared source."""

    name: str
    kind: str = ""
    """The common name of the system or the format, such as `csv`: a tag of stages in Dagster."""

    records: RecordType
    boundedness: Boundedness = Boundedness.BOUNDED
    only_in_batch: str = ""
    """The reason why STREAMING cannot read it, and what to do; empty where it can."""

    in_every_partition: bool = False
    """Whether all of it belongs to each partition."""

    reads_table: bool = False
    """Whether its place has a name by which other tools know it."""

    resource_keys: frozenset[str] = frozenset()
    """The keys of the resources that it connects by."""

    can_wait: bool = False
    """Whether STREAMING can hold parts of it back, so that watermarks can be aligned."""

    @abstractmethod
    def describe(self) -> str:
        """One line for plans: what is read, and from where."""

    def connected(self, resources: Mapping[str, object]) -> Self:
        """Return the source that connects by these resources, which have its `resource_keys`."""
        return self

    @abstractmethod
    def snapshot(self) -> str:
        """Identify what would be read now, so that a fingerprint changes when the input does."""

    def settings(self) -> str:
        """Return what else decides which records are read, and how: part of a stage's fingerprint."""
        return ""

    def places(self) -> Sequence[Place]:
        """The places that it reads, as far as another pipeline or tool may write them."""
        return ()

    def identifies_input(self) -> bool:
        """Whether its snapshot changes with what would be read: where not, nothing that comes of it can be reused."""
        return True

    def disorder(self, field: str) -> int | None:
        """Return the most milliseconds by which a record comes after one whose time in `field` is later.

        0 where records are sorted by it, None where the source does not know.
        """
        return None

    def bounded_to(self, slice_: Slice | Dimensions) -> Source[Out]:
        """Return the source that reads this partition and nothing else.

        Dimensions stand for a partition of which nothing else is known yet. Raises `PipelineError` where it does not
        know what belongs to a partition.
        """
        raise PipelineError(
            f"source '{self.name}' ({self.describe()}) cannot be bounded to a partition; run the pipeline without"
            " partitions, or read from another source"
        )


class Sink(ABC, Generic[In]):
    """A declared sink."""

    name: str
    kind: str = ""
    """The common name of the system, such as `deltalake`: a tag of stages in Dagster."""

    named: bool = True
    """Whether the name says what is written: the author gave it, or it is the table's."""

    capabilities: Capabilities
    upserts: bool = False
    """Whether updates may end here: a later record of a key replaces an earlier one, or each is wanted."""

    key: tuple[str, ...] = ()
    """The fields that identify a row of a table that it upserts; none where it has no table."""

    asset: tuple[str, ...] = ()
    """The key of the asset that stands for what it writes; empty where the author has not said one."""

    resource_keys: frozenset[str] = frozenset()
    """The keys of the resources that it connects by."""

    records: RecordType
    """The type of its records; set on the copy that `bound_to` returns."""

    def bound_to(self, records: RecordType) -> Self:
        """This sink for a stream of such records, as a copy, so that one object serves several streams.

        Raises `PipelineError` when they cannot be written.
        """
        bound = copy.copy(self)
        bound.records = records
        bound.check(records)
        return bound

    @property
    def guarantee(self) -> Guarantee:
        """The promise when a run is repeated or retried."""
        return self.capabilities.guarantee

    @abstractmethod
    def describe(self) -> str:
        """One line for plans: what is written, and where to."""

    def connected(self, resources: Mapping[str, object]) -> Self:
        """Return the sink that connects by these resources, which have its `resource_keys`."""
        return self

    def target(self) -> Target | None:
        """Where it writes to, if that is a place that another sink might write to as well."""
        return None

    @abstractmethod
    def check(self, records: RecordType) -> None:
        """Raise `PipelineError` when records of this type cannot be written."""

    def check_partitioned(self) -> None:
        """Raise `PipelineError` when a run for one partition would replace what those for others have written."""
