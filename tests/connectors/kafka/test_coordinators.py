"""Coordinators that forget, that end transactions, and that are away: with brokers of their own that are set up so."""

import time
from collections import Counter
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import NamedTuple
from uuid import uuid4

import msgspec
import pytest

from dagster_unified.connectors.kafka import KafkaOffsetsInitializer, KafkaSink, KafkaSource, cluster, committer
from dagster_unified.connectors.protocol.commits import Commit, CommitConflictError, WriteAttempt, WriteIdentity
from dagster_unified.engine.commit import WriteContext
from dagster_unified.errors import UnavailableError
from tests.connectors.kafka.test_committer import identity, opened, staged
from tests.connectors.support import LocalCommits
from tests.servers.kafka import Broker

pytestmark = pytest.mark.rotates("brokers", together=True)


class Row(NamedTuple):
    epoch: int
    number: int


@contextmanager
def broker(folder, **config):
    made = Broker(folder, heap="256m", **{name.replace("_", "."): value for name, value in config.items()})
    try:
        yield made.start()
    finally:
        made.kill()


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory):
    """A broker that forgets producers after a second."""
    with broker(
        tmp_path_factory.mktemp("forgetful"),
        transactional_id_expiration_ms="1000",
        transaction_remove_expired_transaction_cleanup_interval_ms="500",
        transaction_max_timeout_ms="20000",
    ) as made:
        yield made


@pytest.fixture(scope="module")
def uncoordinated(tmp_path_factory):
    """A broker whose coordinators never start: their topics need more replicas than there are brokers."""
    with broker(
        tmp_path_factory.mktemp("uncoordinated"),
        transaction_state_log_replication_factor="3",
        offsets_topic_replication_factor="3",
    ) as made:
        yield made


def test_a_producer_that_the_cluster_has_forgotten_is_one_sentence_and_begins_anew(forgetful):
    topic = forgetful.create_topic()
    writing, epoch = opened(forgetful, topic, timeout=10), 0
    said = None
    while said is None and epoch < 40:
        attempt = WriteAttempt(identity(topic, epoch), uuid4().hex, "stage")
        writing.last_version(attempt.identity.writer)
        time.sleep(3)  # the broker looks for what has expired now and then
        try:
            writing.commit([Commit(attempt, staged([str(epoch)], attempt))])
            epoch += 1
        except CommitConflictError as error:
            said = str(error)
    assert said == (
        f"sink 's' (topic '{topic}'): '{identity(topic).writer}': the cluster has forgotten this producer, which wrote"
        " nothing for longer than the brokers' transactional.id.expiration.ms; it begins anew, and asks first what is"
        " committed"
    )
    assert writing.last_version(identity(topic).writer) == (epoch - 1 if epoch else None)
    writing.commit([Commit(attempt, staged([str(epoch)], attempt))])
    assert sorted(map(int, forgetful.values(topic))) == list(range(epoch + 1))


def test_epochs_after_pauses_in_which_the_cluster_forgets_are_there_once(forgetful):
    topic, epochs = forgetful.create_topic(), 2
    sink = KafkaSink(topic, forgetful.address, key="number", transaction_timeout=timedelta(seconds=15))
    with closing(LocalCommits(sink, Row)) as commits, closing(LocalCommits(sink, Row)) as zombie:
        for epoch in range(epochs):
            who = WriteIdentity("forgotten", "sink", f"deployment {topic}", "streaming", epoch)
            rows = [[Row(epoch, number) for number in range(10)]]
            commits.write(rows, [WriteContext(who, "stage")])
            time.sleep(3)
            (again,) = zombie.write(rows, [WriteContext(who, "stage")])  # of another process, which finds it there
            assert again.repeated
    found = Counter(Row(**msgspec.json.decode(value)) for value in forgetful.values(topic))
    assert found == Counter(Row(epoch, number) for epoch in range(epochs) for number in range(10))


def test_coordinators_that_are_away_are_one_sentence_each(uncoordinated, monkeypatch):
    for module in (committer, cluster):
        monkeypatch.setattr(module, "ANSWER", 3.0)
    topic = uncoordinated.create_topic()
    away = f"Kafka at {uncoordinated.address} answers, and"
    with pytest.raises(UnavailableError, match=f"{away} its coordinator of transactions does .*__transaction_state"):
        opened(uncoordinated, topic).last_version(identity(topic).writer)
    start = KafkaOffsetsInitializer.committed_offsets("billing")
    source = KafkaSource(topic, Row, uncoordinated.address, starting_offsets=start, name="sales")
    with pytest.raises(UnavailableError, match=f"source 'sales': {away} the coordinator of consumer group 'billing'"):
        source.first()
