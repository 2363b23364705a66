"""What a materialized stage shows in the Dagster UI."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

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

from dagster_unified.engine.batch.carried import waiting
from dagster_unified.engine.batch.intermediates.store import Manifest
from dagster_unified.graph.drawing import as_svg
from dagster_unified.graph.lineage import column_lineage
from dagster_unified.graph.nodes import Node
from dagster_unified.graph.plan import Plan, Region
from dagster_unified.operators.layout import CARRIED
from dagster_unified.operators.metrics import shown
from dagster_unified.orchestration.plot import rounds
from dagster_unified.records import RecordType, shorten

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
    """A stage's metadata: counts, schema, duration, metrics, job graph, previews, and known column lineage.

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
    """The plan as a picture, with the stage highlighted."""
    drawn = base64.b64encode(as_svg(plan, region).encode()).decode()
    return MetadataValue.md(f"![job graph of {plan.name}](data:image/svg+xml;base64,{drawn})")


def output_records(plan: Plan, region: Region) -> RecordType | None:
    """The record type of a stage's first stream."""
    if region.outputs:
        return plan.graph.port_type(region.outputs[0].node, region.outputs[0].tag)
    edge = plan.graph.inputs(region.sinks[0])[0]
    return plan.graph.records_of(edge)


def columns_metadata(records: RecordType | None) -> Mapping[str, Any]:
    """The columns of a record type, where it is known, under the name that Dagster shows them by."""
    return {} if records is None else {"dagster/column_schema": table_schema(records.schema)}


def table_schema(schema: pa.Schema) -> TableSchema:
    """An Arrow schema as Dagster's."""
    return TableSchema(
        [TableColumn(f.name, str(f.type), constraints=TableColumnConstraints(nullable=f.nullable)) for f in schema]
    )


def preview(table: pa.Table) -> Any:
    """The first rows of a table."""
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
