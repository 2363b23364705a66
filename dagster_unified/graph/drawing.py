"""The plan as a picture: a box per stage with its operators, an arrow per barrier, from left to right.

Draws what `explain` prints, as SVG: a few kilobytes, since every materialization keeps its own. Of a stream a box is a
task, and says below its operators what they do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from dagster_unified.graph.nodes import Node
from dagster_unified.graph.plan import Plan, Region
from dagster_unified.graph.regions import Exchange

LINE, CHARACTER, PADDING = 18, 7.3, 10
"""Of a line of text its height, of a character its width, of a box the space around its text; in pixels."""

BETWEEN, APART, LANE = 60, 24, 16
"""The space between columns, next to the arrows' labels; between boxes; and the height of an arrow past a column."""

NOTE = "\u00a0\u00a0"
"""Before an operator's notes; SVG leaves plain blanks out."""

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
    """Return the plan's stages as a picture, with one stage highlighted."""
    places = {r.id: _Place([r.name, *(_operator(plan.graph.node(n)) for n in r.nodes)]) for r in plan.regions}
    arrows = {(source, r.id): _label(plan, source, r.id) for r in plan.regions for source in r.inputs}
    return _drawn(places, arrows, highlighted.id)


def tasks_as_svg(plan: Plan, notes: Mapping[int, Sequence[str]], header: Sequence[str]) -> str:
    """Return the plan's tasks as a picture: an operator's notes below it, by its number, and a header above all."""
    places = {
        task.id: _Place(
            [line for n in task.operators for line in (_operator(plan.graph.node(n)), *_indented(notes, n))]
        )
        for task in plan.tasks
    }
    kinds: dict[tuple[int, int], list[str]] = {}
    for exchange in plan.exchanges:
        kinds.setdefault((exchange.source, exchange.target), []).append(_travels(exchange))
    return _drawn(places, {ends: "; ".join(dict.fromkeys(ways)) for ends, ways in kinds.items()}, None, header)


def _indented(notes: Mapping[int, Sequence[str]], node: int) -> Iterator[str]:
    return (f"{NOTE}{note}" for note in notes.get(node, ()))


def _drawn(
    places: Mapping[int, _Place],
    arrows: Mapping[tuple[int, int], str],
    highlighted: int | None,
    header: Sequence[str] = (),
) -> str:
    """Draw boxes, which come after those that they read from, and arrows."""
    columns, ways = _columns(places, list(arrows))
    top = len(header) * LINE
    width, height = _arrange(columns, BETWEEN + CHARACTER * max(map(len, arrows.values()), default=0), top)
    width = max(width, max((len(line) * CHARACTER for line in header), default=0) + 2 * PADDING)
    drawn = [
        line
        for ends, label in arrows.items()
        for line in _arrow([places[ends[0]], *ways[ends], places[ends[1]]], label)
    ]
    drawn += [line for number, place in places.items() for line in _box(place, number == highlighted)]
    drawn += [
        f'<text x="{PADDING}" y="{LINE * (number + 1):.0f}" font-weight="bold">{escape(text)}</text>'
        for number, text in enumerate(header)
    ]
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
    return "; ".join(dict.fromkeys(map(_travels, crossing)))


def _travels(exchange: Exchange) -> str:
    key = exchange.edge.partitioning.key
    return f"by {key.describe()}" if key is not None else exchange.kind.value


def _columns(
    places: Mapping[int, _Place], arrows: Sequence[tuple[int, int]]
) -> tuple[list[list[_Place]], dict[tuple[int, int], list[_Place]]]:
    """Put each box in the column after the last one that it reads from.

    Also returns, for each arrow, its places in the columns between.
    """
    inputs = {number: [source for source, target in arrows if target == number] for number in places}
    depth: dict[int, int] = {}
    for number in places:  # they are in topological order
        depth[number] = 1 + max((depth[i] for i in inputs[number]), default=-1)
    columns: list[list[_Place]] = [[] for _ in range(1 + max(depth.values()))]
    ways: dict[tuple[int, int], list[_Place]] = {ends: [] for ends in arrows}
    for number, place in places.items():
        columns[depth[number]].append(place)
        for source in inputs[number]:
            for column in range(depth[source] + 1, depth[number]):
                ways[source, number].append(_Place([]))
                columns[column].append(ways[source, number][-1])
    return columns, ways


def _arrange(columns: list[list[_Place]], between: float, top: float) -> tuple[float, float]:
    """Put the columns side by side below `top`, each centred; return the width and height of the whole."""
    heights = [sum(place.height + APART for place in column) - APART for column in columns]
    x: float = PADDING
    for column, height in zip(columns, heights, strict=True):
        y = top + PADDING + (max(heights) - height) / 2
        wide = max(place.width for place in column)
        for place in column:
            place.x, place.y = x, y
            y += place.height + APART
            if not place.lines:
                place.x += wide / 2
        x += wide + between
    return x - between + PADDING, top + max(heights) + 2 * PADDING


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
        weight = ' fill="#555555"' if text.startswith(NOTE) else weight
        x, y = place.x + PADDING, place.y + PADDING / 2 + LINE * (number + 0.8)
        parts.append(f'<text x="{x:.0f}" y="{y:.0f}"{weight}>{escape(text)}</text>')
    return parts
