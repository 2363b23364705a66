"""What the kit for sinks expects of readers, for its own schedule of writes: no process, no Spark."""

import random

import pytest

from dagster_unified.connectors import DeltaSink
from dagster_unified.testing import connectors
from dagster_unified.testing.connectors import Entry, SinkTarget
from tests.depth import rotated


class Remembered(SinkTarget):
    """A target that is right: a write of an epoch takes back what earlier timelines wrote of it and of later ones."""

    def __init__(self):
        self.writes = {}

    def sink(self):
        return DeltaSink("nowhere")

    def rows(self):
        return [tuple(entry) for entries in self.writes.values() for entry in entries]

    def write(self, identity, entries):
        kept = {
            (timeline, epoch): written
            for (timeline, epoch), written in self.writes.items()
            if timeline == identity.timeline or epoch < identity.epoch
        }
        self.writes = {**kept, (identity.timeline, identity.epoch): entries}


class WithoutProcesses(connectors._Check):
    def _write(self, identity: object, entries: tuple[Entry, ...], restart: bool) -> None:
        self.target.write(identity, entries)
        self.faults.kills += self.chance.random() < 0.3


@pytest.mark.parametrize("seed", rotated(range(100), 20))
def test_a_check_expects_the_rows_of_writes_that_happened(seed):
    WithoutProcesses(Remembered(), "", random.Random(seed), kills=4).epochs()
