"""Sources that stop where another run has stopped, in both modes, whatever has come since."""

from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from dagster_unified.connectors import CollectionSource, DeltaSource, ParquetSource, RateSource, SocketSource
from dagster_unified.connectors.protocol.positions import EverythingRead, FilesRead, OffsetsRead
from dagster_unified.errors import StateError, UnsupportedError
from tests.connectors.support import Query, read_batch


class Sale(NamedTuple):
    amount: int


class Files:
    def __init__(self, folder):
        self.folder = folder / "in"
        self.folder.mkdir()

    def add(self, number):
        pq.write_table(pa.table({"amount": [number]}), self.folder / f"{number}.parquet")

    def source(self, follows=False):
        return ParquetSource(str(self.folder), Sale, name="sales", monitor=follows)


class Delta:
    def __init__(self, folder):
        self.folder = str(folder / "in")

    def add(self, number):
        write_deltalake(self.folder, pa.table({"amount": [number]}), mode="append")

    def source(self, follows=False):
        return DeltaSource(self.folder, Sale, name="sales", bounded=not follows)


class Collection:
    def __init__(self, folder):
        self.numbers = []

    def add(self, number):
        self.numbers.append(Sale(number))

    def source(self, follows=False):
        return CollectionSource(self.numbers, Sale, "sales")


KINDS = [Files, Delta, Collection]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_stops_where_another_has_stopped_and_goes_on_to_where_that_stops_later(spark, tmp_path, kind):
    there = kind(tmp_path)
    for folder in ("other", "ours"):
        (tmp_path / folder).mkdir()
    positions = []
    for number in (1, 2, 3):
        there.add(number)
        other = Query(spark, there.source(follows=True), tmp_path / "other")
        other.run()
        positions.append(other.position())
    for reached, position in enumerate(positions[:2], 1):
        stopping = there.source(follows=True).until(position)
        assert read_batch(spark, stopping) == [*range(1, reached + 1)]
        ours = Query(spark, stopping, tmp_path / "ours")
        assert ours.run() == [reached], "and nothing twice"


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_run_stops_where_another_has_stopped(spark, tmp_path, kind):
    there = kind(tmp_path)
    there.add(1)
    first = there.source().with_fixed_range()
    stop = first.stops_at() if kind is not Collection else first.batch_position(spark)
    there.add(2)
    assert read_batch(spark, first) == [1]
    assert read_batch(spark, there.source().until(stop)) == [1]
    assert read_batch(spark, there.source()) == [1, 2]


def test_files_that_are_gone_are_named(spark, tmp_path):
    there = Files(tmp_path)
    there.add(1)
    there.add(2)
    stop = there.source().with_fixed_range().stops_at()
    assert there.source().lost(stop) == []
    (there.folder / "1.parquet").unlink()
    there.add(3)
    assert there.source().lost(stop) == ["1.parquet"]
    assert read_batch(spark, there.source().until(stop)) == [2]


def test_a_snapshot_is_that_of_the_files_that_are_read(tmp_path):
    there = Files(tmp_path)
    there.add(1)
    before = there.source().snapshot()
    stop = there.source().with_fixed_range().stops_at()
    there.add(2)
    assert there.source().snapshot() != before
    assert there.source().until(stop).snapshot() == before


def test_a_table_that_was_made_again_cannot_be_read_up_to_the_same_version(spark, tmp_path):
    there = Delta(tmp_path)
    there.add(1)
    stop = there.source().with_fixed_range().stops_at()
    (tmp_path / "in").rename(tmp_path / "moved")
    there.add(2)
    with pytest.raises(Exception, match="the table was deleted and made again"):
        read_batch(spark, there.source().until(stop))


@pytest.mark.parametrize(
    ("source", "position", "error", "words"),
    [
        (ParquetSource("/a", Sale), FilesRead.of("/b", ["1"]), StateError, "cannot stop at 1 file in /b: it reads /a"),
        (ParquetSource("/a", Sale), EverythingRead(), StateError, "cannot stop at everything: it reads /a"),
        (DeltaSource("/a", Sale), OffsetsRead("Delta table at /b", {}), StateError, "it reads Delta table at /a"),
        (CollectionSource([Sale(1)], Sale), EverythingRead(2), StateError, "it has 1 records"),
        (RateSource(), OffsetsRead("rate", {"value": 1}), UnsupportedError, "cannot stop where another run has"),
        (SocketSource("h", 1), OffsetsRead("log", {}), UnsupportedError, "its records came to that job alone"),
    ],
)
def test_a_source_that_cannot_stop_says_so(source, position, error, words):
    with pytest.raises(error, match=words):
        source.until(position)
