"""The Kafka sink under kills, zombies, retried tasks and a broker that restarts in mid-commit."""

from itertools import product

import msgspec
import pytest

from dagster_unified.connectors import KafkaSink
from dagster_unified.testing.connectors import SinkTarget, check_epochs, check_partitions, spark_connect_server
from tests.depth import NIGHTLY, SEED
from tests.ports import free_port

KILLS = 50 if NIGHTLY else 4
MODES = {"append": {}, "upsert": {"key": "key", "mode": "upsert"}}
_BROKERS = {}


class Topic(SinkTarget):
    def __init__(self, broker, options):
        _BROKERS[broker.address] = broker
        self.address, self.options = broker.address, options
        self.topic = broker.create_topic(partitions=3)

    def sink(self):
        return KafkaSink(self.topic, self.address, **self.options)

    def rows(self):
        messages = _BROKERS[self.address].read(self.topic)
        if "key" in self.options:
            messages = {message.key(): message for message in messages}.values()
        entries = [msgspec.json.decode(message.value()) for message in messages]
        return [(entry["key"], entry["version"], entry["text"]) for entry in entries]

    def restart(self):
        broker = _BROKERS[self.address]
        broker.kill()
        broker.start()


@pytest.fixture(scope="module")
def spark_server():
    with spark_connect_server(free_port()) as address:
        yield address


@pytest.mark.spark
@pytest.mark.rotates("kits")
@pytest.mark.parametrize(("mode", "check"), product(MODES, (check_epochs, check_partitions)))
def test_nothing_is_lost_and_nothing_is_there_twice_whoever_is_killed(spark_server, kafka, mode, check):
    faults = check(Topic(kafka, MODES[mode]), spark_server, SEED, KILLS)
    assert faults.kills >= KILLS
    assert not NIGHTLY or (faults.zombies and faults.restarts)
