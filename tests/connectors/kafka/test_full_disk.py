"""A broker whose disk is full, until there is room again."""

import json
import random
from collections import Counter
from contextlib import closing
from datetime import timedelta
from typing import NamedTuple

import pytest

from dagster_unified.connectors import KafkaSink
from dagster_unified.connectors.protocol.commits import WriteIdentity
from dagster_unified.engine.commit import WriteContext
from dagster_unified.errors import UnavailableError
from tests.connectors.support import LocalCommits
from tests.depth import rotated
from tests.servers.kafka import Broker
from tests.small_disk import NEEDS_ROOT, small_disk

IMPATIENT = {"message.timeout.ms": 4000}
"""Less than a transaction may take, so that it is not over before a message is given up."""


class Row(NamedTuple):
    epoch: int
    number: int
    text: str


@NEEDS_ROOT
@pytest.mark.rotates("brokers", together=True)
@pytest.mark.parametrize("disks", rotated([1, 2], 1))
def test_a_full_disk_at_a_broker_is_transient_and_nothing_is_lost_or_there_twice(tmp_path, disks):
    chance = random.Random(0)

    def write(epoch, count):
        """What a job does that begins, or is started again."""
        waits = timedelta(seconds=60)
        # Half of the records goes to each partition, so that the small disk is filled whichever partition is on it.
        sink = KafkaSink(topic, broker.address, partitioner="number", transaction_timeout=waits, options=IMPATIENT)
        who = WriteIdentity("p", "sink", "deployment", "streaming", epoch)
        rows = [Row(epoch, number, chance.randbytes(1000).hex()) for number in range(count)]
        with closing(LocalCommits(sink, Row)) as commits:
            (result,) = commits.write([rows], [WriteContext(who, "stage", staging=str(tmp_path / "staged"))])
        return not result.repeated

    small = tmp_path / "small"
    with small_disk(small, megabytes=2 if disks == 2 else 6) as resize:
        if disks == 2:
            folders = {"log.dirs": f"{tmp_path}/large,{small}/data", "metadata.log.dir": f"{tmp_path}/large"}
            said = r"\[\d\] has no leader; .* that there is room on their disks$"
        else:  # a broker without any disk ends
            folders, said = {"log.dirs": f"{small}/data"}, "does not answer"
        broker = Broker(tmp_path / "broker", heap="256m", **folders)
        try:
            broker.start()
            topic = broker.create_topic(partitions=2)  # one on each disk
            assert write(0, 10)
            with pytest.raises(UnavailableError, match=said):
                write(1, 6000)
            broker.kill()
            resize(100)
            broker.start()  # it looks at a disk again only then
            assert write(1, 6000)
            assert not write(1, 6000)
            found = Counter((row["epoch"], row["number"]) for row in map(json.loads, broker.values(topic)))
        finally:
            broker.stop()
    assert found == Counter((epoch, number) for epoch, count in ((0, 10), (1, 6000)) for number in range(count))
