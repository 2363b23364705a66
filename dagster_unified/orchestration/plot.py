"""Rows per partition as a picture, which Dagster shows in a materialization's metadata."""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from io import BytesIO
from typing import Any

from dagster import MarkdownMetadataValue, MetadataValue

SHOWN = 90
"""Partitions in one picture: those that ran last of them, and as many before as there is room for."""

_LABELS = 6

ROWS = "dagster/row_count"


def around(keys: Sequence[str], finished: Collection[str]) -> Sequence[str]:
    """The partitions in a picture after a run that has `finished` some; `keys` are all, in their order."""
    last = max((i for i, key in enumerate(keys) if key in finished), default=len(keys) - 1)
    return keys[max(0, last + 1 - SHOWN) :][:SHOWN]


def rows_per_partition(
    keys: Sequence[str], shown: Mapping[str, Mapping[str, Any]], finished: Collection[str]
) -> MarkdownMetadataValue:
    """The picture, of the rows that materializations show."""
    counts = {key: _number(shown[key].get(ROWS)) for key in around(keys, finished) if key in shown}
    return picture({key: count for key, count in counts.items() if count is not None}, finished)


def _number(value: Any) -> int | None:
    found = getattr(value, "value", value)
    return found if isinstance(found, int) else None


def picture(rows: Mapping[str, int], highlighted: Collection[str]) -> MarkdownMetadataValue:
    """A bar for each partition; the highlighted ones in another colour."""
    from matplotlib.figure import Figure  # of its own, not pyplot's: steps may run in threads
    from matplotlib.ticker import MaxNLocator

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
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.tick_params(axis="y", labelsize=8)
    axes.set_ylabel("rows", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    drawn = BytesIO()
    figure.savefig(drawn, format="png")
    return MetadataValue.md(
        f"![rows per partition](data:image/png;base64,{base64.b64encode(drawn.getvalue()).decode()})"
    )
