"""The Delta sink on Spark: what each mode leaves in the table, once, whatever is repeated."""

import json
import shutil
import subprocess
import sys
import threading
from contextlib import closing
from datetime import timedelta
from typing import NamedTuple

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from dagster_unified.api import Pipeline
from dagster_unified.connectors import DeltaSink
from dagster_unified.connectors.delta.committer import DeltaFile
from dagster_unified.connectors.protocol.commits import Commit, CommitConflictError, WriteAttempt, WriteIdentity
from dagster_unified.engine.commit import SinkCommits, WriteContext
from dagster_unified.errors import ConfigurationError, LeaseLostError, PipelineError, SinkError
from dagster_unified.operators.layout import PARTITION_INDEX
from dagster_unified.records import record_type
from tests.depth import examples
from tests.writing import written


class Stock(NamedTuple):
    shop: str | None
    item: str
    amount: int


@pytest.fixture
def write(spark, tmp_path):
    """Writes rows as a job of its own, which `who` says more of than its execution."""

    def run(rows, execution="first", schema="shop string, item string, amount long", who=None, **options):
        sink = DeltaSink(str(tmp_path / "table"), **options)
        return written(sink, spark.createDataFrame(rows, schema), execution, **(who or {}))

    return run


@pytest.fixture
def table(tmp_path):
    return lambda: sorted(
        (Stock(**r) for r in DeltaTable(str(tmp_path / "table")).to_pyarrow_table().to_pylist()), key=str
    )


A, B, C = Stock("a", "pen", 1), Stock("b", "pen", 2), Stock(None, "pen", 3)


def test_append_adds_and_a_repeated_execution_does_not(write, table):
    write([A], "first", mode="append")
    assert write([A], "first", mode="append").repeated
    write([B], "second", mode="append")
    assert table() == sorted([A, B], key=str)


def test_overwrite_replaces_the_table_or_the_partitions_that_are_written(write, table):
    write([A, B, C], "first", partition_by="shop")
    write([A._replace(amount=9)], "second", partition_by="shop")
    assert table() == sorted([A._replace(amount=9), B, C], key=str)


@pytest.mark.parametrize(
    "options", [{"mode": "append"}, {"partition_by": "shop"}, {"mode": "upsert", "key": ("shop", "item")}]
)
def test_a_write_says_which_version_it_made(write, tmp_path, options):
    for number, row in enumerate((A, B, C)):
        version = write([row], f"run {number}", **options).version
        made = DeltaTable(str(tmp_path / "table"), version=version)
        assert (made.to_pyarrow_table().num_rows, version) == (number + 1, number + 1)


def test_overwrite_replaces_the_whole_table_where_it_has_no_partitions(write, table):
    write([A, B], "first")
    write([C], "second")
    assert table() == [C]


def test_upsert_replaces_by_key_and_a_missing_key_is_one_key(write, table):
    write([A, C], "first", mode="upsert", key=("shop", "item"))
    write([B, C._replace(amount=9)], "second", mode="upsert", key=("shop", "item"))
    assert table() == sorted([A, B, C._replace(amount=9)], key=str)


def test_an_execution_that_wrote_nothing_is_remembered_as_well(write, table):
    write([A], "first", mode="upsert", key=("shop", "item"))
    write([], "second", mode="upsert", key=("shop", "item"))
    assert write([B], "second", mode="upsert", key=("shop", "item")).repeated
    assert table() == [A]


def test_columns_that_the_table_does_not_have_are_an_error_and_nothing_is_written(write, table):
    write([A])
    with pytest.raises(SinkError, match="no column 'price'"):
        write([(1,)], "second", "price long")
    with pytest.raises(SinkError, match="column 'amount' is string, and bigint in the table"):
        write([("a", "pen", "1")], "second", "shop string, item string, amount string")
    assert table() == [A]


@pytest.mark.parametrize(
    "options",
    [{"mode": "append"}, {"mode": "overwrite", "partition_by": "shop"}, {"mode": "upsert", "key": ("shop", "item")}],
    ids=lambda options: options["mode"],
)
def test_a_null_in_a_column_that_takes_none_is_an_error_and_nothing_is_written(write, table, tmp_path, options):
    schema = pa.schema(
        [pa.field("shop", pa.string(), nullable=False), pa.field("item", pa.string()), pa.field("amount", pa.int64())]
    )
    DeltaTable.create(str(tmp_path / "table"), schema, partition_by=options.get("partition_by"))
    write([A], "first", **options)
    with pytest.raises(SinkError, match=r"'shop' is None in some records, and may not be null in the table at "):
        write([B, C], "second", **options)
    assert table() == [A]
    with pytest.raises(SinkError, match="has the column 'shop', which may not be null, and the records have no such"):
        write([("pen", 1)], "third", "item string, amount long", mode="append")
    assert table() == [A]


def made(folder, features=(), configuration=None, columns=None):
    """A table as another program may have made it: with features of Delta that `deltalake` does not make itself."""
    write_deltalake(folder, pa.table({"shop": ["a"], "item": ["pen"], "amount": pa.array([1], pa.int64())}))
    entry = folder / "_delta_log" / "00000000000000000000.json"
    actions = [json.loads(line) for line in entry.read_text().splitlines()]
    for action in actions:
        if "protocol" in action:
            reader = [name for name in features if name in ("deletionVectors", "columnMapping")]
            action["protocol"] = {
                "minReaderVersion": 3 if reader else 1,
                "minWriterVersion": 7,
                "writerFeatures": list(features),
                **({"readerFeatures": reader} if reader else {}),
            }
        if "metaData" in action:
            action["metaData"]["configuration"] = configuration or {}
            schema = json.loads(action["metaData"]["schemaString"])
            for field in schema["fields"]:
                field["metadata"] = (columns or {}).get(field["name"], {})
            action["metaData"]["schemaString"] = json.dumps(schema)
    entry.write_text("\n".join(map(json.dumps, actions)))


MAPPED = {
    name: {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": f"c{number}"}
    for number, name in enumerate(Stock._fields, 1)
}
INVARIANT = json.dumps({"expression": {"expression": "amount > 0"}})


@pytest.mark.parametrize(
    ("given", "mode", "says"),
    [
        ((["checkConstraints"], {"delta.constraints.some": "amount > 0"}), "append", r"the constraint 'some' \(amount"),
        (
            (["invariants"], {}, {"amount": {"delta.invariants": INVARIANT}}),
            "append",
            "a condition on the column 'amou",
        ),
        (
            (["generatedColumns"], {}, {"amount": {"delta.generationExpression": "5"}}),
            "overwrite",
            r"computes the column 'amount' \(5\)",
        ),
        ((["columnMapping"], {"delta.columnMapping.mode": "name"}, MAPPED), "append", "other names in its files"),
        ((["columnMapping"], {"delta.columnMapping.mode": "name"}, MAPPED), "upsert", "other names in its files"),
        ((["appendOnly"], {"delta.appendOnly": "true"}), "overwrite", "is append-only"),
        ((["deletionVectors"], {"delta.enableDeletionVectors": "true"}), "overwrite", "deletion vectors"),
        ((["rowTracking", "domainMetadata"], {}), "append", "Unsupported table features required"),
    ],
)
def test_a_table_that_asks_for_more_than_files_is_refused_and_not_broken(write, tmp_path, given, mode, says):
    """Nobody checks the rows of files that are added to a table, and a wrong entry of its log is there to stay."""
    made(tmp_path / "table", *given)
    key = {"key": ("item",)} if mode == "upsert" else {}
    with pytest.raises(SinkError, match=says):
        write([("b", "pen", -1)], mode=mode, **key)
    assert DeltaTable(str(tmp_path / "table")).version() == 0


def test_rows_are_added_to_a_table_with_deletion_vectors_and_change_data(write, tmp_path):
    features = ["deletionVectors", "changeDataFeed", "appendOnly"]
    made(tmp_path / "table", features, dict.fromkeys(["delta.enableChangeDataFeed", "delta.appendOnly"], "true"))
    write([B], mode="append")
    assert len(DeltaTable(str(tmp_path / "table")).file_uris()) == 2


@pytest.mark.parametrize(("of_table", "of_sink"), [("shop", ()), ((), "shop"), ("item", "shop")])
def test_a_table_with_other_partitions_is_refused(write, table, of_table, of_sink):
    """A file that does not say its partition would have null there."""
    write([A], "first", mode="append", partition_by=of_table)
    with pytest.raises(SinkError, match=r"is partitioned by \w+, and the sink by \w+; give partition_by="):
        write([B], "second", mode="append", partition_by=of_sink)
    assert table() == [A]
    write([B], "third", mode="append", partition_by=of_table)
    assert table() == [A, B]


@pytest.mark.parametrize("mode", ["append", "upsert"])
@pytest.mark.parametrize("text", ["", "__HIVE_DEFAULT_PARTITION__"])
def test_a_text_that_is_none_in_a_partition_is_refused(write, table, mode, text):
    options = {"mode": mode, "partition_by": "shop", **({"key": "shop"} if mode == "upsert" else {})}
    with pytest.raises(Exception, match=r"SinkError: sink 'table': field 'shop' is an empty text, or __HIVE"):
        write([A._replace(shop=text)], **options)
    strange = [Stock(shop, shop or "none", 1) for shop in (None, " ", "a/b", "a%b", "a=b", "ü", ".", "a\nb", "null")]
    write(strange, "second", **options)
    assert table() == sorted(strange, key=str)


class Raw(NamedTuple):
    raw: bytes


def test_a_table_is_not_partitioned_by_what_a_folder_cannot_say():
    with pytest.raises(PipelineError, match="partition_by='raw': the name of a folder cannot say a binary"):
        DeltaSink("/tables/stock", partition_by="raw").check(record_type(Raw))


class Waits(NamedTuple):
    by_gate: dict[str, list[timedelta]]


class Wait(NamedTuple):
    wait: timedelta | None


@pytest.mark.parametrize(("records", "says"), [(Wait, "'wait' is"), (Waits, "'by_gate' has")])
def test_a_timedelta_is_refused_wherever_it_is(records, says):
    with pytest.raises(PipelineError, match=f"field {says} a timedelta, which Delta cannot hold; map it to seconds"):
        DeltaSink("/tables/waits").check(record_type(records))


def test_a_key_goes_with_upsert():
    with pytest.raises(PipelineError, match="upsert needs key="):
        DeltaSink("/x", mode="upsert")
    with pytest.raises(PipelineError, match="key= goes with mode='upsert'"):
        DeltaSink("/x", key="shop")


def test_of_two_writers_of_one_execution_at_once_one_writes(write, table):
    another_is_first = {"before_commit": lambda: write([A], mode="append")}
    assert write([A], who=another_is_first, mode="append").repeated
    assert table() == [A]


def test_the_preview_has_the_first_rows_also_of_a_partitioned_table(write, spark, tmp_path):
    write([A, B, C], "first", partition_by="shop")
    write([A._replace(amount=9)], "second", mode="append", partition_by="shop")
    sink = DeltaSink(str(tmp_path / "table"), mode="append", partition_by="shop")
    rows = [Stock(**r) for r in sink.preview(spark, 10).to_pylist()]
    assert sorted(rows, key=str) == sorted([A, B, C, A._replace(amount=9)], key=str)
    assert sink.preview(spark, 2).num_rows == 2


def test_a_process_that_has_previewed_a_table_ends_in_peace(tmp_path):
    for _ in range(8):
        write_deltalake(str(tmp_path), pa.table({"n": list(range(100))}), mode="append")
    program = (
        f"from dagster_unified.connectors.delta import DeltaSink; assert DeltaSink({str(tmp_path)!r}).preview(None,"
        " 5).num_rows == 5"
    )
    for _ in range(examples(2)):
        assert subprocess.run([sys.executable, "-c", program], check=False, capture_output=True).returncode == 0


@pytest.mark.a_day(1)
@pytest.mark.parametrize("mode", ["BATCH", "STREAMING"])
def test_two_sinks_of_a_pipeline_that_append_to_one_table_both_leave_their_rows_once(
    mode, run_on_spark, run_streaming, table, tmp_path
):
    pipeline = Pipeline("two")
    pens, cups = pipeline.from_collection([A]), pipeline.from_collection([B], name="cups")
    for stream in (pens, cups):
        stream.sink_to(DeltaSink(str(tmp_path / "table"), mode="append"))
    if mode == "STREAMING":
        run_streaming(pipeline)
    for _ in range(2 if mode == "BATCH" else 0):  # a run that is executed again does not write again
        run_on_spark(pipeline)
    assert table() == [A, B]


def test_a_partition_that_two_sinks_append_to_is_replaced_by_the_sink_that_runs_it_again(write, table):
    for row, sink, execution in ((A, "one", "first"), (B, "two", "first"), (A._replace(amount=9), "one", "second")):
        write([row], execution, who={"partition": "2024-01-01", "uid": sink}, mode="append")
    assert table() == [A._replace(amount=9), B]


@pytest.mark.parametrize(
    ("mode", "partition"), [("overwrite", "all"), ("overwrite", "2024-01-02"), ("append", "2024-01-02")]
)
def test_of_two_runs_at_once_of_the_table_or_a_partition_the_rows_of_one_are_left(write, table, mode, partition):
    others = [C] if partition != "all" else []
    if others:
        write(others, "before", who={"partition": "2024-01-01"}, mode=mode)
    gate, waited = threading.Barrier(2, timeout=60), threading.local()

    def meet():
        if not hasattr(waited, "once"):
            waited.once = True
            gate.wait()

    def run(row):
        write([row] * 2, row.shop, who={"partition": partition, "before_commit": meet}, mode=mode)

    runs = [threading.Thread(target=run, args=(row,)) for row in (A, B)]
    for thread in runs:
        thread.start()
    for thread in runs:
        thread.join(60)
    assert table() in [sorted([*others, row, row], key=str) for row in (A, B)]


def test_a_partitioned_overwrite_replaces_what_runs_without_partitions_had_written(write, table):
    for partition, row in (("all", A), ("one", A), ("two", B), ("one", C)):
        write([row], f"{partition} {row}", who={"partition": partition})
    assert table() == sorted([B, C], key=str)


def test_an_epoch_replaces_what_was_there_before_its_job_and_keeps_what_a_partition_was_run_again_with(write, table):
    def epoch(number, row):
        write([row], "job", who={"partition": "streaming", "epoch": number}, partition_by="shop")

    more, other = A._replace(amount=9), B._replace(amount=7)
    write([A], "before", who={"partition": "one"}, partition_by="shop")
    write([B], "before", who={"partition": "two"}, partition_by="shop")
    epoch(0, A)
    write([A, A], "again", who={"partition": "one"}, partition_by="shop")
    epoch(1, more)
    assert table() == sorted([A, A, more, B], key=str)
    epoch(2, other)
    assert table() == sorted([A, A, more, other], key=str)


@pytest.mark.parametrize("mode", ["overwrite", "append"])
def test_a_sink_under_another_name_replaces_a_partition_only_where_the_table_is_its_own(write, table, mode):
    for name, row in (("former", A), ("later", B)):
        for partition in ("one", "two"):
            write([row], name, who={"partition": partition, "uid": name}, mode=mode)
    assert table() == ([B, B] if mode == "overwrite" else [A, A, B, B])


def test_of_several_partitions_only_those_that_are_due_are_written(spark, tmp_path):
    sink = DeltaSink(str(tmp_path / "table"), mode="append")
    days = [WriteContext(WriteIdentity("p", "sink", "run", day), "stage") for day in ("first", "second", "third")]
    rows = spark.createDataFrame([(1, 0), (2, 1), (3, 2)], f"n long, {PARTITION_INDEX} int")
    for due in ([0], [0, 1], [0, 1, 2]):
        with closing(SinkCommits(sink)) as commits:
            some = rows.where(rows[PARTITION_INDEX] <= max(due))
            results = commits.write(
                some.drop(PARTITION_INDEX) if len(due) == 1 else some, [days[index] for index in due]
            )
        assert [result.repeated for result in results] == [True] * (len(due) - 1) + [False]
        found = DeltaTable(str(tmp_path / "table")).to_pyarrow_table().to_pydict()
        assert {name: sorted(values) for name, values in found.items()} == {"n": [index + 1 for index in due]}


def test_a_job_that_slept_through_going_back_writes_nothing_even_where_the_new_timeline_wrote_no_rows(write, table):
    def epoch(rows, number, timeline):
        write(rows, "job", who={"partition": "streaming", "epoch": number, "timeline": timeline}, mode="append")

    epoch([A], 0, 0)
    epoch([], 1, 1)
    with pytest.raises(LeaseLostError, match="this job may not write any more"):
        epoch([B], 1, 0)
    assert table() == [A]


def commit_file(committer, epoch, rows=1):
    """Commits an epoch whose file nobody has written: only the log is looked at."""
    attempt = WriteAttempt(WriteIdentity("p", "sink", "job", "streaming", epoch), f"attempt-{epoch}", "stage")
    committer.commit([Commit(attempt, [DeltaFile(path=f"{epoch}.parquet", rows=rows, bytes=1)])])


def committed(committer):
    return committer.last_version(WriteIdentity("p", "sink", "job", "streaming", 0).writer)


def test_a_job_removes_expired_log_entries_once_in_a_hundred_commits(tmp_path):
    table, schema = tmp_path / "table", pa.schema([("n", pa.int64())])
    properties = {"delta.checkpointInterval": "10", "delta.logRetentionDuration": "interval 0 days"}
    DeltaTable.create(str(table), schema, configuration=properties)

    def has_entry(version):
        return (table / "_delta_log" / f"{version:020d}.json").exists()

    with closing(DeltaSink(str(table), mode="append").committer(schema)) as committer:
        for epoch in range(110):
            if epoch == 100:
                assert (has_entry(1), has_entry(50)) == (False, True)
            assert committed(committer) == (epoch - 1 if epoch else None)
            commit_file(committer, epoch)
    assert not has_entry(50)
    assert len(DeltaTable(str(table)).file_uris()) == 110


def epochs_of(sink, spark, job):
    """Writes an epoch of a job that keeps its committer, and says whether it had been written before."""
    commits = SinkCommits(sink)

    def write(number, amount):
        context = WriteContext(WriteIdentity("p", "sink", job, "streaming", number), "stage")
        (result,) = commits.write(spark.createDataFrame([(amount,)], "amount long"), [context])
        return result.repeated

    return commits, write


def test_a_table_whose_columns_change_between_epochs_is_an_error(spark, tmp_path):
    commits, write = epochs_of(DeltaSink(str(tmp_path / "table"), mode="append"), spark, "job")
    with closing(commits):
        write(0, 1)
        changed = pa.table({"amount": ["text"]})
        write_deltalake(str(tmp_path / "table"), changed, mode="overwrite", schema_mode="overwrite")
        with pytest.raises(SinkError, match="column 'amount' is bigint, and string in the table"):
            write(1, 1)


def test_jobs_that_append_to_one_table_by_turns_add_each_epoch_once(spark, tmp_path):
    sink = DeltaSink(str(tmp_path / "table"), mode="append")
    commits, write = zip(*(epochs_of(sink, spark, job) for job in ("a", "b")), strict=True)
    for number in range(3):
        assert [one(number, 10 * number + job) for job, one in enumerate(write)] == [False, False]
        write_deltalake(str(tmp_path / "table"), pa.table({"amount": [100 + number]}), mode="append")
    assert [one(2, -1) for one in write] == [True, True]
    for one in commits:
        one.close()
    found = DeltaTable(str(tmp_path / "table")).to_pyarrow_table()["amount"].to_pylist()
    assert sorted(found) == [0, 1, 10, 11, 20, 21, 100, 101, 102]


@pytest.mark.parametrize("checkpoint_interval", ["100", "4"])  # of 4, the epoch in question is one of a checkpoint
def test_an_epoch_that_a_successor_has_committed_is_not_committed_again(spark, tmp_path, checkpoint_interval):
    schema, properties = pa.schema([("amount", pa.int64())]), {"delta.checkpointInterval": checkpoint_interval}
    DeltaTable.create(str(tmp_path / "table"), schema, configuration=properties)
    sink = DeltaSink(str(tmp_path / "table"), mode="append")
    (old, write_old), (new, write_new) = (epochs_of(sink, spark, "job") for _ in range(2))
    assert [write_old(0, 0), write_old(1, 1)] == [False, False]
    assert write_new(2, 2) is False
    assert write_old(2, -1) is True
    old.close()
    new.close()
    assert sorted(DeltaTable(str(tmp_path / "table")).to_pyarrow_table()["amount"].to_pylist()) == [0, 1, 2]


def test_the_log_of_a_stream_is_what_deltalake_would_have_written(tmp_path):
    schema = pa.schema([("n", pa.int64())])

    def log_of(name, **properties):
        table = tmp_path / name
        DeltaTable.create(str(table), schema, configuration={"delta.checkpointInterval": "10", **properties})
        with closing(DeltaSink(str(table), mode="append").committer(schema)) as committer:
            for epoch in range(25):
                assert committed(committer) == (epoch - 1 if epoch else None)
                commit_file(committer, epoch, rows=epoch)
        found = DeltaTable(str(table))
        names = sorted(file.name for file in (table / "_delta_log").iterdir())
        adds = pa.table(found.get_add_actions(flatten=True)).drop_columns(["modification_time"]).sort_by("path")
        marks = found.transaction_version(WriteIdentity("p", "sink", "job", "streaming", 0).writer)
        history = [(entry["version"], entry["operation"], entry["operationParameters"]) for entry in found.history(24)]
        return names, adds, marks, history

    assert log_of("appended") == log_of("by_deltalake", **{"delta.enableChangeDataFeed": "true"})


def test_a_table_that_was_removed_and_made_again_under_a_stream_gets_no_entry_with_a_gap_before_it(tmp_path):
    table, schema = tmp_path / "table", pa.schema([("n", pa.int64())])
    with closing(DeltaSink(str(table), mode="append").committer(schema)) as committer:
        for epoch in range(2):
            committed(committer)
            commit_file(committer, epoch)
        committed(committer)
        shutil.rmtree(table)
        DeltaTable.create(str(table), schema)
        with pytest.raises(CommitConflictError):
            commit_file(committer, 2)
    assert DeltaTable(str(table)).version() == 0


def test_a_path_with_a_password_is_refused_and_not_shown():
    with pytest.raises(ConfigurationError, match="the path has a password") as raised:
        DeltaSink("https://user:hush@host/table")
    assert "hush" not in str(raised.value)
