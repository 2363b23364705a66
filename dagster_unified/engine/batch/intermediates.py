"""The intermediate store: the materialized output of stages, in Parquet, each with a manifest; and as DataFrames."""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, TypeVar
from uuid import uuid4

import msgspec
from upath import UPath

from dagster_unified.connectors.protocol.positions import Position
from dagster_unified.engine.dataframe.partitions import PartitionAxis
from dagster_unified.engine.positions import Read
from dagster_unified.errors import ConfigurationError, LeaseLostError
from dagster_unified.graph.connectors import WHOLE
from dagster_unified.operators.layout import OUTPUT, PARTITION_INDEX, StreamLayout, output_column
from dagster_unified.operators.metrics import GaugeRange, Histogram, MeterCount
from dagster_unified.spark_internals import in_place
from dagster_unified.storage import conditional
from dagster_unified.storage.paths import (
    children,
    for_spark,
    is_data,
    is_in_object_store,
    load,
    put,
    read_whole,
    remove_tree,
    sizes,
    storage_path,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MANIFEST = "manifest.json"
PREPARED = "prepared.json"
"""The file with what an attempt has prepared for its sinks."""

STOPS = "stops.json"
"""The file with where a run's sources stop."""

_SEGMENT = re.compile(r"[A-Za-z0-9_.=+:%~-]+")


class StoredFile(msgspec.Struct, frozen=True):
    """A file of an intermediate, relative to its data folder, and its size in bytes."""

    path: str
    bytes: int


class StoredStream(msgspec.Struct, frozen=True):
    """A stream that an intermediate holds: the operator's uid, its side output if it is one, and its rows."""

    uid: str
    tag: str | None
    rows: int


class IterationSummary(msgspec.Struct, frozen=True):
    """The outcome of a stage's iteration."""

    rounds: int
    epochs: list[int]
    """The epochs that were committed: each one, or with a staleness the last one of each block."""

    feedback: list[int]
    """The records that were fed back, by committed epoch."""

    criteria: list[int]
    """The records of its termination criteria, by committed epoch, if it has any."""

    seconds: float
    reason: str
    """Why it ended."""

    gauges: dict[str, list[float | None]] = {}
    """The largest value of each gauge, by committed epoch; None where it had none."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The description of an intermediate. `fingerprint` covers code, configuration, upstream and source snapshot."""

    version: int = 1
    pipeline: str
    stage: str
    partition: str
    run: str
    fingerprint: str
    schema: str
    streams: list[StoredStream]
    rows: int
    bytes: int
    data: str
    """The folder of the attempt that was committed."""
    files: list[StoredFile]
    last_event_times: dict[str, int] = {}
    counters: dict[str, int] = {}
    gauges: dict[str, GaugeRange] = {}
    meters: dict[str, MeterCount] = {}
    histograms: dict[str, Histogram] = {}
    seconds: float = 0.0
    created: float = 0.0
    carried_from: str = ""
    """The run of the partition before whose state this one began with, where state is carried."""

    ended: bool = False
    """Whether the input ended with this partition, so that the carried state has no open windows and no timers."""

    groups: int = 0
    """How many key groups carried state is spread over."""

    subtasks: dict[str, int] = {}
    """How many subtasks carried operator state is of, by the uid of its operator."""

    local_global: list[str] = msgspec.field(name="portable", default_factory=list)
    """The uids of the column aggregates whose carried state is in key groups, not in Catalyst's form."""

    together: int = 1
    """How many partitions one Spark job materialized; `seconds` are this one's share."""

    diverted: dict[str, int] = {}
    """The malformed rows that each source has set aside, by its uid; 0 where all rows fit."""

    positions: dict[str, Position] = {}
    """The position in each of the stage's sources, by uid, where the run leaves a savepoint."""

    read: dict[str, Read] = {}
    """What was read of each of the stage's sources that can tell, by the source's name."""

    versions: dict[str, int] = {}
    """The versions that the stage's sinks made of their tables, by sink name, where these have versions."""

    iterations: dict[str, IterationSummary] = {}
    """The outcomes of the stage's iterations, by name."""

    lacking: dict[str, str] = {}
    """How many files of a source lack a column, and which, by both: it is None in their rows."""

    sinks: dict[str, str] = {}
    """Where the stage's sinks wrote: sink name to location."""

    def rates(self) -> dict[str, float]:
        """Return the events per second that each meter has marked, over the whole run of the stage."""
        return {name: meter.count / self.seconds if self.seconds else 0.0 for name, meter in self.meters.items()}

    def summary_of(self, uid: str, name: str) -> IterationSummary:
        """Return the outcome of one of the stage's iterations."""
        return self.iterations.get(uid) or self.iterations[name]


class Stops(msgspec.Struct, frozen=True):
    """Where the sources of a stage stop in a run, by uid."""

    positions: dict[str, Position]


class Calls(msgspec.Struct, frozen=True):
    """The code of a stage that could not run on columns."""

    code: str


class Prepared(msgspec.Struct, frozen=True):
    """An attempt with complete data, which sinks may not have yet; `code` is the code that made it."""

    code: str
    manifest: Manifest


@dataclass(frozen=True)
class Address:
    """The place of an intermediate."""

    pipeline: str
    stage: str
    run: str
    partition: str = WHOLE


class IntermediateStore:
    """Intermediates below one folder or bucket."""

    def __init__(self, root: str) -> None:
        self.root = storage_path(root, "intermediate storage")
        self._before: dict[str, str | None] = {}
        """The version of the manifest that an attempt found, by the folder of its data."""

    def folder(self, address: Address) -> UPath:
        """Return the folder of one stage of one run; raises where a segment of the address is not safe in a path."""
        path = self.root
        for segment in (address.pipeline, address.stage, address.partition, address.run):
            if not _SEGMENT.fullmatch(segment) or segment in (".", ".."):
                raise ConfigurationError(
                    f"'{segment}' cannot be part of a storage path; use letters, digits and _ . = + : % ~ -"
                )
            path = path / segment
        return path

    def new_attempt(self, address: Address) -> UPath:
        """Return a folder for one attempt's data. No two share one, so a worker that outlives its run does no harm."""
        path = self.folder(address) / f"data-{uuid4().hex[:12]}"
        self._before[path.name] = self._version(address)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def files(self, attempt: UPath) -> list[StoredFile]:
        """The data files of an attempt; raises `LeaseLostError` where they are being removed for those of another."""
        try:
            files = [StoredFile(path, size) for path, size in sizes(attempt).items() if is_data(path)]
        except FileNotFoundError as error:
            raise LeaseLostError(
                f"{attempt} was removed: another attempt of the stage was committed meanwhile; this one stops and"
                " writes nothing more"
            ) from error
        return sorted(files, key=lambda f: f.path)

    def prepare(self, address: Address, manifest: Manifest, code: str) -> None:
        """Record an attempt with complete data before its sinks are written, for the attempt after this one."""
        put(self.folder(address) / PREPARED, msgspec.json.encode(Prepared(code, manifest)))

    def prepared(self, address: Address) -> Prepared | None:
        """Return what an earlier attempt of this run prepared, if it still stands."""
        prepared = _decoded(self.folder(address) / PREPARED, Prepared)
        return prepared if prepared is not None and self._stands(prepared.manifest) else None

    def note_stops(self, address: Address, stops: Mapping[str, Position]) -> None:
        """Record where a run's sources stop, by uid, for its retries and its re-executions to stop there too."""
        put(self.folder(address) / STOPS, msgspec.json.encode(Stops(dict(stops))))

    def stops(self, address: Address) -> dict[str, Position]:
        """Return where the sources of a run stopped, by uid; empty where that is not known, or was freed."""
        noted = _decoded(self.folder(address) / STOPS, Stops)
        return {} if noted is None else noted.positions

    def note_calls(self, pipeline: str, stage: str, code: str) -> None:
        """Record that a stage of this code has to call its functions, so that its next runs begin with that."""
        put(self._calls(pipeline, stage), msgspec.json.encode(Calls(code)))

    def calls(self, pipeline: str, stage: str) -> str | None:
        """Return the code of a stage that has to call its functions, if that is known of any."""
        noted = _decoded(self._calls(pipeline, stage), Calls)
        return None if noted is None else noted.code

    def _calls(self, pipeline: str, stage: str) -> UPath:
        return self.folder(Address(pipeline, ".calls", stage)).parent / f"{stage}.json"

    def commit(self, address: Address, manifest: Manifest) -> Manifest:
        """Commit an attempt atomically as the intermediate, and return it; the data of other attempts is removed.

        Where another attempt of the same code and input was committed since this one began, that one stays and is
        returned: a process that was paused, and wakes up after its step was retried, changes nothing.
        """
        folder = self.folder(address)
        before = self._before.pop(manifest.data) if manifest.data in self._before else self._version(address)
        try:
            conditional.write(folder / MANIFEST, _encoded(manifest), before)
        except FileExistsError as error:
            committed = self.find(address)
            if committed is None or committed.data != manifest.data:
                remove_tree(folder / manifest.data)
            if committed is None or committed.fingerprint != manifest.fingerprint:
                raise LeaseLostError(
                    f"{manifest.pipeline}: another attempt of stage '{manifest.stage}' in run {manifest.run} was"
                    " committed meanwhile; this one stops and writes nothing more"
                ) from error
            return committed
        for name in children(folder):
            if name.startswith("data-") and name != manifest.data:
                remove_tree(folder / name)
            elif name == PREPARED:
                (folder / name).unlink(missing_ok=True)
        return manifest

    def _version(self, address: Address) -> str | None:
        stored = conditional.read(self.folder(address) / MANIFEST)
        return stored and stored.version

    def find(self, address: Address) -> Manifest | None:
        """Return the manifest, or None where there is none or its data is gone or damaged."""
        manifest = self.manifest(address)
        return manifest if manifest is not None and self._stands(manifest) else None

    def _stands(self, manifest: Manifest) -> bool:
        try:
            stored_bytes = sizes(self.data(manifest))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return all(stored_bytes.get(f.path) == f.bytes for f in manifest.files)

    def manifest(self, address: Address) -> Manifest | None:
        """Return the manifest, whether its data stands or not; None where none can be read."""
        return _decoded(self.folder(address) / MANIFEST, Manifest)

    def newest(self, pipeline: str, stage: str, partition: str, fingerprint: str) -> Manifest | None:
        """Return the last manifest that any run committed of a stage, of one code and input, and whose data stands."""
        return _newest(m for m in self._standing(pipeline, stage, partition) if m.fingerprint == fingerprint)

    def newest_holding(self, pipeline: str, partition: str, streams: Set[tuple[str, str | None]]) -> Manifest | None:
        """The last manifest that any run committed of any stage that holds these streams, and whose data stands."""
        manifests = (m for stage in children(self.root / pipeline) for m in self._standing(pipeline, stage, partition))
        return _newest(m for m in manifests if streams <= {(s.uid, s.tag) for s in m.streams})

    def _standing(self, pipeline: str, stage: str, partition: str) -> Iterator[Manifest]:
        for run in children(self.folder(Address(pipeline, stage, "any", partition)).parent):
            manifest = self.find(Address(pipeline, stage, run, partition))
            if manifest is not None:
                yield manifest

    def link(self, address: Address, manifest: Manifest) -> None:
        """Share another run's intermediate with this run; the data stays where it is."""
        folder = self.folder(address)
        folder.mkdir(parents=True, exist_ok=True)
        put(folder / MANIFEST, _encoded(manifest))

    def data(self, manifest: Manifest) -> UPath:
        """Return the folder that holds a manifest's Parquet files."""
        return self.folder(Address(manifest.pipeline, manifest.stage, manifest.run, manifest.partition)) / manifest.data

    def set_aside(self, manifest: Manifest, damaged: str) -> None:
        """Move a data file that cannot be read out of its intermediate, which all runs that share it then lack."""
        folder = self.data(manifest)
        for file in manifest.files:
            if damaged.endswith(f"/{manifest.data}/{file.path}"):
                path = folder / file.path
                path.rename(path.with_name(f"_damaged-{path.name}"))

    def remove(self, address: Address) -> None:
        """Free an intermediate: first the manifest, so that no reader finds half of one."""
        folder = self.folder(address)
        if (folder / MANIFEST).exists():
            (folder / MANIFEST).unlink()
        remove_tree(folder)


S = TypeVar("S", bound=msgspec.Struct)


def _decoded(file: UPath, kind: type[S]) -> S | None:
    try:
        return msgspec.json.decode(read_whole(file), type=kind)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None


def _newest(manifests: Iterable[Manifest]) -> Manifest | None:
    return max(manifests, key=lambda manifest: manifest.created, default=None)


def _encoded(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)


def now() -> float:
    """Return seconds since the epoch."""
    return time.time()


CODEC = "lz4_raw"
"""The codec of intermediates, which are written once and read once, soon.

Measured against zstd and snappy, it costs a stage and its reader the least time.
"""


_COMMITTED_BY_TASKS = {
    "mapreduce.fileoutputcommitter.algorithm.version": 2,
    "mapreduce.fileoutputcommitter.marksuccessfuljobs": False,
}
"""Lets each task move its file to its place, where otherwise the driver moves all files once more.

To move a file in a bucket is to copy it. A worker that was given up, and wakes up after the manifest was written, may
move another file over that of its successor; then the manifest says another size, and the intermediate is damaged.
"""


def write(frame: DataFrame, attempt: UPath) -> None:
    """Write one partition into the folder of an attempt."""
    options = _COMMITTED_BY_TASKS if is_in_object_store(attempt) else {}
    frame.write.mode("overwrite").options(compression=CODEC, **options).parquet(for_spark(attempt))


def write_partitions(frame: DataFrame, attempts: Sequence[UPath]) -> dict[int, UPath]:
    """Write the rows of several partitions, by their partition index, into the folders of their attempts, in one job.

    Returns the folders that got rows.
    """
    together = attempts[0].with_name(f"{attempts[0].name}-and-others")
    try:
        options = in_place.options(frame.sparkSession, together)
        writer = frame.hint("rebalance", PARTITION_INDEX).write.mode("overwrite").option("compression", CODEC)
        writer.partitionBy(PARTITION_INDEX).options(**options).parquet(for_spark(together))
        written = in_place.take(together) if options else sizes(together)
        of_partitions = {path: int(match[1]) for path in written if (match := _PARTITION.search(path)) is not None}
        _move({together / path: attempts[index] / PurePosixPath(path).name for path, index in of_partitions.items()})
        return {index: attempts[index] for index in sorted(set(of_partitions.values()))}
    finally:
        remove_tree(together)


_PARTITION = re.compile(rf"(?:^|/){PARTITION_INDEX}=(\d+)/")
"""In the path of a file, the index of its partition."""

_AT_ONCE = 8
"""Files that a store copies at once."""


def _move(files: Mapping[UPath, UPath]) -> None:
    """Move files, each by itself: not every file system can move a folder.

    A store of objects copies them, several at once; what is copied goes with its folder.
    """
    some = next(iter(files), None)
    if some is not None and is_in_object_store(some):
        origins, targets = ([path.path for path in paths] for paths in (files, files.values()))
        some.fs.copy(origins, targets, batch_size=_AT_ONCE)
        return
    for origin, target in files.items():
        origin.rename(target)


def read(
    spark: SparkSession,
    store: IntermediateStore,
    manifests: Sequence[Manifest],
    uid: str,
    tag: str | None,
    layout: StreamLayout,
    further: Sequence[str] = (),
) -> DataFrame:
    """Return a stream of an intermediate in the columns of its layout, and `further` ones.

    Of several partitions' intermediates, each row has its partition index.
    """
    axis = PartitionAxis(len(manifests))
    pass_through = [*further, *axis.columns]
    alike: dict[tuple[str, int, bool], dict[int, UPath]] = {}
    for index, manifest in enumerate(manifests):
        number = next(i for i, s in enumerate(manifest.streams) if (s.uid, s.tag) == (uid, tag))
        folders = alike.setdefault((manifest.schema, number, len(manifest.streams) == 1), {})
        if manifest.files:
            folders[index] = store.data(manifest)
    frames = []
    for (schema, number, alone), folders in alike.items():
        rows = indexed(spark, schema, folders) if axis.enabled else _parquet(spark, schema, list(folders.values()))
        names = layout.schema.names
        if not alone:
            rows = rows.where(f"{OUTPUT} = {number}")
            names = [f"{output_column(number)}.{name}" for name in names]
        frames.append(rows.select(*names, *pass_through))
    return functools.reduce(lambda some, more: some.unionByName(more), frames)


def indexed(spark: SparkSession, schema: str, folders: Mapping[int, UPath]) -> DataFrame:
    """Return the rows of several partitions' folders, as written, with their partition index.

    The name of a row's folder says which it is: no two attempts share one.
    """
    from pyspark.sql import functions as F

    rows = _parquet(spark, schema, list(folders.values()))
    if not folders:
        return rows.withColumn(PARTITION_INDEX, F.lit(0))
    indexes = F.create_map(*[F.lit(v) for index, folder in folders.items() for v in (folder.name, index)])
    index_of_folder = F.try_element_at(indexes, F.regexp_extract("_metadata.file_path", r"/(data-[0-9a-f]+)/[^/]*$", 1))
    unknown = F.raise_error(F.concat(F.lit("a file of no partition: "), "_metadata.file_path")).cast("int")
    return rows.withColumn(PARTITION_INDEX, F.coalesce(index_of_folder, unknown))


def counted(rows: DataFrame, partitions: int, streams: int) -> list[list[int]]:
    """Return how many rows each stream has in each partition."""
    alone = streams == 1
    by = [PARTITION_INDEX] if alone else [PARTITION_INDEX, OUTPUT]
    counts = {
        (row[PARTITION_INDEX], 0 if alone else row[OUTPUT]): row["count"] for row in rows.groupBy(*by).count().collect()
    }
    return [[counts.get((index, stream), 0) for stream in range(streams)] for index in range(partitions)]


def _parquet(spark: SparkSession, schema: str, folders: Sequence[UPath]) -> DataFrame:
    """Files in one scan, which may put those of several partitions into one task."""
    from pyspark.sql.types import StructType

    struct = StructType.fromJson(json.loads(schema))
    if not folders:
        return spark.createDataFrame([], struct)
    return load(spark.read.format("parquet").schema(struct), folders)
