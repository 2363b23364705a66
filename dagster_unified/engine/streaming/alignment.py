"""Aligns the watermarks of sources while a job runs: tells each of them, after each epoch, how far its group has come.

Knows the job's time. `connectors/protocol/alignment.py` is what a source goes by.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from threading import Lock
from typing import TYPE_CHECKING

import msgspec

from dagster_unified.connectors.protocol.alignment import Watermarks, tell
from dagster_unified.engine.job_time import JobTime
from dagster_unified.graph.alignment import Aligned, aligned
from dagster_unified.graph.plan import Plan

if TYPE_CHECKING:
    from upath import UPath


class Alignment:
    """The aligned sources of one query. Safe for several threads."""

    def __init__(self, plan: Plan, sources: Collection[int], folder: UPath) -> None:
        """`folder` has a folder for each source, by its uid."""
        self._members = [one for one in aligned(plan.graph) if one.source in sources]
        uids = {one.source: plan.graph.node(one.source).uid for one in self._members}
        self._files = {source: folder / uid / "watermarks.json" for source, uid in uids.items()}
        self._told: dict[int, Watermarks] = {}
        self._ended: dict[int, Collection[str]] = {}
        self._over = False
        self._lock = Lock()

    def __bool__(self) -> bool:
        return bool(self._members)

    def file(self, source: int) -> UPath | None:
        """What a source goes by; None where it is not aligned."""
        return self._files.get(source)

    def ended(self, parts: Mapping[int, Collection[str]]) -> None:
        """Note which parts of the sources the query has read to their end: nobody waits for these."""
        with self._lock:
            self._ended |= parts

    def tell(self, time: JobTime, now: int) -> None:
        """Tell the sources how far their groups are."""
        with self._lock:
            if self._over:
                return
            own = {one.source: Watermarks(one.drift, *time.parts(one.assigner, now)) for one in self._members}
            for one in self._members:
                others = [o.source for o in self._members if o.group == one.group and o is not one]
                marks = [own[source].slowest(self._ended.get(source, ())) for source in others]
                slowest = min((mark for mark in marks if mark is not None), default=None)
                self._write(one, msgspec.structs.replace(own[one.source], others=slowest))

    def end(self) -> None:
        """Let nobody wait any more: what there is, is read."""
        with self._lock:
            self._over = True
            for one in self._members:
                self._write(one, Watermarks(one.drift))

    def _write(self, one: Aligned, watermarks: Watermarks) -> None:
        if self._told.get(one.source) != watermarks:
            tell(self._files[one.source], watermarks)
            self._told[one.source] = watermarks
