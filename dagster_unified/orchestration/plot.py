"""Rows per partition as a picture, which Dagster shows in a materialization's metadata."""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from io import BytesIO

from dagster import AssetKey, DagsterInstance, MarkdownMetadataValue, MetadataValue

from dagster_unified.orchestration.history import latest_materializations

SHOWN = 90
"""Partitions in one picture: those that ran last of them, and as many before as there is room for."""

_LABELS = 6


def rows_per_partition(instance: DagsterInstance, asset: AssetKey, keys: Sequence[str], made: Mapping[str, int]) -> MarkdownMetadataValue:
    """The picture, where a run has `made` so many rows of some partitions; `keys` are all partitions, in their order."""
    last = max((i for i, key in enumerate(keys) if key in made), default=len(keys) - 1)
    around = keys[max(0, last + 1 - SHOWN) :][:SHOWN]
    counts: dict[str, int] = {}
    for key, record in latest_materializations(instance, asset, around):
        count = record.asset_materialization and record.asset_materialization.metadata.get("dagster/row_count")
        if count and isinstance(count.value, int):
            counts[key] = count.value
    counts.update(made)
    return picture({key: counts[key] for key in around if key in counts}, made)


def picture(rows: Mapping[str, int], highlighted: Collection[str]) -> MarkdownMetadataValue:
    """A bar for each partition; the highlighted ones in another colour."""
    from matplotlib.figure import Figure  # of its own, not pyplot's: steps may run in threads
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 2.2), dpi=90, layout="tight")
    axes = figure.subplots()
    axes.bar(range(len(rows)), list(rows.values()), width=0.8, color=["#4f43dd" if key in highlighted else "#b8b5d6" for key in rows])
    step = max(1, -(-len(rows) // _LABELS))
    axes.set_xticks(range(0, len(rows), step), list(rows)[::step], fontsize=8)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.tick_params(axis="y", labelsize=8)
    axes.set_ylabel("rows", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    drawn = BytesIO()
    figure.savefig(drawn, format="png")
    return MetadataValue.md(f"![rows per partition](data:image/png;base64,{base64.b64encode(drawn.getvalue()).decode()})")
