"""What a worker reads of real topics, and what is wrong with them in one sentence. Needs no Spark."""

import re
import time
from concurrent.futures import Future
from datetime import datetime, timedelta, timezone
from typing import NamedTuple

import pytest
from confluent_kafka import OFFSET_INVALID, Consumer, Producer, TopicPartition
from confluent_kafka.admin import AclOperation, AdminClient, ListOffsetsResultInfo, ResourceType
from dagster import DailyPartitionsDefinition
from pyspark import cloudpickle
from upath import UPath

from dagster_unified.connectors.kafka import (
    AvroFormat,
    JsonFormat,
    KafkaConnection,
    KafkaMessage,
    KafkaOffsetsInitializer,
    KafkaSource,
    OffsetResetStrategy,
    RawFormat,
    SchemaRegistry,
    cluster,
    reading,
)
from dagster_unified.connectors.protocol.frame import Malformed
from dagster_unified.connectors.protocol.positions import OffsetsRead
from dagster_unified.connectors.protocol.splits import forget_ranges
from dagster_unified.errors import ConfigurationError, PipelineError, SourceError, StateError, UnavailableError
from dagster_unified.graph.connectors import Boundedness
from dagster_unified.orchestration.partitions import slice_of
from tests.support import Sale

DAYS = DailyPartitionsDefinition("2024-01-01", timezone="UTC")
DAY = 86_400_000
JANUARY = int(datetime(2024, 1, 1, tzinfo=timezone.utc).timestamp() * 1000)


class Placed(NamedTuple):
    amount: int
    sold_at: datetime
    shop: str
    part: int
    place: int
    topic: str


PLACES = {"shop": "key", "sold_at": "timestamp", "part": "partition", "place": "offset", "topic": "topic"}


def sale(amount, shop="a", **message):
    return {"value": f'{{"shop": "{shop}", "amount": {amount}}}', "partition": 0, **message}


def read(source, start=None, end=None):
    """The records between two positions, as another process would read them, and what does not fit."""
    splits = source.splits(start or source.first(), end or source.last() or source.newest())
    source = cloudpickle.loads(cloudpickle.dumps(source))
    records, malformed = [], []
    for split in splits:
        for found in source.read_split(split):
            if isinstance(found, Malformed):
                malformed.append(found)
            else:
                records += source.records.from_batch(found)
    return (records, malformed) if source.on_malformed != "fail" or malformed else records


def amounts(source, *positions):
    return sorted(record.amount for record in read(source, *positions))


def eventually(holds):
    """Whether something holds within ten seconds."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def topic(kafka):
    return kafka.create_topic(config={"retention.ms": "-1"})  # timestamps are of 2024


def test_values_become_records_and_fields_what_the_message_says(kafka, topic):
    kafka.write(topic, [sale(1, key="x", timestamp=JANUARY), sale(2, key="y", timestamp=JANUARY + 7, partition=1)])
    source = KafkaSource(topic, Placed, kafka.address, metadata=PLACES)
    at = datetime(2024, 1, 1, tzinfo=timezone.utc)
    assert sorted(read(source)) == [
        Placed(1, at, "x", 0, 0, topic),
        Placed(2, at + timedelta(milliseconds=7), "y", 1, 0, topic),
    ]


def test_messages_as_they_are(kafka, topic):
    headers = [("a", b"1"), ("a", None)]
    messages = [{"key": b"\xff", "value": b"v", "headers": headers}, {"key": b"k", "value": None}]
    kafka.write(topic, [{**message, "partition": 1, "timestamp": JANUARY} for message in messages])
    source = KafkaSource(topic, KafkaMessage, kafka.address, RawFormat())
    at = datetime(2024, 1, 1, tzinfo=timezone.utc)
    assert read(source) == [
        KafkaMessage(b"\xff", b"v", topic, 1, 0, at, headers),
        KafkaMessage(b"k", None, topic, 1, 1, at, []),
    ]


def test_several_topics_and_a_pattern(kafka, topic):
    other = kafka.create_topic(f"{topic}-more")
    kafka.write(topic, [sale(1)])
    kafka.write(other, [sale(2)])
    assert amounts(KafkaSource([topic, other], Sale, kafka.address)) == [1, 2]
    assert amounts(KafkaSource(re.compile(f"{topic}.*"), Sale, kafka.address)) == [1, 2]
    assert amounts(KafkaSource(re.compile(topic), Sale, kafka.address)) == [1]  # the whole name


def test_where_it_begins_and_ends(kafka, topic):
    kafka.write(topic, [sale(n, timestamp=JANUARY + n) for n in range(10)])
    for start, end, expected in (
        (KafkaOffsetsInitializer.earliest(), KafkaOffsetsInitializer.latest(), range(10)),
        (KafkaOffsetsInitializer.latest(), KafkaOffsetsInitializer.latest(), []),
        (KafkaOffsetsInitializer.timestamp(JANUARY + 3), KafkaOffsetsInitializer.timestamp(JANUARY + 5), [3, 4]),
        (
            KafkaOffsetsInitializer.timestamp(datetime(2024, 1, 1)),
            KafkaOffsetsInitializer.offsets({(topic, 0): 2}),
            [0, 1],
        ),
        (KafkaOffsetsInitializer.offsets({(topic, 0): 8}), KafkaOffsetsInitializer.timestamp(JANUARY + DAY), [8, 9]),
    ):
        source = KafkaSource(topic, Sale, kafka.address, starting_offsets=start, bounded=end)
        assert source.boundedness is Boundedness.BOUNDED
        assert amounts(source) == list(expected)


def commit(kafka, group, **offsets):
    """What another consumer does: commit offsets of partitions, given by names such as `sales_0`."""
    places = [TopicPartition(name[:-2], int(name[-1]), offset) for name, offset in offsets.items()]
    consumer = Consumer({"bootstrap.servers": kafka.address, "group.id": group})
    consumer.commit(offsets=places, asynchronous=False)
    consumer.close()


def from_group(kafka, topic, *given, **options):
    return KafkaSource(
        topic,
        Sale,
        kafka.address,
        starting_offsets=KafkaOffsetsInitializer.committed_offsets(*given),
        bounded=KafkaOffsetsInitializer.latest(),
        name="sales",
        **options,
    )


def test_it_begins_and_ends_where_a_consumer_group_has_stopped(kafka, topic):
    kafka.write(topic, [sale(n, partition=n % 2) for n in range(10)])
    first, second = f"{topic}-first", f"{topic}-second"
    commit(kafka, first, **{f"{topic}_0": 1, f"{topic}_1": 4})
    commit(kafka, second, **{f"{topic}_0": 3, f"{topic}_1": 5})
    assert amounts(from_group(kafka, topic, first)) == [2, 4, 6, 8, 9]
    committed = KafkaOffsetsInitializer.committed_offsets
    between = KafkaSource(topic, Sale, kafka.address, starting_offsets=committed(first), bounded=committed(second))
    assert amounts(between) == [2, 4, 9]
    assert "from committed offsets of group" in between.describe()


def test_a_group_without_an_offset_is_an_error_unless_something_is_to_be_taken_in_its_place(kafka, topic):
    kafka.write(topic, [sale(n, partition=n % 2) for n in range(4)])
    group = f"{topic}-group"
    said = (
        f"source 'sales': starting_offsets: consumer group '{group}' has committed no offset of {{}} in Kafka at"
        f" {kafka.address}; correct the group's name, or say what to take in its place, with"
        " OffsetResetStrategy.EARLIEST or LATEST"
    )
    with pytest.raises(SourceError, match=re.escape(said.format(f"{topic}[0], {topic}[1]"))):
        from_group(kafka, topic, group).first()
    commit(kafka, group, **{f"{topic}_0": 1})
    with pytest.raises(SourceError, match=re.escape(said.format(f"{topic}[1]"))):
        from_group(kafka, topic, group).first()
    assert amounts(from_group(kafka, topic, group, OffsetResetStrategy.EARLIEST)) == [1, 2, 3]
    assert amounts(from_group(kafka, topic, group, OffsetResetStrategy.LATEST)) == [2]


def test_an_offset_of_a_group_that_is_gone_is_an_error_unless_something_is_to_be_taken_in_its_place(kafka, topic):
    kafka.write(topic, [sale(n) for n in range(4)])
    group = f"{topic}-group"
    commit(kafka, group, **{f"{topic}_0": 1, f"{topic}_1": 0})
    kafka.admin.delete_records([TopicPartition(topic, 0, 3)])[TopicPartition(topic, 0)].result(30)
    with pytest.raises(SourceError, match=re.escape(f"has committed offset 1 of {topic}[0], which has 3 to 4")):
        from_group(kafka, topic, group).first()
    assert amounts(from_group(kafka, topic, group, OffsetResetStrategy.EARLIEST)) == [3]
    assert amounts(from_group(kafka, topic, group, OffsetResetStrategy.LATEST)) == []


def test_a_group_that_the_user_may_not_ask_is_named(kafka, topic, impatient):
    guest = KafkaConnection(kafka.secure_address, kafka.security("guest"))
    kafka.allow("guest", AclOperation.READ, ResourceType.TOPIC, topic)
    source = KafkaSource(
        topic, Sale, guest, starting_offsets=KafkaOffsetsInitializer.committed_offsets(f"{topic}-closed"), name="sales"
    )
    with pytest.raises(SourceError, match=f"may not ask what consumer group '{topic}-closed' has committed; give"):
        source.first()
    kafka.allow("guest", AclOperation.READ, ResourceType.GROUP, f"{topic}-closed")
    with pytest.raises(SourceError, match="has committed no offset of"):
        source.first()


def test_offsets_of_a_group_in_a_transaction_that_has_not_ended_are_waited_for(kafka, topic, monkeypatch):
    kafka.write(topic, [sale(n, partition=0) for n in range(4)])
    group = f"{topic}-group"
    commit(kafka, group, **{f"{topic}_0": 1, f"{topic}_1": 0})
    producer = Producer({"bootstrap.servers": kafka.address, "transactional.id": group})
    producer.init_transactions(30)
    producer.begin_transaction()
    consumer = Consumer({"bootstrap.servers": kafka.address, "group.id": group})
    producer.send_offsets_to_transaction([TopicPartition(topic, 0, 3)], consumer.consumer_group_metadata(), 30)
    monkeypatch.setattr(cluster, "ANSWER", 1.0)
    with pytest.raises(
        UnavailableError, match=f"consumer group '{group}' in .* are in a transaction that has not ended"
    ):
        from_group(kafka, topic, group).first()
    producer.commit_transaction(30)
    consumer.close()
    assert amounts(from_group(kafka, topic, group)) == [3]


def test_a_partition_in_time_is_a_range_of_offsets(kafka, topic):
    days = [0, 1, 0, 1, 2]  # the third is late: it is behind the first record of its next day
    kafka.write(topic, [sale(n, timestamp=JANUARY + day * DAY + n) for n, day in enumerate(days)])
    source = KafkaSource(topic, Sale, kafka.address)
    found = []
    for number in (1, 2, 3, 4):
        day = source.bounded_to(slice_of(DAYS, f"2024-01-0{number}")).with_fixed_range()
        end = day.batch_position(None).offsets
        found.append(amounts(source, source.at(datetime(2024, 1, number, tzinfo=timezone.utc)), end))
    assert found == [[0], [1, 2, 3], [4], []]  # each once


def test_what_a_transaction_has_not_committed_is_not_read(kafka, topic):
    def transaction(*numbers):
        producer = Producer({"bootstrap.servers": kafka.address, "transactional.id": f"{topic}-{numbers[0]}"})
        producer.init_transactions(30)
        producer.begin_transaction()
        for number in numbers:
            producer.produce(topic, **sale(number))
        producer.flush(30)
        return producer

    transaction(1, 2).commit_transaction(30)
    transaction(3, 4).abort_transaction(30)
    transaction(5).commit_transaction(30)
    transaction(6, 7).abort_transaction(30)
    source = KafkaSource(topic, Sale, kafka.address)
    assert eventually(lambda: source.newest()[f"{topic}[0]"] == 11)  # markers follow a commit after a while
    began = time.monotonic()
    assert amounts(source) == [1, 2, 5]  # the end is a marker, and reading stops there
    assert amounts(source, {f"{topic}[0]": 3}, {f"{topic}[0]": 6}) == []  # a range of aborted records only
    assert time.monotonic() - began < 5
    still_open = transaction(8)
    kafka.write(topic, [sale(9)])
    assert amounts(source) == [1, 2, 5]  # what is behind an open transaction waits
    everything = KafkaSource(topic, Sale, kafka.address, isolation_level="read_uncommitted")
    assert amounts(everything) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    still_open.commit_transaction(30)
    assert eventually(lambda: amounts(source) == [1, 2, 5, 8, 9])


def test_many_records_in_order_through_one_consumer(kafka, topic):
    kafka.write(topic, [sale(n) for n in range(50_000)])
    kafka.write(topic, [sale(n, partition=1) for n in range(100)])
    source = KafkaSource(topic, Sale, kafka.address)
    part, other = f"{topic}[0]", f"{topic}[1]"
    for start, end in ((0, 50_000), (1_000, 1_001), (20_000, 45_000), (49_999, 50_000), (0, 1)):
        assert [r.amount for r in read(source, {part: start}, {part: end})] == list(range(start, end))
        assert [r.amount for r in read(source, {other: 3}, {other: 7})] == [3, 4, 5, 6]
    assert len(reading._idle) == len({(c.origin, i) for c, i in reading._idle})


def test_what_does_not_fit_says_where_it_is(kafka, topic):
    values = [b'{"shop": "a", "amount": 1}', b"{", None, b'{"shop": "a", "amount": "x"}', b'{"shop": "\xff"}']
    kafka.write(topic, [{"value": value, "partition": 0} for value in [*values, values[0]]])
    records, malformed = read(KafkaSource(topic, Sale, kafka.address, on_malformed="divert"))
    assert records == [Sale("a", 1)] * 2
    assert [(one.place, one.content) for one in malformed] == [
        (f"{topic}[0]@1", "{"),
        (f"{topic}[0]@2", ""),
        (f"{topic}[0]@3", '{"shop": "a", "amount": "x"}'),
        (f"{topic}[0]@4", '{"shop": "\\xff"}'),
    ]
    assert [one.reason for one in malformed] == [
        "Input data was truncated",
        "it has no value: a tombstone",
        "Expected `int`, got `str` - at `$.amount`",
        "its key or its value is no UTF-8 (invalid start byte)",
    ]


def test_a_key_that_is_missing_or_no_text_does_not_fit(kafka, topic):
    kafka.write(topic, [sale(1), sale(2, key=b"\xff"), sale(3, key="ok")])
    source = KafkaSource(topic, Sale, kafka.address, metadata={"shop": "key"}, on_malformed="drop")
    records, malformed = read(source)
    assert records == [Sale("ok", 3)]
    assert [one.reason for one in malformed] == [
        "its key is missing, which field 'shop' needs",
        "its key or its value is no UTF-8 (invalid start byte)",
    ]


def test_new_partitions_enter_with_their_oldest_offset(kafka, topic):
    from confluent_kafka.admin import NewPartitions

    kafka.write(topic, [sale(1)])
    source = KafkaSource(topic, Sale, kafka.address, partition_discovery_interval=timedelta(0))
    seen = source.available(source.first())
    kafka.admin.create_partitions([NewPartitions(topic, 3)])[topic].result(30)
    assert eventually(lambda: len(source.available(seen)) == 3)
    kafka.write(topic, [sale(2, partition=2)])
    entered = source.available(seen)
    assert entered == {f"{topic}[0]": 1, f"{topic}[1]": 0, f"{topic}[2]": 0}
    assert amounts(source, entered, source.available(entered)) == [2]


def test_topics_that_come_to_match_a_pattern_enter_with_their_oldest_offset_and_those_that_go_are_told(
    kafka, topic, caplog
):
    kafka.write(topic, [sale(1)])
    every = re.compile(f"{topic}.*")
    source = KafkaSource(every, Sale, kafka.address, partition_discovery_interval=timedelta(0), name="sold")
    seen = source.available(source.first())
    more = kafka.create_topic(f"{topic}-more", partitions=1)
    kafka.write(more, [sale(2)])
    kafka.create_topic(f"other-{topic}")
    assert eventually(lambda: f"{more}[0]" in source.available(seen))
    entered = source.available(seen)
    assert entered == {f"{topic}[0]": 1, f"{topic}[1]": 0, f"{more}[0]": 0}
    after = source.available(entered)
    assert amounts(source, entered, after) == [2]
    kafka.delete_topic(more)
    assert source.available(after) == after
    assert source.available(after) == after
    (said,) = caplog.messages
    assert re.match(
        rf"source 'sold': Kafka at .* has no topic '{more}' any more: what was not read of it is lost", said
    )


def test_an_end_that_a_broker_does_not_tell_while_it_stops_is_asked_for_again(kafka, topic, monkeypatch):
    kafka.write(topic, [sale(1)])
    source, answers, ask = KafkaSource(topic, Sale, kafka.address), [], AdminClient.list_offsets

    def without_an_offset(client, asked, **options):
        futures = ask(client, asked, **options)
        if not answers:
            futures = {part: Future() for part in asked}
            for future in futures.values():
                future.set_result(ListOffsetsResultInfo(OFFSET_INVALID, -1, -1))
        answers.append(futures)
        return futures

    monkeypatch.setattr(AdminClient, "list_offsets", without_an_offset)
    assert source.newest() == {f"{topic}[0]": 1, f"{topic}[1]": 0}
    assert len(answers) == 2


def test_records_that_retention_has_deleted_are_an_error_and_not_left_out(kafka, topic):
    kafka.write(topic, [sale(n) for n in range(10)])
    source = KafkaSource(topic, Sale, kafka.address)
    position = OffsetsRead(source.origin, {f"{topic}[0]": 2, f"{topic}[1]": 0})
    kafka.admin.delete_records([TopicPartition(topic, 0, 5)])
    assert eventually(lambda: source.oldest()[f"{topic}[0]"] == 5)
    expected = rf"source '{topic}': the records of {topic}\[0\] from offset 2 on are gone, before they were read: .*"
    with pytest.raises(SourceError, match=expected):
        amounts(source, position.offsets)
    assert amounts(source) == [5, 6, 7, 8, 9]
    with pytest.raises(SourceError, match=rf"starting_offsets names offset 2 of {topic}\[0\], which has 5 to 10; .*"):
        read(KafkaSource(topic, Sale, kafka.address, starting_offsets=KafkaOffsetsInitializer.offsets({(topic, 0): 2})))


def test_a_topic_that_was_made_again_is_an_error(kafka, topic):
    source = KafkaSource(topic, Sale, kafka.address).after(
        OffsetsRead(KafkaSource(topic, Sale, kafka.address).origin, {f"{topic}[0]": 7})
    )
    with pytest.raises(
        SourceError, match=r"ends at offset 0, and has been read up to 7: it was deleted and made again"
    ):
        source.with_fixed_range()


def test_a_topic_that_was_made_again_is_an_error_though_it_is_longer_now(kafka, topic, tmp_path):
    kafka.write(topic, [sale(n) for n in range(3)])
    source = KafkaSource(topic, Sale, kafka.address, starting_offsets=KafkaOffsetsInitializer.latest())
    position = source.with_fixed_range().batch_position(None)
    assert set(position.identities) == {topic}
    begun = source.stream_range(UPath(tmp_path / "sources/sales"))
    kafka.admin.delete_topics([topic])[topic].result()
    assert eventually(lambda: topic not in kafka.admin.list_topics().topics)
    kafka.create_topic(topic)
    kafka.write(topic, [sale(n) for n in range(10)])
    again = KafkaSource(topic, Sale, kafka.address, starting_offsets=KafkaOffsetsInitializer.latest())
    with pytest.raises(SourceError, match=f"^source '{topic}': {topic} was deleted and made again since it was read"):
        again.after(position).with_fixed_range()
    with pytest.raises(SourceError, match=r"was deleted and made again since it was read.*; start without state"):
        again.stream_range(UPath(tmp_path / "sources/sales"))
    forget_ranges(UPath(tmp_path / "sources"))
    assert again.stream_range(UPath(tmp_path / "sources/sales")).start != begun.start


def test_a_topic_that_is_deleted_under_a_stream_is_one_sentence(kafka, impatient):
    topic = kafka.create_topic()
    kafka.write(topic, [sale(1)])
    source = KafkaSource(topic, Sale, kafka.address, name="sold")
    start = source.oldest()
    assert source.available(start)
    kafka.delete_topic(topic)
    with pytest.raises(SourceError, match=rf"source 'sold': Kafka at .* has no topic '{topic}'"):
        source.available(start)


def test_an_unknown_topic(kafka, topic, impatient):
    with pytest.raises(
        SourceError, match=rf"source 'sold': Kafka at .* has no topic '{topic}s', .*did you mean '{topic}'"
    ):
        read(KafkaSource(f"{topic}s", Sale, kafka.address, name="sold"))
    with pytest.raises(SourceError, match=r"has no topic that matches 'nothing.*'; correct the pattern"):
        read(KafkaSource(re.compile("nothing.*"), Sale, kafka.address))
    with pytest.raises(SourceError, match=rf"starting_offsets names {topic}\[5\], which .* does not have; there are"):
        read(KafkaSource(topic, Sale, kafka.address, starting_offsets=KafkaOffsetsInitializer.offsets({(topic, 5): 2})))


def test_a_user_without_permission(kafka, topic, impatient):
    kafka.write(topic, [sale(1)])
    source = KafkaSource(topic, Sale, KafkaConnection(kafka.secure_address, kafka.security("guest")))
    with pytest.raises(SourceError, match=r"has no topic .* or this user may not see it; .* give the user DESCRIBE"):
        read(source)
    kafka.allow("guest", AclOperation.DESCRIBE, ResourceType.TOPIC, topic)
    assert eventually(lambda: allowed(source.newest))
    (split,) = source.splits(source.first(), source.newest())
    with pytest.raises(SourceError, match=r"this user has no permission for the topic .*; give it READ and DESCRIBE"):
        list(source.read_split(split))
    kafka.allow("guest", AclOperation.READ, ResourceType.TOPIC, topic)
    assert eventually(lambda: allowed(lambda: list(source.read_split(split))))
    assert read(source) == [Sale("a", 1)]
    wrong = KafkaConnection(kafka.secure_address, kafka.security("guest", "wrong"))
    with pytest.raises(ConfigurationError, match=rf"source '{topic}': .* the broker refused the login"):
        read(KafkaSource(topic, Sale, wrong))


def allowed(action):
    """Whether an action is one that the broker lets us do."""
    try:
        action()
    except SourceError:
        return False
    return True


def test_a_broker_that_is_away_at_the_start(kafka, impatient):
    began = time.monotonic()
    with pytest.raises(UnavailableError, match=r"source 'sales': Kafka at 127.0.0.1:1 does not answer"):
        read(KafkaSource("sales", Sale, "127.0.0.1:1"))
    assert time.monotonic() - began < 10


def test_a_registry_that_is_away_is_named_with_its_source(kafka):
    topic = kafka.create_topic()
    kafka.write(topic, [{"value": b"\0\0\0\0\1x"}])
    source = KafkaSource(
        topic, Sale, kafka.address, name="sales", value_format=AvroFormat(registry=SchemaRegistry("http://127.0.0.1:1"))
    )
    with pytest.raises(UnavailableError, match=r"^source 'sales': the schema registry at .* does not answer"):
        read(source)


def test_a_position_belongs_to_topics_and_not_to_the_brokers_that_are_asked():
    position = OffsetsRead("Kafka", {"a[0]": 1, "b[0]": 2})
    for topics in ("a", ["b", "new"], re.compile("a.*")):
        KafkaSource(topics, Sale, "elsewhere:9092").after(position)
    with pytest.raises(
        StateError, match=r"cannot go on after Kafka \(a\[0\] up to 1, .*\): it reads .*, topic c; start"
    ):
        KafkaSource("c", Sale, "broker:9092").after(position)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"topics": ""}, "'' is not the name of a topic"),
        ({"topics": ["sales*"]}, r"'sales\*' is not the name of a topic; give names, or a pattern made by re.compile"),
        ({"topics": []}, "there is no topic"),
        ({"on_malformed": "skip"}, "on_malformed is one of fail, drop, divert, and not 'skip'"),
        ({"isolation_level": "committed"}, "isolation_level is one of read_committed, read_uncommitted"),
        ({"max_records_per_trigger": 0}, "max_records_per_trigger must be a whole number of at least 1, not 0"),
        ({"metadata": {"shops": "key"}}, "metadata names field 'shops', which .* not have; did you mean 'shop'"),
        ({"metadata": {"shop": "keys"}}, "field 'shop' is to hold 'keys'; a message has key, .*; did you mean 'key'"),
        ({"metadata": {"amount": "key"}}, "field 'amount' of type int64 cannot hold the key; declare bytes or str"),
        ({"record": int, "metadata": {"x": "key"}}, "metadata needs a record with fields, and int.* is a plain value"),
        ({"value_format": RawFormat()}, "a raw value is one field, and there are shop, amount"),
    ],
)
def test_what_an_author_gets_wrong_is_told_when_the_source_is_made(arguments, problem):
    given = {"connection": "broker:9092", "topics": "sales", "record": Sale, "name": "s", **arguments}
    with pytest.raises(PipelineError, match=f"source 's': {problem}"):
        KafkaSource(**given)


def test_it_says_in_one_line_what_is_read_and_tells_no_secret():
    connection = KafkaConnection("broker:9092", {"sasl.password": "pa55"})
    source = KafkaSource(
        ["a", "b"], Sale, connection, JsonFormat(), bounded=KafkaOffsetsInitializer.timestamp(JANUARY), name="s"
    )
    assert source.describe() == (
        "Kafka at broker:9092, topics a, b as json, from earliest until timestamp 2024-01-01T00:00:00+00:00,"
        " malformed messages: fail"
    )
    assert "pa55" not in f"{source.settings()} {source.snapshot()} {source.connection!r}"
    assert KafkaSource(re.compile("sold|sales-.*"), Sale, "broker:9092").name == "sold_sales-"
