"""Rows per partition, keys per key group and rounds as pictures, which Dagster shows in the metadata of an asset."""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from io import BytesIO
from math import nan
from statistics import mean
from typing import TYPE_CHECKING, Any

from dagster import MarkdownMetadataValue, MetadataValue

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dagster_unified.engine.batch.intermediates.store import IterationSummary

SHOWN = 90
"""Partitions in one picture: those that ran last of them, and as many before as there is room for."""

OPERATORS = 8
"""Operators in one picture: those whose fullest group is furthest above the mean."""

_GAUGES = 6
"""Gauges in one picture: the first by their names."""

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
    number = getattr(value, "value", value)
    return number if isinstance(number, int) else None


def picture(rows: Mapping[str, int], highlighted: Collection[str]) -> MarkdownMetadataValue:
    """A bar for each partition; the highlighted ones in another colour."""
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
    """The fullest group against the mean; 0 where there are no keys."""
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
