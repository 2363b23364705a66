"""What a materialized stage shows in the Dagster UI: numbers, links and plots."""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Mapping, Sequence
from io import BytesIO
from math import nan
from pathlib import PurePosixPath
from statistics import mean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from dagster import (
    AssetKey,
    MarkdownMetadataValue,
    MetadataValue,
    TableColumn,
    TableColumnConstraints,
    TableColumnDep,
    TableColumnLineage,
    TableRecord,
    TableSchema,
)
from upath import UPath

from dagster_unified.engine.batch.intermediates import Manifest
from dagster_unified.engine.batch.region import LeavingStream
from dagster_unified.engine.batch.run import waiting
from dagster_unified.graph.connectors import Place
from dagster_unified.graph.drawing import as_svg
from dagster_unified.graph.nodes import Node, Port, SinkNode
from dagster_unified.graph.plan import Plan, Region, column_lineage
from dagster_unified.operators.layout import CARRIED
from dagster_unified.operators.metrics import shown
from dagster_unified.records import RecordType, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dagster_unified.engine.batch.intermediates import IterationSummary

SHOWN = 90
"""Partitions in one picture: those that ran last of them, and as many before as there is room for."""

OPERATORS = 8
"""Operators in one picture: those whose fullest group is furthest above the mean."""

_GAUGES = 6
"""Gauges in one picture: the first by their names."""

_LABELS = 6

ROWS = "dagster/row_count"


def around(keys: Sequence[str], finished: Collection[str]) -> Sequence[str]:
    """Return the partitions in a picture after a run that has `finished` some; `keys` are all, in their order."""
    last = max((i for i, key in enumerate(keys) if key in finished), default=len(keys) - 1)
    return keys[max(0, last + 1 - SHOWN) :][:SHOWN]


def rows_per_partition(
    keys: Sequence[str], shown: Mapping[str, Mapping[str, Any]], finished: Collection[str]
) -> MarkdownMetadataValue:
    """Return the picture, of the rows that materializations show."""
    counts = {key: _number(shown[key].get(ROWS)) for key in around(keys, finished) if key in shown}
    return picture({key: count for key, count in counts.items() if count is not None}, finished)


def _number(value: Any) -> int | None:
    number = getattr(value, "value", value)
    return number if isinstance(number, int) else None


def picture(rows: Mapping[str, int], highlighted: Collection[str]) -> MarkdownMetadataValue:
    """Return a bar for each partition; the highlighted ones in another colour."""
    from matplotlib.figure import Figure  # of its own, not pyplot's: steps may run in threads

    figure = Figure(figsize=(8, 2.2), dpi=90, layout="tight")
    axes = figure.subplots()
    axes.bar(
        range(len(rows)),
        list(rows.values()),
        width=0.8,
        color=["#4f43dd" if key in highlighted else "#b8b5d6" for key in rows],
    )
    step = max(1, -(-len(rows) // _LABELS))
    axes.set_xticks(range(0, len(rows), step), list(rows)[::step], fontsize=8)
    _counting(axes, "rows")
    return _drawn(figure, "rows per partition")


def keys_per_group(spread: Mapping[str, Sequence[int]]) -> MarkdownMetadataValue:
    """How many keys each key group has, by operator: a chart for each, in which a group is a bar, and the mean a line.

    Of many operators the `OPERATORS` most uneven ones are shown.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    shown = sorted(spread, key=lambda name: _unevenness(spread[name]), reverse=True)[:OPERATORS]
    figure = Figure(figsize=(8, 1.7 * len(shown) + 0.3), dpi=90, layout="tight")
    for axes, name in zip(figure.subplots(len(shown), squeeze=False).flat, shown, strict=True):
        keys = spread[name]
        edges = [group - 0.5 for group in range(len(keys) + 1)]
        axes.stairs(keys, edges, fill=True, color="#4f43dd")
        axes.axhline(mean(keys), color="#e08a1e", linewidth=1)
        axes.set_xlim(edges[0], edges[-1])
        axes.set_ylim(0, 1.05 * max(1, *keys))
        axes.set_title(name, fontsize=9, loc="left", parse_math=False)
        axes.xaxis.set_major_locator(MaxNLocator(_LABELS, integer=True))
        axes.tick_params(axis="x", labelsize=8)
        _counting(axes, "keys")
    axes.set_xlabel("key group", fontsize=8)
    return _drawn(figure, "keys per key group")


def rounds(iteration: IterationSummary) -> MarkdownMetadataValue:
    """How many records each round of an iteration fed back, how many its termination criteria had, and its gauges."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    gauges = list(iteration.gauges.items())[:_GAUGES]
    figure = Figure(figsize=(8, 2.2 + 1.8 * len(gauges)), dpi=90, layout="tight")
    records, *curves = figure.subplots(1 + len(gauges), squeeze=False, sharex=True)[:, 0]
    records.plot(iteration.epochs, iteration.feedback, color="#4f43dd", marker=".", label="fed back")
    if iteration.criteria:
        records.plot(iteration.epochs, iteration.criteria, color="#e08a1e", marker=".", label="termination criteria")
    records.legend(fontsize=8, frameon=False)
    _counting(records, "records")
    for axes, (name, values) in zip(curves, gauges, strict=True):
        axes.plot(iteration.epochs, [nan if value is None else value for value in values], color="#4f43dd", marker=".")
        axes.set_title(name, fontsize=9, loc="left", parse_math=False)
        _plain(axes)
    last = curves[-1] if curves else records
    last.xaxis.set_major_locator(MaxNLocator(_LABELS, integer=True))
    last.set_xlabel("epoch", fontsize=8)
    return _drawn(figure, "rounds")


def _unevenness(keys: Sequence[int]) -> float:
    """Return the fullest group relative to the mean; 0 where there are no keys."""
    return max(keys) / mean(keys) if any(keys) else 0.0


def _counting(axes: Axes, what: str) -> None:
    """Label the vertical axis with a count, and remove the frame."""
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.set_ylabel(what, fontsize=8)
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _drawn(figure: Figure, title: str) -> MarkdownMetadataValue:
    drawn = BytesIO()
    figure.savefig(drawn, format="png")
    return MetadataValue.md(f"![{title}](data:image/png;base64,{base64.b64encode(drawn.getvalue()).decode()})")


MADE_BY, CARRIED_FROM = "made by run", "carried from run"
"""Of a partition with carried state: the run that left it, and the run that had left the state it began with."""


def stage_metadata(
    plan: Plan,
    region: Region,
    manifest: Manifest,
    data: UPath,
    asset_of: Callable[[Node], AssetKey | None],
) -> dict[str, Any]:
    """Return a stage's metadata: counts, schema, duration, metrics, job graph, and known column lineage.

    `asset_of` returns the asset that holds what an operator before the stage produces, None where there is none.
    """
    left = left_by(plan, region)
    metadata: dict[str, Any] = {
        "dagster/row_count": manifest.rows,
        "bytes": manifest.bytes,
        "duration_seconds": round(manifest.seconds, 3),
        "fingerprint": manifest.fingerprint,
        "intermediate": MetadataValue.path(str(data.parent)),
        "job_graph": job_graph(plan, region),
    }
    if manifest.together > 1:
        metadata["partitions of its Spark job"] = manifest.together
    metadata.update(columns_metadata(plan.graph.port_type(left.node, left.tag)))
    for stream in manifest.streams if len(manifest.streams) > 1 else []:
        if stream.tag == CARRIED and manifest.groups:
            metadata[f"pages of state of {stream.uid}"] = stream.rows
        elif stream.tag != CARRIED:
            metadata[f"rows of {stream.uid}" + (f" / {stream.tag}" if stream.tag else "")] = stream.rows
    if manifest.groups:
        metadata[MADE_BY] = MetadataValue.dagster_run(manifest.run)
    if manifest.carried_from:
        metadata[CARRIED_FROM] = MetadataValue.dagster_run(manifest.carried_from)
    metadata.update(shown(manifest.counters, manifest.gauges, manifest.rates(), manifest.histograms))
    metadata.update(manifest.lacking)
    waits = [record.describe() for record in waiting(plan, region, manifest)]
    if waits:
        metadata["records held back"] = MetadataValue.text("\n".join(waits))
    for name, iteration in manifest.iterations.items():
        metadata[f"rounds of {name}"] = iteration.rounds
        metadata[f"why {name} ended"] = iteration.reason
        metadata[f"records by round of {name}"] = rounds(iteration)
    if manifest.read:
        metadata["read"] = MetadataValue.json(manifest.read)
    return metadata | lineage_metadata(plan, region, left, asset_of)


def table_metadata(
    plan: Plan,
    region: Region,
    manifest: Manifest,
    sink: SinkNode,
    stage: AssetKey,
    asset_of: Callable[[Node], AssetKey | None],
    first: pa.Table | None,
) -> dict[str, Any]:
    """Return the metadata of a table that a stage wrote: rows, place, columns, known column lineage, its first rows.

    `stage` is the asset of the stage, which holds the same columns unless several streams leave it.
    """
    edge = plan.graph.inputs(sink.id)[0]
    rows = {(stream.uid, stream.tag): stream.rows for stream in manifest.streams}
    source = LeavingStream.to_sink(plan, region, sink)
    metadata: dict[str, Any] = {
        ROWS: rows.get((source.uid, source.tag), manifest.rows),
        "written to": MetadataValue.path(manifest.sinks[sink.name]),
        "made by run": MetadataValue.dagster_run(manifest.run),
        **columns_metadata(plan.graph.written_to(sink.id)),
    }
    if sink.name in manifest.versions:
        metadata["version"] = manifest.versions[sink.name]
    if first is not None:
        metadata["preview"] = preview(first)
    if edge.port != left_by(plan, region):
        return metadata | lineage_metadata(plan, region, edge.port, asset_of)
    names = plan.graph.written_to(sink.id).names
    lineage = TableColumnLineage({name: [TableColumnDep(stage, name)] for name in names})
    return metadata | {"dagster/column_lineage": lineage}


def job_graph(plan: Plan, region: Region) -> MarkdownMetadataValue:
    """Return the plan as a picture, with the stage highlighted."""
    drawn = base64.b64encode(as_svg(plan, region).encode()).decode()
    return MetadataValue.md(f"![job graph of {plan.name}](data:image/svg+xml;base64,{drawn})")


def left_by(plan: Plan, region: Region) -> Port:
    """Return a stage's first stream."""
    return region.outputs[0] if region.outputs else plan.graph.inputs(region.sinks[0])[0].port


def columns_metadata(records: RecordType | None) -> Mapping[str, Any]:
    """Return the columns of a record type, where it is known, under the name that Dagster shows them by."""
    return {} if records is None else {"dagster/column_schema": table_schema(records.schema, records.descriptions)}


def table_schema(schema: pa.Schema, descriptions: Mapping[str, str] = MappingProxyType({})) -> TableSchema:
    """Return an Arrow schema as Dagster's."""
    return TableSchema(
        [
            TableColumn(f.name, str(f.type), descriptions.get(f.name), TableColumnConstraints(nullable=f.nullable))
            for f in schema
        ]
    )


def identity_metadata(place: Place, kind: str) -> Mapping[str, Any]:
    """Return the identity of a place under the names by which Dagster knows it."""
    uri = PurePosixPath(place.uri).as_uri() if place.uri.startswith("/") else place.uri
    shown = {"dagster/table_name": place.table, "dagster/uri": uri}
    return {**shown, "dagster/storage_kind": kind} if kind else shown


def preview(table: pa.Table) -> Any:
    """Return the first rows of a table."""
    rows = [
        TableRecord(
            {
                k: (
                    v
                    if isinstance(v, (str, int, float, bool, type(None)))
                    else shorten(v, 80)
                    if isinstance(v, (list, dict))
                    else str(v)
                )
                for k, v in row.items()
            }
        )
        for row in table.to_pylist()
    ]
    return MetadataValue.table(records=rows, schema=table_schema(table.schema))


def lineage_metadata(
    plan: Plan, region: Region, stream: Port, asset_of: Callable[[Node], AssetKey | None]
) -> dict[str, Any]:
    """Where the columns of a stream come from, as far as the graph shows it."""
    if stream.tag or stream.node not in region.nodes:
        return {}
    columns = column_lineage(plan, region, stream.node)
    if columns is None:
        return {}
    deps: dict[str, list[TableColumnDep]] = {}
    for name, origins in columns.items():
        assets = [(asset_of(plan.graph.node(node)), column) for node, column in sorted(origins)]
        deps[name] = [TableColumnDep(key, column) for key, column in assets if key is not None]
    return {"dagster/column_lineage": TableColumnLineage(deps)}
