"""What a bucket is asked about many files: as little as about few."""

import csv
import io
from typing import NamedTuple

import pytest
from upath import UPath

from dagster_unified.connectors import CsvSource
from dagster_unified.engine.batch.intermediates import Address, IntermediateStore
from dagster_unified.storage.paths import size_of, sizes
from tests.engine.test_retention import put
from tests.object_store import client, requests, served


class Row(NamedTuple):
    number: int


@pytest.fixture
def bucket(monkeypatch):
    with served("lake") as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield environment["AWS_ENDPOINT_URL"]


def test_it_does_not_grow_with_the_files(bucket):
    s3, asked = client(bucket), []
    for count in (2, 40):
        text = io.StringIO()
        csv.writer(text).writerows([["number"], [1]])
        for number in range(count):
            s3.put_object(Bucket="lake", Key=f"in{count}/{number}.csv", Body=text.getvalue().encode())
        source = CsvSource(f"s3://lake/in{count}", Row)
        store = IntermediateStore(f"s3://lake/store{count}")
        data = store.data(put(store, "first", "run"))
        for number in range(count):
            (data / f"more-{number}.parquet").write_bytes(b"x" * number)
        requests(bucket)
        assert source.snapshot()
        assert store.find(Address("p", "first", "run")) is not None
        assert len(store.files(data)) == count + 1
        assert size_of(data) == 10 + sum(range(count))
        asked.append([request.method for request in requests(bucket)])
    assert asked[0] == asked[1]
    assert sizes(UPath("s3://lake/nowhere")) == {}


def test_a_snapshot_sees_a_file_that_has_changed(bucket):
    s3 = client(bucket)
    found = []
    for body in (b"number\n1\n", b"number\n1\n2\n"):
        s3.put_object(Bucket="lake", Key="in/a.csv", Body=body)
        found.append(CsvSource("s3://lake/in", Row).snapshot())
    s3.put_object(Bucket="lake", Key="in/b.csv", Body=b"number\n")
    found.append(CsvSource("s3://lake/in", Row).snapshot())
    assert len(set(found)) == 3
