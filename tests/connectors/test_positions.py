"""What a source has read travels as a position, and the same source reads the rest, in either mode."""

from datetime import datetime, timedelta, timezone
from typing import NamedTuple

import msgspec
import pytest
from dagster import DailyPartitionsDefinition, MultiPartitionsDefinition, StaticPartitionsDefinition
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.connectors import CollectionSource, RateSource, StructuredSource
from dagster_unified.connectors.protocol.positions import (
    EverythingRead,
    FilesRead,
    OffsetsRead,
    PartitionsRead,
    Position,
    SparkOffset,
    Unread,
)
from dagster_unified.errors import MalformedInputError, StateError, UnsupportedError
from dagster_unified.orchestration.partitions import slice_of
from tests.connectors.support import Query, read_batch

BERLIN = DailyPartitionsDefinition("2024-01-01", timezone="Europe/Berlin")
SECOND = slice_of(BERLIN, "2024-01-02")


class Sale(NamedTuple):
    amount: int
    at: str


SALES = (
    Sale(1, "2024-01-01T12:00:00+01:00"),
    Sale(2, "2024-01-02T23:59:59+01:00"),
    Sale(3, "2024-01-03T00:00:00+01:00"),
    Sale(4, "2024-01-05T00:00:00+01:00"),
)


def collection(data=SALES, name="sales"):
    return CollectionSource(data, Sale, name)


@pytest.mark.parametrize(
    ("position", "words"),
    [
        (Unread(), "nothing"),
        (EverythingRead(), "everything"),
        (EverythingRead(4), "the first 4 records"),
        (
            PartitionsRead(datetime(2024, 1, 3, tzinfo=timezone(timedelta(hours=1))), "2024-01-02"),
            "the partitions up to 2024-01-02, which ends at 2024-01-03T00:00:00+01:00",
        ),
        (FilesRead.of("/in", ["b", "a"]), "2 files in /in"),
        (SparkOffset("kafka", '{"sales": {"0": 5}}'), 'Spark\'s kafka up to \'{"sales": {"0": 5}}\''),
        (
            FilesRead.of("/in", ["b"], PartitionsRead(datetime(2024, 1, 3, tzinfo=timezone.utc), "2024-01-02")),
            "the partitions up to 2024-01-02, which ends at 2024-01-03T00:00:00+00:00, and of later ones 1 file in /in",
        ),
    ],
)
def test_a_position_is_json_and_says_itself_in_words(position, words):
    assert msgspec.json.decode(msgspec.json.encode(position), type=Position) == position
    assert position.describe() == words


@given(st.sets(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)))
def test_the_names_of_files_come_back_whatever_they_are(names):
    position = msgspec.json.decode(msgspec.json.encode(FilesRead.of("/in", names)), type=Position)
    assert position.files() == names
    assert position.count == len(names)


def test_a_collection_goes_on_after_the_records_that_were_read(spark, tmp_path):
    first = collection(SALES[:1])
    position = first.batch_position(spark)
    assert position == EverythingRead(1)
    assert read_batch(spark, collection().after(position)) == [2, 3, 4]

    stream = Query(spark, collection(SALES[:3]).after(position), tmp_path)
    assert stream.position() == position
    assert stream.run() == [2, 3]
    assert stream.position() == EverythingRead(3)
    assert read_batch(spark, collection().after(stream.position())) == [4]
    assert Query(spark, collection(SALES[:3]).after(stream.position()), tmp_path / "next").run() == []
    with pytest.raises(StateError, match="source 'sales': it cannot go on after the first 3 records: it has only 2"):
        collection(SALES[:2]).after(stream.position())


def test_a_stream_begins_where_the_last_partition_of_a_field_ended(spark, tmp_path):
    source = collection().partitioned_by("at")
    bounded = source.bounded_to(SECOND)
    assert read_batch(spark, bounded) == [2]
    position = bounded.batch_position(spark)
    assert position == PartitionsRead(datetime.fromisoformat("2024-01-03T00:00:00+01:00"), "2024-01-02")
    stream = Query(spark, source.after(position), tmp_path)
    assert stream.run() == [3, 4]
    assert stream.position() == EverythingRead(4)
    assert read_batch(spark, source.after(position)) == [3, 4]
    assert read_batch(spark, source.after(position).bounded_to(slice_of(BERLIN, "2024-01-05"))) == [4]
    with pytest.raises(Exception, match=MalformedInputError.__name__):
        read_batch(spark, collection([*SALES, Sale(5, "soon")]).partitioned_by("at").after(position))


def test_a_source_that_does_not_know_partitions_cannot_go_on_after_one():
    with pytest.raises(StateError, match=r"source 'sales'.*after the partitions up to 2024-01-02.*partitioned_by"):
        collection().after(PartitionsRead(datetime(2024, 1, 3, tzinfo=timezone.utc), "2024-01-02"))


@pytest.mark.parametrize(
    ("definition", "key", "why"),
    [
        (StaticPartitionsDefinition(["EWR", "JFK"]), "EWR", "are not in time"),
        (
            MultiPartitionsDefinition({"date": BERLIN, "at": StaticPartitionsDefinition(["EWR"])}),
            "EWR|2024-01-02",
            "have several dimensions",
        ),
    ],
)
def test_partitions_without_an_order_give_no_position(definition, key, why):
    fields = {"at": "at"} if "|" in key else {}
    source = collection().partitioned_by(**fields) if fields else collection().partitioned_by("at")
    with pytest.raises(UnsupportedError, match=f"source 'sales': it has read partition '.*{why}"):
        source.bounded_to(slice_of(definition, key)).batch_position(None)


def test_a_source_that_has_no_position_says_so_when_it_is_asked():
    odd = StructuredSource("odd", Sale)
    with pytest.raises(UnsupportedError, match=r"source 'odd' \(Spark source odd\) cannot go on after what has been"):
        odd.stream_position(None, '{"offset": 1}')
    with pytest.raises(UnsupportedError, match="source 'odd'"):
        StructuredSource("odd", Sale, bounded=True).batch_position(None)
    offset = SparkOffset("odd", "7")
    with pytest.raises(
        StateError, match="after Spark's odd up to '7': nothing says with which options; give starting_"
    ):
        odd.after(offset)
    with pytest.raises(StateError, match=r"source 'even': it cannot go on .*: it reads Spark's even"):
        StructuredSource("even", Sale, starting_options=lambda offset: {"start": offset}).after(offset)
    with pytest.raises(
        StateError, match="source 'rate': 'x' in Spark's checkpoint is not an offset of its rate source"
    ):
        RateSource().stream_position(None, "x")
    with pytest.raises(StateError, match=r"source 'rate': it cannot go on after topic .*: it reads Spark's rate"):
        RateSource().after(OffsetsRead("topic", {"value": 3}))
    with pytest.raises(StateError, match="source 'rate': it cannot go on after everything: a RateSource does not know"):
        RateSource().after(EverythingRead())
    assert RateSource().after(Unread()).describe() == "Spark source rate"


def test_spark_s_kafka_begins_at_the_offsets_whatever_its_options_say():
    offset = '{"sales":{"0":5}}'
    options = StructuredSource("kafka", Sale, {"startingTimestamp": "0"}).starting_options(offset)
    assert options == {"startingOffsets": offset, "startingTimestamp": None, "startingOffsetsByTimestamp": None}


def test_batch_over_spark_s_kafka_has_read_up_to_its_ending_offsets():
    def source(**options):
        return StructuredSource("kafka", Sale, {"subscribe": "sales", **options}, bounded=True, name="sales")

    read = source(endingOffsets='{"sales": {"0": 5, "1": 0}}').batch_position(None)
    assert read == SparkOffset("kafka", '{"sales": {"0": 5, "1": 0}}')
    for ending, said in (
        ({}, "not set"),
        ({"endingOffsets": "latest"}, "latest"),
        ({"endingOffsets": '{"sales": {"0": -1}}'}, "-1"),
    ):
        with pytest.raises(UnsupportedError, match=rf"source 'sales': .* endingOffsets \(.*{said}.*\) does not say"):
            source(**ending).batch_position(None)


@pytest.mark.parametrize("option", ["endingOffsets", "endingtimestamp"])
def test_spark_s_kafka_has_no_end_in_streaming(tmp_path, option):
    source = StructuredSource("kafka", Sale, {"subscribe": "sales", option: "1"}, bounded=True, name="sales")
    with pytest.raises(UnsupportedError, match=rf"^source 'sales': Spark's kafka takes {option} in BATCH only; leave"):
        source.read_stream(None, tmp_path)


def test_options_of_spark_s_kafka_are_known_in_any_case_and_in_its_order():
    ends = '{"sales": {"0": 5}}'

    def source(**options):
        return StructuredSource("kafka", Sale, {"subscribe": "sales", **options}, bounded=True, name="sales")

    assert source(endingoffsets=ends).batch_position(None) == SparkOffset("kafka", ends)
    for option in ("endingTimestamp", "endingtimestamp", "ENDINGOFFSETSBYTIMESTAMP"):
        with pytest.raises(UnsupportedError, match=rf"source 'sales': .* and {option}, which counts for more than end"):
            source(endingOffsets=ends, **{option: "1700000000000"}).batch_position(None)

    begins = source(
        startingtimestamp="1", STARTINGOFFSETS="earliest", startingOffsetsBytimestamp="{}", minPartitions="2"
    )
    begun = begins.after(SparkOffset("kafka", ends))._started()
    assert begun == {"subscribe": "sales", "minPartitions": "2", "startingOffsets": ends}
