"""Where the rows are that sources with `on_malformed="divert"` set aside, and what is known of each.

Both modes keep them as Parquet files with the columns `file`, `line`, `content` and `reason`: BATCH by partition, below
the intermediates, where the rows of the latest run stand; STREAMING by epoch, in the checkpoint directory. Retention
frees neither.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pyarrow as pa

from dagster_unified.connectors.files.text_sources import TextSource
from dagster_unified.connectors.files.texts import Rows, explained, squeezed
from dagster_unified.connectors.protocol.source import SparkSource
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.graph.nodes import SourceNode
from dagster_unified.graph.plan import Plan
from dagster_unified.storage.paths import for_spark, remove_tree

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from upath import UPath

    from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory

SCHEMA = pa.schema([("file", pa.string()), ("line", pa.int64()), ("content", pa.string()), ("reason", pa.string())])
"""`line` is null where no line of the file has the content.

Spark gives a row that it could read field by field, and written anew it may differ from its line.
"""

FOLDER = "~malformed"
"""Next to the stages, of which none can have this name."""

_SCHEME = re.compile("^file:/+")

_TYPES = "file string, line long, content string, reason string"


@dataclass(frozen=True)
class Diverted:
    """The rows that one source has set aside. `origin` is their origin in `table`: a partition, or an epoch."""

    source: str
    mode: str
    folder: UPath
    origin: str
    kind: Rows | None
    """The layout of rows that are read from texts."""

    def table(self, most: int) -> pa.Table:
        """Return the latest rows, at most so many."""
        import pyarrow.parquet as pq

        schema = SCHEMA.insert(0, pa.field(self.origin, pa.string()))
        table = schema.empty_table()
        for part in reversed(self._parts()):
            for file in sorted(part.glob("*.parquet")):
                with file.open("rb") as opened:
                    rows = pq.read_table(opened, schema=SCHEMA)
                named = rows.add_column(
                    0, schema.field(0), pa.array([part.name.partition("=")[2]] * len(rows), pa.string())
                )
                table = pa.concat_tables([table, named])
                if len(table) >= most:
                    return table.slice(0, most)
        return table

    def rows(self) -> int:
        """Return how many there are."""
        import pyarrow.parquet as pq

        total = 0
        for file in (f for part in self._parts() for f in part.glob("*.parquet")):
            with file.open("rb") as opened:
                total += int(pq.read_metadata(opened).num_rows)
        return total

    def _parts(self) -> list[UPath]:
        if not self.folder.exists():
            return []
        return sorted(
            (f for f in self.folder.iterdir() if f.name.startswith(f"{self.origin}=")),
            key=lambda f: _in_order(f.name.partition("=")[2]),
        )


def diverting(plan: Plan) -> list[SourceNode]:
    """Return the sources that set malformed rows aside."""
    return [
        node for node in plan.graph.sources if isinstance(node.source, SparkSource) and node.source.keeps_malformed()
    ]


def in_batch(store: IntermediateStore, pipeline: str, source: SourceNode) -> Diverted:
    """Return the rows that BATCH runs have set aside."""
    return Diverted(source.name, "BATCH", store.root / pipeline / FOLDER / source.uid, "partition", _kind(source))


def in_streaming(directory: CheckpointDirectory, source: SourceNode) -> Diverted:
    """Return the rows that the STREAMING job has set aside."""
    return Diverted(source.name, "STREAMING", directory.path / "malformed" / source.uid, "epoch", _kind(source))


def _kind(source: SourceNode) -> Rows | None:
    return source.source.rows if isinstance(source.source, TextSource) else None


def keep(frame: DataFrame, rows: int, diverted: Diverted, key: str) -> None:
    """Replace the malformed rows (file, row, reason) of a partition or an epoch, and find their lines."""
    target = diverted.folder / f"{diverted.origin}={key}"
    if rows:
        with_lines = partial(_with_lines, diverted.kind)
        frame.repartition("file").mapInArrow(with_lines, _TYPES).write.mode("overwrite").parquet(for_spark(target))
    else:
        remove_tree(target)


def _with_lines(kind: Rows | None, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Look the rows up in their files, on a worker."""
    taken: dict[str, set[int]] = {}
    for batch in batches:
        rows = batch.to_pylist()
        by_file: dict[str, list[int]] = {}
        for place, row in enumerate(rows):
            by_file.setdefault(row["file"], []).append(place)
        lines: dict[int, int] = {}
        for file, places in by_file.items():
            lines |= _lines_of(file, {place: rows[place]["row"] for place in places}, taken.setdefault(file, set()))
        columns = [
            [_SCHEME.sub("/", unquote(row["file"])) for row in rows],
            [lines.get(place) for place in range(len(rows))],
        ]
        if kind is not None:
            for row in rows:
                row["reason"] = explained(kind, row["file"], row["row"], row["reason"])
        columns += [[row["row"] for row in rows], [row["reason"] for row in rows]]
        yield pa.RecordBatch.from_arrays(
            [pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
        )


def _lines_of(file: str, contents: Mapping[int, str], taken: set[int]) -> dict[int, int]:
    """Return the numbers of the lines with these contents, each line for one of them.

    There are none where the file cannot be read from here.
    """
    waiting: dict[str, list[int]] = {}
    for place, content in contents.items():
        waiting.setdefault(squeezed(content), []).append(place)
    line_numbers: dict[int, int] = {}
    try:
        for number, line in enumerate(_read(file), 1):
            text = squeezed(line)
            places = waiting.get(text)
            if places and number not in taken:
                taken.add(number)
                line_numbers[places.pop(0)] = number
                if not places:
                    del waiting[text]
            if not waiting:
                break
    except (
        Exception
    ):  # a storage that only Spark reads, or a file that is gone: what the row holds is known all the same
        return line_numbers
    return line_numbers


def _read(file: str) -> Iterator[str]:
    import fsspec

    if not file:
        return
    with fsspec.open(
        unquote(file).replace("s3a://", "s3://"), "rt", encoding="utf-8", errors="replace", compression="infer"
    ) as opened:
        yield from opened


def _in_order(key: str) -> tuple[int, str]:
    return (int(key), "") if key.isdigit() else (0, key)
