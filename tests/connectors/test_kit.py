"""Sinks that commit, under kills, zombies, retried tasks and restarts, on a Spark Connect server.

Those into databases are in `sql/test_kit.py`.
"""

import json
from itertools import product
from pathlib import Path

import msgspec
import pytest
from deltalake import DeltaTable

from dagster_unified.connectors import DeltaSink, FileSink, KafkaSink
from dagster_unified.connectors.protocol import Capabilities, Committable, SparkSink, Writer
from dagster_unified.connectors.protocol.commits import NoCommitter
from dagster_unified.testing.connectors import SinkTarget, check_epochs, check_partitions
from tests.depth import NIGHTLY, SEED

KILLS = 100 if NIGHTLY else 4
BROKERS = {}
"""Brokers by their addresses, since targets are pickled."""


class Delta(SinkTarget):
    def __init__(self, folder, **options):
        self.folder, self.options = str(folder), options

    def sink(self):
        return DeltaSink(f"{self.folder}/table", **self.options)

    def rows(self):
        table = DeltaTable(f"{self.folder}/table").to_pyarrow_table()
        return list(zip(*(table[name].to_pylist() for name in ("key", "version", "text")), strict=True))


class Files(SinkTarget):
    def __init__(self, folder):
        self.folder = str(folder)

    def sink(self):
        return FileSink(f"{self.folder}/files")

    def rows(self):
        table = self.sink().dataset().to_table(["key", "version", "text"])
        return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


class Topic(SinkTarget):
    def __init__(self, broker, **options):
        BROKERS[broker.address] = broker
        self.address, self.options = broker.address, options
        self.topic = broker.create_topic(partitions=3)

    def sink(self):
        return KafkaSink(self.topic, self.address, **self.options)

    def rows(self):
        messages = BROKERS[self.address].read(self.topic)
        if "key" in self.options:
            messages = {message.key(): message for message in messages}.values()
        entries = [msgspec.json.decode(message.value()) for message in messages]
        return [(entry["key"], entry["version"], entry["text"]) for entry in entries]

    def restart(self):
        broker = BROKERS[self.address]
        broker.kill()
        broker.start()


UPSERT = {"mode": "upsert", "key": "key"}
SINKS = {
    "delta append": lambda folder, kafka: Delta(folder, mode="append"),
    "delta overwrite": lambda folder, kafka: Delta(folder),
    "delta upsert": lambda folder, kafka: Delta(folder, **UPSERT),
    "files": lambda folder, kafka: Files(folder),
    "kafka append": lambda folder, kafka: Topic(kafka()),
    "kafka upsert": lambda folder, kafka: Topic(kafka(), **UPSERT),
}


@pytest.mark.spark
@pytest.mark.rotates("kits")
@pytest.mark.parametrize(("sink", "check"), product(SINKS, (check_epochs, check_partitions)))
def test_a_sink_loses_nothing_and_writes_nothing_twice_whoever_is_killed(request, server, tmp_path, sink, check):
    faults = check(SINKS[sink](tmp_path, lambda: request.getfixturevalue("kafka")), server, SEED, KILLS)
    assert faults.kills >= KILLS
    assert not NIGHTLY or (faults.zombies and (faults.restarts or "kafka" not in sink))
    left = [path.name for path in Path(tmp_path).rglob("_data-*")]
    assert len(left) <= faults.kills + faults.zombies


@pytest.mark.rotates("kits")
@pytest.mark.spark
def test_a_writer_that_wakes_up_after_its_successor_hears_of_it_and_ends(server, tmp_path):
    stopped_before_its_commit = 39  # what the kit does first with this seed
    assert check_epochs(Delta(tmp_path, mode="append"), server, stopped_before_its_commit, 1).zombies == 1


class Forgetful(Delta):
    """A target that does not remember who wrote."""

    def sink(self):
        sink = super().sink()
        committer = sink.committer

        def forgetting(schema):
            made = committer(schema)
            made.last_version = lambda name: None
            return made

        sink.committer = forgetting
        return sink


@pytest.mark.rotates("kits")
@pytest.mark.spark
def test_the_kit_finds_a_sink_that_writes_twice(server, tmp_path):
    kills_after_a_commit = 3  # what the kit does first with this seed
    with pytest.raises(AssertionError, match="should not be there"):
        check_epochs(Forgetful(tmp_path, mode="append"), server, kills_after_a_commit, 1)


class Kept(Committable, frozen=True, kw_only=True):
    pass


class EagerWriter(Writer[Kept]):
    """Makes its rows visible when it prepares the commit, and not when the committer commits."""

    def __init__(self, file):
        self.file, self.rows = file, []

    def write(self, batch):
        self.rows += [tuple(row.values()) for row in batch.to_pylist()]

    def prepare_commit(self):
        with open(self.file, "a") as file:
            file.writelines(f"{json.dumps(row)}\n" for row in self.rows)
        return [Kept(rows=len(self.rows), bytes=0)]


class EagerSink(SparkSink):
    kind, name, committable, capabilities = "eager", "eager", Kept, Capabilities(transactional=True)

    def __init__(self, file):
        self.file = file

    def describe(self):
        return f"lines of {self.file}"

    def check(self, records):
        """It takes any."""

    def writer(self, task):
        return EagerWriter(self.file)

    def committer(self, schema):
        return NoCommitter()


class Eager(SinkTarget):
    def __init__(self, folder):
        self.file = f"{folder}/lines"

    def sink(self):
        return EagerSink(self.file)

    def rows(self):
        return [tuple(json.loads(line)) for line in Path(self.file).read_text().splitlines()]


@pytest.mark.rotates("kits")
@pytest.mark.spark
def test_the_kit_finds_a_sink_that_shows_what_a_lost_task_has_prepared(server, tmp_path):
    a_task_is_lost_when_it_has_prepared_its_commit = 22  # of the three writes without a fault, with this seed
    with pytest.raises(AssertionError, match=r"0 rows are lost.* should not be there"):
        check_epochs(Eager(tmp_path), server, a_task_is_lost_when_it_has_prepared_its_commit, 0)
