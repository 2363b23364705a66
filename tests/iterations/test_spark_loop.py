"""The loops of BATCH and STREAMING over their real log, files and worker code, in this process: killed at any point."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest

from dagster_unified.api import Pipeline, iterations
from dagster_unified.engine.iterations.epoch_log import EpochLog
from dagster_unified.engine.iterations.files import MappedFiles
from dagster_unified.engine.iterations.levels import SparkLevels
from dagster_unified.engine.iterations.spark_loop import IterationInputs
from dagster_unified.engine.iterations.worker import decode_answer, decode_report, take_in
from dagster_unified.engine.streaming.iterations import Host, StreamLoop
from dagster_unified.errors import StateError
from dagster_unified.graph.nodes import IterationNode
from dagster_unified.operators.metrics import Metrics
from dagster_unified.testing.records import to_batch, to_timed
from tests.iterations.support import Body, Hop, Visits

HOPS = 2


class InThisProcess(SparkLevels):
    """Levels whose tasks run here, one after another."""

    def _in_tasks(self, level, orders):
        return [decode_answer(self._carry_out(order, 0)) for order in orders]

    def many_epochs(self):
        return nullcontext()

    def taken(self, inputs):
        once, replayed = [], []
        for number, batches in enumerate(inputs):
            (row,) = take_in(self._payload, self.folder, number, batches)
            report = decode_report(row.column(0)[0].as_py())
            (replayed if number in self.loop.replayed else once).extend(report.sent)
        return once, replayed

    def frames(self, node, outputs):
        files = MappedFiles(self.folder)
        (tail,) = node.outputs
        return [
            record for one in outputs for record, _ in to_timed(tail.layout, files.batch_of(one, tail.layout.schema))
        ]


class KilledError(Exception):
    pass


class Killer:
    """Ends a method's call at its `count`-th time, before it or after it."""

    def __init__(self, count):
        self.left = count

    def at(self, owner, name, after):
        method = getattr(owner, name)

        def run(this, *given, **named):
            if not after:
                self._meet()
            found = method(this, *given, **named)
            if after:
                self._meet()
            return found

        return patch.object(owner, name, run)

    def _meet(self):
        self.left -= 1
        if not self.left:
            raise KilledError


def planned(kind):
    """Records that take so many hops, each seen in each hop."""
    pipeline = Pipeline("hopping")
    given = pipeline.from_collection([Hop(0, 0)], Hop, name="numbers")

    def build(variables, data):
        seen = variables[0].key_by("number").process(Visits())
        further = seen.map(lambda hop: hop._replace(hops=hop.hops + 1), Hop).filter(lambda hop: hop.hops <= HOPS)
        return iterations.IterationBodyResult([further.key_by("number")], [seen])

    config, iterate = iterations.IterationConfig(parallelism=2), iterations.iterate_unbounded_streams
    if kind == "bounded":
        iterate = iterations.iterate_bounded_streams_until_termination
    (out,) = iterate([given.key_by("number")], [], Body(build), config)
    out.print("out")
    plan = pipeline.plan({"execution.runtime-mode": "STREAMING"})
    return plan, next(node for node in plan.graph.nodes if isinstance(node, IterationNode))


def micro_batch(loop, number, ends, records):
    """What leaves a loop in a micro-batch, which brings some records."""
    layout = loop.node.heads[0].layout
    batches = [to_batch(loop.plan.name, layout, [(record, None) for record in records])]
    return loop.outputs(number, ends, lambda: IterationInputs([batches], Metrics))


BATCHES = [[Hop(1, 0), Hop(2, 0)], [Hop(4, 0)], [], [Hop(3, 0)]]


def start(plan, node, folder, stopping=lambda: False):
    host = Host(None, lambda: None, lambda event: None, stopping)
    return StreamLoop(plan, node, host, f"{folder}/{node.uid}", None)


def run(kind, folder):
    """What left the loop in all micro-batches, where a job that is killed is started again in the micro-batch."""
    plan, node = planned(kind)
    found, starts = [], 1
    loop = start(plan, node, folder)
    for number, records in enumerate(BATCHES):
        ends = number == len(BATCHES) - 1
        try:
            left = micro_batch(loop, number, ends, records)
        except KilledError:
            starts += 1
            loop = start(plan, node, folder)
            left = micro_batch(loop, number, ends, records)
        found += left
    return sorted(found), starts


@pytest.fixture(autouse=True)
def in_this_process():
    with (
        patch("dagster_unified.engine.iterations.spark_loop.SparkLevels", InThisProcess),
        patch("dagster_unified.engine.streaming.iterations.MOMENT", 0.0),
    ):
        yield


POINTS = [
    (InThisProcess, "run", True),
    (EpochLog, "take", False),
    (EpochLog, "take", True),
    (EpochLog, "commit", False),
    (EpochLog, "commit", True),
    (EpochLog, "end", True),
    (StreamLoop, "outputs", True),
]


@pytest.mark.parametrize("kind", ["unbounded", "bounded"])
@pytest.mark.parametrize(("owner", "name", "after"), POINTS, ids=lambda one: getattr(one, "__name__", str(one)))
def test_a_loop_that_is_killed_at_any_point_gives_what_it_would_have_given(tmp_path, kind, owner, name, after):
    expected, _ = run(kind, tmp_path / "whole")
    assert len(expected) == 4 * (HOPS + 1)
    for count in range(1, 12):
        killer = Killer(count)
        with killer.at(owner, name, after):
            found, starts = run(kind, tmp_path / str(count))
        assert (found, starts) == (expected, 1 if killer.left > 0 else 2)
        if killer.left > 0:
            break
    assert count > 1 or (name, kind) == ("end", "bounded")


def test_a_loop_that_is_stopped_goes_on_after_its_last_epoch(tmp_path):
    plan, node = planned("bounded")
    epochs = []
    loop = start(plan, node, tmp_path, lambda: len(epochs) == 2)
    loop.observe = epochs.append
    with pytest.raises(StateError, match="the job is being stopped; it goes on after the last epoch"):
        micro_batch(loop, 0, True, [Hop(1, 0)])
    loop = start(plan, node, tmp_path)
    assert loop.last.number == 1
    found = micro_batch(loop, 0, True, [])
    assert sorted(hop.hops for hop in found) == list(range(HOPS + 1))
