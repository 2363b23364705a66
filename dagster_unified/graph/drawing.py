"""The plan as a picture: a box per stage with its operators, an arrow per barrier, from left to right.

Draws what `explain` prints, as SVG: a few kilobytes, since every materialization keeps its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from dagster_unified.graph.nodes import Node
from dagster_unified.graph.plan import Plan, Region

LINE, CHARACTER, PADDING = 18, 7.3, 10
"""Of a line of text its height, of a character its width, of a box the space around its text; in pixels."""

BETWEEN, APART, LANE = 60, 24, 16
"""The space between columns, next to the arrows' labels; between boxes; and the height of an arrow past a column."""

LONGEST = 36
"""Characters of an operator's name."""


@dataclass
class _Place:
    """The place of a stage's box or, in a column that an arrow passes, of the arrow; `y` is its top."""

    lines: Sequence[str]
    x: float = 0.0
    y: float = 0.0

    @property
    def width(self) -> float:
        return max((len(line) * CHARACTER for line in self.lines), default=0) + 2 * PADDING

    @property
    def height(self) -> float:
        return len(self.lines) * LINE + 1.5 * PADDING if self.lines else LANE

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


def as_svg(plan: Plan, highlighted: Region) -> str:
    """Return the picture, with one stage highlighted."""
    places = {r.id: _Place([r.name, *(_operator(plan.graph.node(n)) for n in r.nodes)]) for r in plan.regions}
    arrows = {(source, r.id): _label(plan, source, r.id) for r in plan.regions for source in r.inputs}
    columns, ways = _columns(plan, places, list(arrows))
    width, height = _arrange(columns, BETWEEN + CHARACTER * max(map(len, arrows.values()), default=0))
    drawn = [
        line
        for ends, label in arrows.items()
        for line in _arrow([places[ends[0]], *ways[ends], places[ends[1]]], label)
    ]
    drawn += [line for r in plan.regions for line in _box(places[r.id], r.id == highlighted.id)]
    size = f'width="{width:.0f}" height="{height:.0f}"'
    return "\n".join(
        [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width:.0f} {height:.0f}"'
                ' font-family="monospace" font-size="12">'
            ),
            (
                '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7"'
                ' orient="auto"><path d="M0 0 8 4 0 8z" fill="#4f43dd"/></marker></defs>'
            ),
            f'<rect {size} fill="#ffffff"/>',
            *drawn,
            "</svg>",
        ]
    )


def _operator(node: Node) -> str:
    name = node.name if len(node.name) <= LONGEST else node.name[: LONGEST - 1] + "…"
    return f"{node.kind} {name}"


def _label(plan: Plan, source: int, target: int) -> str:
    """Return how records travel from one stage to another: `by shop`, `REBALANCE`."""
    crossing = [
        e
        for e in plan.exchanges
        if e.blocking and e.source in plan.regions[source].tasks and e.target in plan.regions[target].tasks
    ]
    keys = [(e.kind.value, e.edge.partitioning.key) for e in crossing]
    return "; ".join(dict.fromkeys(f"by {key.describe()}" if key is not None else exchange for exchange, key in keys))


def _columns(
    plan: Plan, places: dict[int, _Place], arrows: list[tuple[int, int]]
) -> tuple[list[list[_Place]], dict[tuple[int, int], list[_Place]]]:
    """Put each stage in the column after the last one that it reads from.

    Also returns, for each arrow, its places in the columns between.
    """
    depth: dict[int, int] = {}
    for region in plan.regions:  # they are in topological order
        depth[region.id] = 1 + max((depth[i] for i in region.inputs), default=-1)
    columns: list[list[_Place]] = [[] for _ in range(1 + max(depth.values()))]
    ways: dict[tuple[int, int], list[_Place]] = {ends: [] for ends in arrows}
    for region in plan.regions:
        columns[depth[region.id]].append(places[region.id])
        for source in region.inputs:
            for column in range(depth[source] + 1, depth[region.id]):
                ways[source, region.id].append(_Place([]))
                columns[column].append(ways[source, region.id][-1])
    return columns, ways


def _arrange(columns: list[list[_Place]], between: float) -> tuple[float, float]:
    """Put the columns side by side, each centred; return the width and height of the whole."""
    heights = [sum(place.height + APART for place in column) - APART for column in columns]
    x: float = PADDING
    for column, height in zip(columns, heights, strict=True):
        y = PADDING + (max(heights) - height) / 2
        wide = max(place.width for place in column)
        for place in column:
            place.x, place.y = x, y
            y += place.height + APART
            if not place.lines:
                place.x += wide / 2
        x += wide + between
    return x - between + PADDING, max(heights) + 2 * PADDING


def _arrow(stops: Sequence[_Place], label: str) -> list[str]:
    first = stops[0]
    at = (first.x + first.width, first.middle)
    middle = at
    path = f"M{at[0]:.0f} {at[1]:.0f}"
    for stop in stops[1:]:
        bend = (at[0] + stop.x) / 2
        middle = (bend, (at[1] + stop.middle) / 2)
        path += f" C{bend:.0f} {at[1]:.0f} {bend:.0f} {stop.middle:.0f} {stop.x:.0f} {stop.middle:.0f}"
        at = (stop.x, stop.middle)
    place = (
        f'x="{middle[0]:.0f}" y="{middle[1] + 4:.0f}" text-anchor="middle" paint-order="stroke" stroke="#ffffff"'
        ' stroke-width="4"'
    )
    return [
        f'<path d="{path}" fill="none" stroke="#4f43dd" stroke-width="2" marker-end="url(#tip)"/>',
        f'<text {place} fill="#555555" font-size="11">{escape(label)}</text>',
    ]


def _box(place: _Place, highlighted: bool) -> list[str]:
    fill, line = ("#e6e4fa", "#4f43dd") if highlighted else ("#f7f7fa", "#b8b5d6")
    parts = [
        f'<rect x="{place.x:.0f}" y="{place.y:.0f}" width="{place.width:.0f}" height="{place.height:.0f}" rx="6"'
        f' fill="{fill}" stroke="{line}"/>'
    ]
    for number, text in enumerate(place.lines):
        weight = ' font-weight="bold"' if number == 0 else ""
        x, y = place.x + PADDING, place.y + PADDING / 2 + LINE * (number + 0.8)
        parts.append(f'<text x="{x:.0f}" y="{y:.0f}"{weight}>{escape(text)}</text>')
    return parts
