"""The state of an iteration for another number of subtasks: key groups go from one subtask to another, as they are.

How many key groups there are was decided when the iteration began, so that nothing has to be read but where pages are.
Knows what is committed of a round; no Spark.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from dagster_unified.engine.iterations.files import Block, MappedFiles, RoundFile, StoredPages
from dagster_unified.engine.iterations.journal import StoredState
from dagster_unified.errors import StateError
from dagster_unified.operators.numbers import BROADCAST, INDEX
from dagster_unified.operators.rounds.spec import BodyPass, Loop

Page = tuple[int, int, int, Block]
"""A pass, a key group, a page, and where that is."""


def rescaled(states: Iterable[StoredState], loop: Loop, folder: str) -> tuple[list[StoredState], list[str]]:
    """The state of a round for the subtasks of `loop`, and the files that were written.

    Raises `StateError` for operator state, which is that of subtasks.
    """
    files = MappedFiles(folder)
    by_subtask: dict[tuple[int, int], list[Page]] = {}
    pages = {level: _pages(files, [s for s in states if s.level == level]) for level in range(len(loop.levels))}
    for number, level in enumerate(loop.levels):
        for one in level.passes:
            own = [page for page in pages[number] if page[0] == one.number]
            for page in own if one.groups != one.subtasks else _in_all(loop, one, own):
                by_subtask.setdefault((number, page[1] % one.subtasks), []).append(page)
    found: list[StoredState] = []
    with RoundFile(folder, "rescaled") as file:
        for (level_number, subtask), own in by_subtask.items():
            held = sorted({block.file for *_, block in own})
            found.append(StoredState(level_number, subtask, file.put(msgspec.msgpack.encode(own)), held))
    return found, [file.name] if file.size else []


def _pages(files: MappedFiles, states: Iterable[StoredState]) -> list[Page]:
    found: list[Page] = []
    for state in states:
        found += msgspec.msgpack.decode(files.bytes_of(state.index).to_pybytes(), type=StoredPages)
    return found


def _in_all(loop: Loop, one: BodyPass, own: list[Page]) -> list[Page]:
    """The pages of an operator whose state is that of its subtasks, each of which has all broadcast state."""
    before = {group for _, group, *_ in own}
    if not own or before == set(range(one.subtasks)):
        return own
    if any(page not in (INDEX, BROADCAST) for _, _, page, _ in own):
        name = one.program.steps[0].name
        raise StateError(
            f"{loop.where}: operator '{name}' has state of {len(before)} subtasks, and is started with {one.subtasks};"
            " operator state of a body stays where it is: start it as it was, or the job without state"
        )
    first = [page for page in own if page[1] == min(before)]
    return [(number, group, page, block) for group in range(one.subtasks) for number, _, page, block in first]
