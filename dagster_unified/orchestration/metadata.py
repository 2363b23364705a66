"""What a materialized stage shows in the Dagster UI: numbers, links and plots."""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Mapping, Sequence
from io import BytesIO
from math import nan
from statistics import mean
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
from dagster_unified.engine.batch.run import waiting
from dagster_unified.graph.drawing import as_svg
from dagster_unified.graph.nodes import Node
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
    previews: Mapping[str, pa.Table],
) -> dict[str, Any]:
    """Return a stage's metadata: counts, schema, duration, metrics, job graph, previews, and known column lineage.

    `asset_of` returns the asset that holds what an operator before the stage produces, None where there is none.
    """
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
    metadata.update(columns_metadata(output_records(plan, region)))
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
    for sink, location in manifest.sinks.items():
        metadata[f"written to ({sink})"] = MetadataValue.path(location)
    for sink, table in previews.items():
        metadata[f"preview of {sink}"] = preview(table)
    lineage = dagster_lineage(plan, region, asset_of)
    if lineage is not None:
        metadata["dagster/column_lineage"] = lineage
    return metadata


def job_graph(plan: Plan, region: Region) -> MarkdownMetadataValue:
    """Return the plan as a picture, with the stage highlighted."""
    drawn = base64.b64encode(as_svg(plan, region).encode()).decode()
    return MetadataValue.md(f"![job graph of {plan.name}](data:image/svg+xml;base64,{drawn})")


def output_records(plan: Plan, region: Region) -> RecordType | None:
    """Return the record type of a stage's first stream."""
    if region.outputs:
        return plan.graph.port_type(region.outputs[0].node, region.outputs[0].tag)
    edge = plan.graph.inputs(region.sinks[0])[0]
    return plan.graph.records_of(edge)


def columns_metadata(records: RecordType | None) -> Mapping[str, Any]:
    """Return the columns of a record type, where it is known, under the name that Dagster shows them by."""
    return {} if records is None else {"dagster/column_schema": table_schema(records.schema)}


def table_schema(schema: pa.Schema) -> TableSchema:
    """Return an Arrow schema as Dagster's."""
    return TableSchema(
        [TableColumn(f.name, str(f.type), constraints=TableColumnConstraints(nullable=f.nullable)) for f in schema]
    )


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


def dagster_lineage(
    plan: Plan, region: Region, asset_of: Callable[[Node], AssetKey | None]
) -> TableColumnLineage | None:
    """Where a stage's columns come from, as far as the graph shows it."""
    last = region.outputs[0].node if region.outputs else plan.graph.inputs(region.sinks[0])[0].source
    if (region.outputs and region.outputs[0].tag) or last not in region.nodes:
        return None
    columns = column_lineage(plan, region, last)
    if columns is None:
        return None
    deps: dict[str, list[TableColumnDep]] = {}
    for name, origins in columns.items():
        assets = [(asset_of(plan.graph.node(node)), column) for node, column in sorted(origins)]
        deps[name] = [TableColumnDep(key, column) for key, column in assets if key is not None]
    return TableColumnLineage(deps)
