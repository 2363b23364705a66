"""The state of an iteration goes to other subtasks, page by page."""

import pytest

from dagster_unified.api import Pipeline, iterations
from dagster_unified.engine.iterations.epoch_log import Begun, StoredState
from dagster_unified.engine.iterations.files import EpochFile, MappedFiles, PagedStates
from dagster_unified.engine.iterations.savepoints import rescaled
from dagster_unified.graph.loops import compile_loop
from dagster_unified.graph.nodes import IterationNode
from dagster_unified.operators.operator import BROADCAST
from tests.iterations.support import Body, Hop, Visits


def loop(parallelism, build, groups=(32,)):
    pipeline = Pipeline("loops")
    hops = pipeline.from_collection([Hop(1, 0)], Hop, name="hops")
    config = iterations.IterationConfig(parallelism=parallelism)
    iterations.iterate_unbounded_streams([hops], [], Body(build), config)[0].print()
    plan = pipeline.plan({"execution.runtime-mode": "STREAMING"})
    node = next(node for node in plan.graph.nodes if isinstance(node, IterationNode))
    return compile_loop(plan, node, parallelism, groups)


def keyed(variables, data):
    seen = variables[0].key_by("number").process(Visits())
    return iterations.IterationBodyResult([seen], [seen])


def remembering(variables, data):
    last = iterations.forward_inputs_of_last_round(variables[0])
    return iterations.IterationBodyResult([last], [last])


def left(folder, pages, subtasks):
    """What a round of so many subtasks leaves: a page of each group of pass 0, which says what it is of."""
    found = []
    for subtask in range(subtasks):
        states = PagedStates(MappedFiles(folder), None)
        for group, page in pages:
            if group % subtasks == subtask:
                states.write((0, group, page), f"{group} {page}".encode())
        with EpochFile(folder, f"epoch-{subtask}") as file:
            found.append(StoredState(0, subtask, *states.save(file)))
    return found


def held(folder, states):
    """The pages of each subtask, by group and number."""
    found = {}
    for state in states:
        pages = PagedStates(MappedFiles(folder), state.index)
        own = {(group, page): pages.read((0, group, page)) for group in pages.groups(0) for page in (0, 1, BROADCAST)}
        found[state.subtask] = {place: data.decode() for place, data in own.items() if data is not None}
    return found


@pytest.mark.parametrize("subtasks", [1, 3, 5])
def test_key_groups_go_to_the_subtasks_that_their_records_go_to(tmp_path, subtasks):
    pages = [(group, page) for group in range(32) for page in (0, 1)]
    after = loop(subtasks, keyed)
    states, _ = rescaled(left(str(tmp_path), pages, 2), after, str(tmp_path))
    assert held(str(tmp_path), states) == {
        subtask: {(group, page): f"{group} {page}" for group, page in pages if group % subtasks == subtask}
        for subtask in range(subtasks)
    }
    buffer = after.levels[0].passes[0].main.number
    assert all(after.levels[0].readers(buffer, group) == [group % subtasks] for group in range(32))


def test_the_number_of_key_groups_stays_what_it_was():
    assert [loop(n, keyed, ()).levels[0].passes[0].groups for n in (2, 3)] == [32, 48]
    assert [loop(n, keyed).levels[0].passes[0].groups for n in (1, 2, 3)] == [32, 32, 32]


@pytest.mark.parametrize(
    ("groups", "before", "after", "why"),
    [
        ([256, 16], [16, 1], [16, 1], ""),
        ([256, 16], [16, 1], [17, 1], ""),
        ([16, 0], [1, 1], [15, 15], ""),
        (
            [16, 0],
            [1, 1],
            [16, 16],
            "it has state of 1 subtasks, of which there can be up to 15, and is started with 16",
        ),
    ],
)
def test_an_iteration_has_fewer_subtasks_than_key_groups(groups, before, after, why):
    begun, wanted = (Begun(own[0], False, [["a"], ["b"]], [], groups, own) for own in (before, after))
    assert begun.differs(wanted) == why


def test_each_subtask_has_the_broadcast_state(tmp_path):
    states, _ = rescaled(left(str(tmp_path), [(0, BROADCAST), (1, BROADCAST)], 2), loop(3, remembering), str(tmp_path))
    assert held(str(tmp_path), states) == {n: {(n, BROADCAST): f"0 {BROADCAST}"} for n in range(3)}


def test_operator_state_is_what_it_was_divided_into(tmp_path):
    before, divided = (left(str(tmp_path), [(n, 0) for n in range(count)], count) for count in (2, 3))
    after = rescaled(before, loop(3, remembering), str(tmp_path), {0: divided})[0]
    assert held(str(tmp_path), after) == held(str(tmp_path), divided)
    assert held(str(tmp_path), rescaled(before, loop(2, remembering), str(tmp_path))[0]) == held(str(tmp_path), before)
