"""Windows of a key that grow together, such as sessions (Flink: `MergingWindowSet`)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import Any

from dagster_unified.errors import PipelineError
from dagster_unified.operators.windows.assigners import MergingWindowAssigner
from dagster_unified.operators.windows.scope import WindowingOperator


class MergingWindows:
    """The windows of the current key in order, where they merge."""

    def __init__(self, operator: WindowingOperator, assigner: MergingWindowAssigner[Any, Any]) -> None:
        self._operator, self._assigner = operator, assigner
        self._touch = type(assigner).merge_windows is MergingWindowAssigner.merge_windows
        """Whether windows are one as soon as they touch."""
        self._ordered: list[Any] | None = None

    def begin(self) -> None:
        """Another key is current."""
        self._ordered = None

    def forget(self, window: Any) -> None:
        """A window is gone."""
        if self._ordered is not None and window in self._ordered:
            self._ordered.remove(window)

    def merged(self, window: Any) -> Any:
        """The window that `window` becomes together with those of the key that it touches."""
        operator = self._operator
        windows = operator.windows()
        if self._ordered is None:
            self._ordered = sorted(windows)
        ordered = self._ordered
        cover, parts = self._touching(ordered, window)
        if not parts:
            if not operator.is_late(cover):
                insort(ordered, cover)
            return cover
        if parts == [cover]:
            return cover
        if operator.is_late(cover):
            raise PipelineError(
                f"{operator.where}: {cover} came of merging and is already over; a merged window may not end before the"
                " watermark"
            )
        held = [h for h in (windows.pop(part, None) for part in parts) if h is not None]
        for part in parts:
            del ordered[bisect_left(ordered, part)]
        insort(ordered, cover)
        windows[cover] = operator.contents.combined(held)
        operator.merge_trigger(cover, parts)
        return cover

    def _touching(self, ordered: list[Any], window: Any) -> tuple[Any, list[Any]]:
        """The merged window, and those of the key that become it."""
        if not self._touch:
            groups = self._assigner.merge_windows([*[w for w in ordered if w != window], window])
            cover, parts = next((c, p) for c, p in groups if window in p)
            return cover, [p for p in parts if p in ordered]
        # Sessions of a key do not touch one another, so that their ends are in the order of their starts.
        last = bisect_right(ordered, window.end, key=lambda w: w.start)
        first = last
        while first > 0 and ordered[first - 1].end >= window.start:
            first -= 1
        parts = ordered[first:last]
        cover = window
        for part in parts:
            cover = cover.cover(part)
        return cover, parts
