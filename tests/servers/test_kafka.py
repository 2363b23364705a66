"""The broker itself: what other tests rely on."""

from confluent_kafka import KafkaError, Producer
from confluent_kafka.admin import AclOperation, AdminClient, ResourceType


def test_messages_come_back_by_partition_and_offset(kafka):
    topic = kafka.create_topic(partitions=2)
    kafka.write(
        topic, [{"value": b"a", "partition": 1}, {"value": b"b", "partition": 0}, {"value": b"c", "partition": 1}]
    )
    assert [(m.partition(), m.offset(), m.value()) for m in kafka.read(topic)] == [
        (0, 0, b"b"),
        (1, 0, b"a"),
        (1, 1, b"c"),
    ]


def test_only_what_was_committed_is_read_unless_asked(kafka):
    topic = kafka.create_topic(partitions=1)
    producer = Producer({"bootstrap.servers": kafka.address, "transactional.id": f"{topic}-writer"})
    producer.init_transactions(30)
    for value, end in ((b"kept", producer.commit_transaction), (b"aborted", producer.abort_transaction)):
        producer.begin_transaction()
        producer.produce(topic, value)
        producer.flush(30)
        end(30)
    assert kafka.values(topic) == [b"kept"]
    assert kafka.values(topic, committed=False) == [b"kept", b"aborted"]


def test_it_keeps_its_messages_and_its_address_when_it_is_killed_and_starts_again(kafka):
    topic, address = kafka.create_topic(partitions=1), kafka.address
    kafka.write(topic, [{"value": b"before"}])
    kafka.kill()
    kafka.start()
    kafka.write(topic, [{"value": b"after"}])
    assert kafka.values(topic) == [b"before", b"after"]
    assert kafka.address == address


def test_over_tls_a_user_needs_a_password_and_permissions(kafka):
    topic = kafka.create_topic(partitions=1)
    kafka.allow("guest", AclOperation.DESCRIBE, ResourceType.TOPIC, topic)
    assert _write(kafka, topic, kafka.security("admin")) is None
    assert _write(kafka, topic, kafka.security("guest")).code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    errors = []
    wrong = {"bootstrap.servers": kafka.secure_address, **kafka.security("admin", "wrong")}
    AdminClient({**wrong, "error_cb": errors.append, "log_level": 0}).poll(10)
    assert KafkaError._AUTHENTICATION in [error.code() for error in errors]


def _write(kafka, topic, security):
    """The error with which the broker answered, if it did."""
    found = []
    producer = Producer({"bootstrap.servers": kafka.secure_address, **security, "log_level": 0})
    producer.produce(topic, b"x", on_delivery=lambda error, _: found.append(error))
    producer.flush(30)
    return found[0]
