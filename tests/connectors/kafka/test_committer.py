"""Transactions against a real broker, without Spark."""

import os
import threading
import time
from datetime import timedelta
from typing import NamedTuple
from uuid import uuid4

import msgspec
import pytest
from confluent_kafka.admin import AclOperation, ResourceType

from dagster_unified.connectors.kafka import KafkaConnection
from dagster_unified.connectors.kafka.committer import KafkaCommitter, Topic
from dagster_unified.connectors.kafka.messages import (
    MessageEncoder,
    MessageFormat,
    Messages,
    MessagesWriter,
    StagedMessages,
)
from dagster_unified.connectors.protocol.commits import (
    Commit,
    CommitConflictError,
    CommitUncertainError,
    WriteAttempt,
    WriteIdentity,
    remove_staging,
)
from dagster_unified.errors import SinkError, UnavailableError
from dagster_unified.records import record_type


class Row(NamedTuple):
    key: str
    number: int


ROW = record_type(Row, "test")


def identity(topic, epoch=0, timeline=0):
    return WriteIdentity("pipeline", "sink", f"deployment-{topic}", "streaming", epoch, timeline)


def opened(broker, topic, timeout=60.0, connection=None, **config):
    connection = connection or KafkaConnection(broker.address)
    written = Topic(connection, topic, f"sink 's' (topic '{topic}')", config)
    return KafkaCommitter(written, timedelta(seconds=timeout))


def staged(rows, attempt, upserts=False):
    encoder = MessageEncoder(MessageFormat(("key",), "key"), ROW, "sink 's'")
    writer = MessagesWriter(encoder, attempt, upserts)
    writer.write(ROW.to_batch([Row(*row) if isinstance(row, tuple) else Row(row, 0) for row in rows]))
    return list(writer.prepare_commit())


def write(committer, who, rows, staging=None):
    """What the engine does: nothing, where the target has the write."""
    held = committer.last_version(who.writer)
    if held is not None and held >= who.version:
        return False
    attempt = WriteAttempt(who, uuid4().hex, "stage", staging)
    committer.commit([Commit(attempt, staged(rows, attempt))])
    committer.clean_up([attempt], True)
    return True


def test_a_write_is_there_once_whoever_repeats_it(kafka):
    topic = kafka.create_topic()
    first = opened(kafka, topic)
    assert write(first, identity(topic, 0), ["a", "b"])
    assert write(first, identity(topic, 1), ["c"])
    assert not write(first, identity(topic, 1), ["c"])
    again = opened(kafka, topic)
    assert not write(again, identity(topic, 1), ["c"])
    assert write(again, identity(topic, 2), [])
    assert sorted(kafka.values(topic)) == [b"a", b"b", b"c"]
    assert again.last_version(identity(topic).writer) == 2
    first.close()
    again.close()


def test_an_earlier_process_is_kept_out_and_what_it_has_in_flight_is_not_seen(kafka):
    topic = kafka.create_topic(partitions=1)
    zombie, successor = opened(kafka, topic), opened(kafka, topic)
    assert write(zombie, identity(topic, 0), ["a"])
    assert write(successor, identity(topic, 1), ["b"])
    attempt = WriteAttempt(identity(topic, 1), "late", "stage")
    with pytest.raises(CommitConflictError, match="another process has begun to write"):
        zombie.commit([Commit(attempt, staged(["b again"], attempt))])
    assert not write(zombie, identity(topic, 1), ["b again"])
    assert kafka.values(topic) == [b"a", b"b"]


def test_a_process_that_dies_in_mid_transaction_does_not_hold_up_its_successor(kafka):
    topic = kafka.create_topic(partitions=1)
    child = os.fork()
    if child == 0:
        committer = opened(kafka, topic)
        producer = committer._producer(identity(topic).writer)._begun().producer
        producer.begin_transaction()
        producer.produce(topic, b"half")
        producer.flush(30)
        os._exit(0)
    os.waitpid(child, 0)
    began = time.monotonic()
    assert write(opened(kafka, topic), identity(topic), ["whole"])
    assert kafka.values(topic) == [b"whole"]
    assert time.monotonic() - began < 20
    assert kafka.values(topic, committed=False) == [b"half", b"whole"]


def test_each_timeline_has_its_own_versions_and_the_deployment_remembers_the_latest(kafka):
    topic = kafka.create_topic(partitions=1)
    committer = opened(kafka, topic)
    assert write(committer, identity(topic, 5), ["a"])
    assert write(committer, identity(topic, 3, 1), ["b"])
    assert committer.last_version(identity(topic).writer) == 5
    assert committer.last_version(identity(topic, 0, 1).writer) == 3
    assert opened(kafka, topic).last_version(identity(topic, 0).deployment) == 1


def test_many_messages_go_through_files_that_are_removed(kafka, tmp_path):
    topic = kafka.create_topic(partitions=3)
    rows = [(f"key-{number % 1000}", number) for number in range(30_000)]
    folder = tmp_path / "staging"
    who = identity(topic)
    attempt = WriteAttempt(who, "2", "stage", str(folder / "2"))
    (folder / "1").mkdir(parents=True)  # what a killed attempt has left
    committables = staged(rows, attempt)
    assert [bool(part.file) for part in committables] == [True]
    assert sum(part.rows for part in committables) == 30_000
    committer = opened(kafka, topic)
    committer.commit([Commit(attempt, committables)])
    committer.clean_up([attempt], True)
    assert not folder.exists()
    messages = kafka.read(topic)
    assert len(messages) == 30_000
    assert len({message.key() for message in messages}) == 1000
    assert {message.partition() for message in messages} == {0, 1, 2}


def test_staged_files_that_another_job_has_removed_are_one_sentence_and_nothing_is_committed(kafka, tmp_path):
    topic = kafka.create_topic()
    who = identity(topic)
    attempt = WriteAttempt(who, "1", "stage", str(tmp_path / "staging" / "1"))
    here = WriteAttempt(who, "1", "stage")
    gone = staged([(f"key-{number}", number) for number in range(30_000)], attempt)
    remove_staging([attempt], committed=True)
    committer = opened(kafka, topic)
    with pytest.raises(UnavailableError, match=r"the staged messages .* are gone: another job has taken over"):
        committer.commit([Commit(attempt, [*staged(["a"], here), *gone])])
    assert kafka.values(topic) == []
    assert write(committer, who, ["b"])
    assert kafka.values(topic) == [b"b"]


def test_of_an_upsert_the_last_message_of_each_key_is_written():
    attempt = WriteAttempt(identity("t"), "a", "stage")
    (part,) = staged([("a", 1), ("b", 2), ("a", 3)], attempt, upserts=True)
    assert part.rows == 2


def test_headers_partitions_and_times_arrive(kafka):
    topic = kafka.create_topic(partitions=3)
    messages = Messages(
        [b"k", None], [b"v", None], [[("h", b"x")], []], places=[4, -1], timestamps=[1_700_000_000_000, 0]
    )
    committer, attempt = opened(kafka, topic), WriteAttempt(identity(topic), "a", "stage")
    committer.commit([Commit(attempt, [StagedMessages(content=msgspec.msgpack.encode([messages]))])])
    one, two = kafka.read(topic)
    assert (one.partition(), one.key(), one.value(), one.headers()) == (1, b"k", b"v", [("h", b"x")])
    assert one.timestamp()[1] == 1_700_000_000_000
    assert (two.partition(), two.key(), two.value()) == (2, None, None)
    assert two.timestamp()[1] > 1_700_000_000_000


def test_keys_are_in_the_partitions_that_javas_clients_give_them(kafka):
    topic = kafka.create_topic(partitions=10)
    write(
        opened(kafka, topic, partitioner="murmur2_random"),
        identity(topic),
        ["21", "foobar", "a-little-bit-long-string"],
    )
    found = {message.key(): message.partition() for message in kafka.read(topic)}
    # Utils.murmur2 of Java's client: -973932308, -790332482, -985981536
    assert found == {key: (hashed & 0x7FFFFFFF) % 10 for key, hashed in JAVA.items()}


JAVA = {b"21": -973932308, b"foobar": -790332482, b"a-little-bit-long-string": -985981536 & 0xFFFFFFFF}


def test_a_topic_that_is_not_there_is_one_sentence(kafka, impatient):
    with pytest.raises(SinkError) as raised:
        opened(kafka, "nowhere")
    assert str(raised.value) == (
        f"sink 's' (topic 'nowhere'): Kafka at {kafka.address}: there is no such topic or partition"
        " (Broker: Unknown topic or partition); create the topic, or name another"
    )


def test_a_topic_that_is_deleted_under_the_job_is_one_sentence(kafka, monkeypatch):
    topic = kafka.create_topic()
    opens = opened(kafka, topic, **{"topic.metadata.propagation.max.ms": 1000})
    assert write(opens, identity(topic, 0), ["a"])
    kafka.delete_topic(topic)
    # the client hopes for so long that the topic comes back
    monkeypatch.setattr("dagster_unified.connectors.kafka.committer.ANSWER", 2.0)
    with pytest.raises(SinkError, match=rf"sink 's' \(topic '{topic}'\): .*there is no such topic .*create"):
        write(opens, identity(topic, 1), ["b"])


def test_each_permission_that_lacks_is_named(kafka):
    topic = kafka.create_topic()
    guest = KafkaConnection(kafka.secure_address, kafka.security("guest"))
    who = identity(topic)

    def attempted():
        write(opened(kafka, topic, connection=guest), who, ["a"])

    with pytest.raises(SinkError, match="no permission for the topic"):
        attempted()
    kafka.allow("guest", AclOperation.DESCRIBE, ResourceType.TOPIC, topic)
    with pytest.raises(SinkError, match="no permission for transactional ids that begin with 'dagster-unified/'"):
        attempted()
    kafka.allow("guest", AclOperation.ALL, ResourceType.TRANSACTIONAL_ID, who.origin)
    with pytest.raises(SinkError, match="no permission for consumer groups that begin with 'dagster-unified/'"):
        attempted()
    kafka.allow("guest", AclOperation.READ, ResourceType.GROUP, who.writer)
    kafka.allow("guest", AclOperation.READ, ResourceType.GROUP, who.deployment)
    with pytest.raises(SinkError, match="no permission for the topic"):
        attempted()
    kafka.allow("guest", AclOperation.WRITE, ResourceType.TOPIC, topic)
    kafka.allow("guest", AclOperation.READ, ResourceType.TOPIC, topic)
    attempted()
    assert kafka.values(topic) == [b"a"]


def test_a_record_that_is_too_large_is_one_sentence_and_nothing_of_its_write_is_seen(kafka):
    topic = kafka.create_topic(config={"max.message.bytes": "2000"})
    with pytest.raises(SinkError, match="a record is larger than the topic takes"):
        write(opened(kafka, topic, **{"compression.type": "none"}), identity(topic), ["small", "x" * 5000])
    with pytest.raises(SinkError, match="a record is larger than"):
        write(opened(kafka, topic), identity(topic), ["small", "x" * 2_000_000])
    assert kafka.values(topic) == []
    assert write(opened(kafka, topic), identity(topic), ["small"])
    assert kafka.values(topic) == [b"small"]


def test_a_time_out_that_the_broker_does_not_allow_is_one_sentence(kafka):
    committer = opened(kafka, kafka.create_topic(), timeout=7200)
    with pytest.raises(SinkError, match=r"longer than the broker allows.*lower transaction_timeout, or raise"):
        committer.last_version("dagster-unified/x")


def test_a_transaction_that_takes_too_long_is_one_sentence_and_nothing_of_it_is_seen(kafka, tmp_path):
    topic, pipe = kafka.create_topic(), tmp_path / "slow"
    os.mkfifo(pipe)
    attempt = WriteAttempt(identity(topic), "a", "stage")
    (part,) = staged(["a"], attempt)
    slow = [part, StagedMessages(file=str(pipe))]

    def feed():
        with pipe.open("wb") as written:  # opens once the transaction is under way
            time.sleep(6)
            written.write(part.content)

    threading.Thread(target=feed, daemon=True).start()
    committer = opened(kafka, topic, timeout=1.5)
    with pytest.raises(UnavailableError, match="raise transaction_timeout, or write less at once"):
        committer.commit([Commit(attempt, slow)])
    assert kafka.values(topic) == []
    assert write(opened(kafka, topic), identity(topic), ["b"])
    assert kafka.values(topic) == [b"b"]


def test_a_broker_that_is_away_is_one_sentence_and_the_write_goes_on_when_it_is_back(kafka, impatient):
    topic = kafka.create_topic()
    quick = KafkaConnection(kafka.address, {"reconnect.backoff.max.ms": 500})
    committer = opened(kafka, topic, connection=quick)
    assert write(committer, identity(topic, 0), ["a"])
    kafka.kill()
    try:
        with pytest.raises(UnavailableError, match="does not answer"):
            opened(kafka, topic)
    except BaseException:
        kafka.start()
        raise
    attempt = WriteAttempt(identity(topic, 1), "a", "stage")
    outcome = []

    def commit():
        try:
            committer.commit([Commit(attempt, staged(["b"], attempt))])
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=commit)
    thread.start()
    kafka.start()
    thread.join(90)
    assert not thread.is_alive()
    assert all(isinstance(error, (UnavailableError, CommitUncertainError)) for error in outcome)
    write(committer, identity(topic, 1), ["b"])
    assert sorted(kafka.values(topic)) == [b"a", b"b"]


@pytest.mark.rotates("brokers")
def test_where_nobody_can_tell_whether_it_was_committed_the_cluster_is_asked_again(kafka):
    topic = kafka.create_topic()
    committer = opened(kafka, topic, timeout=8)
    assert write(committer, identity(topic, 0), ["a"])
    attempt = WriteAttempt(identity(topic, 1), "a", "stage")
    kafka.pause()
    try:
        with pytest.raises((CommitUncertainError, UnavailableError)):
            committer.commit([Commit(attempt, staged(["b"], attempt))])
    finally:
        kafka.go_on()
    write(committer, identity(topic, 1), ["b"])
    assert sorted(kafka.values(topic)) == [b"a", b"b"]
