"""Each Parquet file of a source is held against the record, not the first one."""

import logging
import uuid
from datetime import datetime, time, timezone
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from upath import UPath

from dagster_unified.api import Pipeline
from dagster_unified.api import functions as F
from dagster_unified.connectors import ParquetSource, PrintSink
from dagster_unified.connectors.files import file_columns
from dagster_unified.connectors.files.file_columns import FileColumns, schemas
from dagster_unified.connectors.files.folder import Folder
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.stage import run_stage
from dagster_unified.engine.events import EpochCommitted
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.errors import MalformedInputError, PipelineError, UnifiedError
from dagster_unified.records import record_type
from tests.connectors.support import Query
from tests.object_store import client, requests, served


class Place(NamedTuple):
    city: str
    zip: str | None


class Sale(NamedTuple):
    id: int
    amount: int | None
    place: Place | None
    others: list[Place]


WHERE = {"city": "Oslo", "zip": "0150"}
WHOLE = {"id": 1, "amount": 3, "place": WHERE, "others": [WHERE]}


def without(row, *names):
    return {name: value for name, value in row.items() if name not in names}


def write(folder, *rows):
    folder.mkdir(exist_ok=True)
    for number, row in enumerate(rows):
        pq.write_table(pa.Table.from_pylist([row]), folder / f"{number}.parquet")


CASES = {
    "a field that may not be None": (without(WHOLE, "id"), "1.parquet has no column 'id'.* its field may not be None"),
    "a new name": (
        {**without(WHOLE, "amount"), "total": 3},
        "1.parquet has no column 'amount'.*and has 'total', which",
    ),
    "another case": ({**without(WHOLE, "amount"), "Amount": 3}, "1.parquet has no column 'amount'.*and has 'Amount'"),
    "a new name within another": (
        {**WHOLE, "place": {"city": "Oslo", "code": "0150"}},
        "1.parquet has no column 'place.zip'.*and has 'place.code', which no field takes",
    ),
    "a member of a list's elements": (
        {**WHOLE, "others": [{"zip": "0150"}]},
        "1.parquet has no column 'others.city'.* its field may not be None",
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("later", [True, False])
def test_a_file_that_lacks_a_column_is_named(tmp_path, case, later):
    odd, message = CASES[case]
    write(tmp_path, *([WHOLE, odd, WHOLE] if later else [odd, WHOLE]))
    columns = FileColumns(record_type(Sale).schema, "source 'sales'", str(tmp_path))
    with pytest.raises(MalformedInputError, match=message if later else message.replace("1.parquet", "0.parquet")):
        columns.add(sorted(UPath(tmp_path).glob("*")))


def test_a_column_that_no_file_has_is_an_error(tmp_path):
    write(tmp_path, without(WHOLE, "amount"))
    columns = FileColumns(record_type(Sale).schema, "source 'sales'", str(tmp_path))
    with pytest.raises(
        PipelineError, match=rf"source 'sales': no column 'amount' in {tmp_path}; it has id, others, pl"
    ):
        columns.add(sorted(UPath(tmp_path).glob("*")))


def test_what_may_be_none_is_where_nothing_else_has_changed(tmp_path, caplog):
    extra = {"note": "read by nobody"}
    write(tmp_path, WHOLE | extra, without(WHOLE, "amount", "place"), without(WHOLE, "amount") | extra, WHOLE)
    (tmp_path / "empty.parquet").touch()
    columns = FileColumns(record_type(Sale).schema, "source 'sales'", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        columns.add(sorted(UPath(tmp_path).glob("*")))
    assert columns.lacking() == {"amount": "2: 1.parquet, 2.parquet", "place": "1: 1.parquet"}
    assert f"{tmp_path}/empty.parquet has no bytes, and so no rows" in caplog.text
    assert f"{tmp_path}/2.parquet has no column 'amount', which is None in its rows" in caplog.text


def test_a_long_footer_is_read_as_well(tmp_path):
    pq.write_table(pa.table({f"column {number}": [number] for number in range(2_000)}), tmp_path / "wide.parquet")
    (tmp_path / "none.parquet").write_bytes(b"PAR1 this is none PAR1")
    wide, none, gone = schemas([UPath(tmp_path / name) for name in ("wide.parquet", "none.parquet", "gone.parquet")])
    assert len(wide) == 2_000
    assert none is gone is None


def test_a_bucket_is_asked_once_for_each_file(monkeypatch, tmp_path):
    write(tmp_path, *[WHOLE] * 40)
    with served("lake") as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        endpoint = environment["AWS_ENDPOINT_URL"]
        for file in sorted(tmp_path.glob("*")):
            client(endpoint).put_object(Bucket="lake", Key=f"in/{file.name}", Body=file.read_bytes())
        client(endpoint).put_object(Bucket="lake", Key="in/empty.parquet", Body=b"")
        files = [UPath(f"s3://lake/in/{name}.parquet") for name in [*range(40), "empty", "gone"]]
        requests(endpoint)
        found = schemas(files)
        asked = [request.method for request in requests(endpoint)]
    assert [schema is not None for schema in found] == [True] * 40 + [False] * 2
    assert asked == ["GET"] * 42


class Small(NamedTuple):
    id: int
    amount: int | None


def rows_of(frame):
    return sorted((row.id, row.amount) for row in frame.collect())


@pytest.mark.a_day(1)
@pytest.mark.parametrize("monitor", [False, True])
def test_both_modes_name_the_file_and_nothing_is_committed(spark, tmp_path, monitor):
    write(tmp_path / "in", {"id": 1, "amount": 1}, {"id": 2, "total": 2})
    source = ParquetSource(str(tmp_path / "in"), Small, name="sales", monitor=monitor, max_files_per_trigger=1)
    message = r"source 'sales': .*/in/1.parquet has no column 'amount'.* has 'total', which no field takes"
    if not monitor:
        with pytest.raises(MalformedInputError, match=message):
            source.read(spark)
    stream = Query(spark, source, tmp_path / "job")
    with pytest.raises(MalformedInputError, match=message):
        stream.run()
    assert [amount for epoch in stream.read for amount in epoch] in ([], [1])


def test_metadata_says_which_files_lacked_a_column(spark, tmp_path):
    write(tmp_path / "in", {"id": 1}, {"id": 2, "amount": 2}, {"id": 3})
    pipeline = Pipeline("sales")
    pipeline.from_source(ParquetSource(str(tmp_path / "in"), Small, name="sales")).sink_to(PrintSink())
    plan = pipeline.plan({"execution.runtime-mode": "BATCH"})
    run = Run(plan, spark, IntermediateStore(str(tmp_path / "store")), "run", "run")
    manifest = run_stage(run, plan.regions[0], lambda _: None)
    assert manifest.lacking == {"files of sales without column 'amount'": "2: 0.parquet, 2.parquet"}
    assert manifest.rows == 3


@pytest.mark.a_day(1)
@pytest.mark.parametrize("aggregates", [False, True], ids=["records", "columns"])
def test_an_epoch_says_which_files_lacked_a_column(spark, tmp_path, aggregates):
    write(tmp_path / "in", {"id": 1}, {"id": 2, "amount": 2}, {"id": 3})
    pipeline = Pipeline("sales")
    small = pipeline.from_source(ParquetSource(str(tmp_path / "in"), Small, name="sales"))
    if aggregates:
        keyed = small.where("id > 0").key_by("id")
        small = keyed.agg(F.sum("amount").alias("amount"), output_type=Small)
    small.sink_to(PrintSink())
    launched = {
        "execution.runtime-mode": "STREAMING",
        "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
        "state.native-aggregates": "SPARK",
    }
    epochs = []
    plan = pipeline.plan(launched)
    StreamingJob(plan, spark, Start("run"), lambda e: epochs.append(e) if isinstance(e, EpochCommitted) else None).run()
    assert epochs[-1].lacking == {"files of sales without column 'amount'": "2: 0.parquet, 2.parquet"}


ODD = {
    "nanoseconds": pa.array([1], pa.timestamp("ns")),
    "uuid": pa.array([uuid.uuid4().bytes], pa.uuid()),
    "time": pa.array([time(1, 2)], pa.time32("ms")),
    "half": pa.array([1.5], pa.float16()),
    "within": pa.array([{"at": 1}], pa.struct([("at", pa.timestamp("ns"))])),
}


def test_a_monitored_folder_has_a_column_where_some_file_has_it(spark, tmp_path, monkeypatch):
    write(tmp_path / "in", {"id": 1}, {"id": 2, "amount": 2})
    monkeypatch.setattr(Folder, "any", lambda self: "0.parquet")
    source = ParquetSource(str(tmp_path / "in"), Small, name="sales", monitor=True)
    assert source.read_stream(spark, UPath(tmp_path / "job" / "sources" / "sales")).columns == ["id", "amount"]


@pytest.mark.a_day(1)
@pytest.mark.parametrize("first", [True, False])
def test_a_column_that_nobody_asks_for_does_not_refuse_its_file(spark, tmp_path, first):
    (tmp_path / "in").mkdir()
    plain = {"id": pa.array([2], pa.int32()), "amount": pa.array([2], pa.uint8())}
    odd, even = ("a", "b") if first else ("b", "a")
    pq.write_table(pa.table({"id": [1], "amount": [1], **ODD}), tmp_path / "in" / f"{odd}.parquet")
    pq.write_table(pa.table({**plain, "note": ["x"]}), tmp_path / "in" / f"{even}.parquet")
    source = ParquetSource(str(tmp_path / "in"), Small, name="sales")
    assert rows_of(source.read(spark)) == [(1, 1), (2, 2)]
    assert Query(spark, source, tmp_path / "job").run() == [1, 2]


@pytest.mark.parametrize("name", ["nanoseconds", "uuid", "half"])
def test_one_that_is_asked_for_is_named_with_its_file(spark, tmp_path, name):
    kinds = {"nanoseconds": datetime, "uuid": bytes, "half": float}
    record = NamedTuple("Record", [(name, kinds[name])])
    pq.write_table(pa.table({name: ODD[name]}), tmp_path / "a.parquet")
    with pytest.raises(PipelineError, match=rf"source 'sales': column '{name}' of {tmp_path}/a.parquet is .*, which"):
        ParquetSource(str(tmp_path), record, name="sales").read(spark)


def test_a_later_file_with_another_type_is_named(run_on_spark, tmp_path):
    class Seen(NamedTuple):
        at: datetime

    at = datetime(2024, 1, 1, tzinfo=timezone.utc)
    (tmp_path / "in").mkdir()
    for number, unit in enumerate(["us", "ns"]):
        pq.write_table(pa.table({"at": pa.array([at], pa.timestamp(unit, "UTC"))}), tmp_path / f"in/{number}.parquet")
    pipeline = Pipeline("seen")
    pipeline.from_source(ParquetSource(str(tmp_path / "in"), Seen, name="seen")).print()
    with pytest.raises(UnifiedError, match=r"source 'seen': column 'at' of .*in/1\.parquet is "):
        run_on_spark(pipeline)


def test_a_file_of_no_bytes_has_no_rows(spark, tmp_path, caplog):
    write(tmp_path / "in", {"id": 1, "amount": 1})
    (tmp_path / "in" / "0-empty.parquet").touch()
    source = ParquetSource(str(tmp_path / "in"), Small, name="sales")
    with caplog.at_level(logging.WARNING, file_columns.__name__):
        assert rows_of(source.read(spark)) == [(1, 1)]
    assert Query(spark, source, tmp_path / "job").run() == [1]
    assert "0-empty.parquet has no bytes" in caplog.text
