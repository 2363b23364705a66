"""The state of an iteration for another number of subtasks: key groups go from one subtask to another, as they are.

How many key groups there are was decided when the iteration began, so that nothing has to be read but where pages are.
Knows what is committed of an epoch; no Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from dagster_unified.engine.iterations.epoch_log import StoredState
from dagster_unified.engine.iterations.files import Block, EpochFile, MappedFiles, StoredPages
from dagster_unified.operators.rounds.spec import BodyPass, Loop

Page = tuple[int, int, int, Block]
"""A pass, a key group, a page, and where that is."""


def rescaled(
    states: Iterable[StoredState], loop: Loop, folder: str, divided: Mapping[int, list[StoredState]] | None = None
) -> tuple[list[StoredState], list[str]]:
    """The state of an epoch for the subtasks of `loop`, and the files that were written.

    Operator state is that of subtasks: `divided` has it, by pass, for as many as there are now.
    """
    divided = divided or {}
    files = MappedFiles(folder)
    by_subtask: dict[tuple[int, int], list[Page]] = {}
    pages = {level: _pages(files, [s for s in states if s.level == level]) for level in range(len(loop.levels))}
    for number, level in enumerate(loop.levels):
        for one in level.passes:
            held = _pages(files, divided[one.number]) if one.number in divided else pages[number]
            own = [page for page in held if page[0] == one.number]
            for page in own if one.groups != one.subtasks else _in_all(one, own):
                by_subtask.setdefault((number, page[1] % one.subtasks), []).append(page)
    found: list[StoredState] = []
    with EpochFile(folder, "rescaled") as file:
        for (level_number, subtask), own in by_subtask.items():
            needed = sorted({block.file for *_, block in own})
            found.append(StoredState(level_number, subtask, file.put(msgspec.msgpack.encode(own)), needed))
    return found, [file.name] if file.size else []


def _pages(files: MappedFiles, states: Iterable[StoredState]) -> list[Page]:
    found: list[Page] = []
    for state in states:
        found += msgspec.msgpack.decode(files.bytes_of(state.index).to_pybytes(), type=StoredPages)
    return found


def _in_all(one: BodyPass, own: list[Page]) -> list[Page]:
    """The pages of an operator whose state is that of its subtasks, each of which has all broadcast state."""
    before = {group for _, group, *_ in own}
    if not own or before == set(range(one.subtasks)):
        return own
    first = [page for page in own if page[1] == min(before)]
    return [(number, group, page, block) for group in range(one.subtasks) for number, _, page, block in first]
