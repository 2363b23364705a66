"""Files are read exactly once: before a position and after it, in either mode, whatever their age."""

import json
import os
import random
import time
from datetime import date, datetime, timedelta
from threading import Thread
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from upath import UPath

from dagster_unified.api import Pipeline
from dagster_unified.connectors import CsvSource, FileSink, JsonSource, ParquetSource, PrintSink
from dagster_unified.connectors.files import listing, sources
from dagster_unified.connectors.files.folder import File, Folder
from dagster_unified.connectors.protocol.positions import FilesRead, PartitionsRead, Position
from dagster_unified.engine.events import EpochCommitted
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.errors import StageError, StateError
from dagster_unified.orchestration.partitions import slice_of
from dagster_unified.records import record_type
from dagster_unified.spark_internals import spark_log
from tests.connectors.support import Query, read_batch
from tests.connectors.test_positions import BERLIN
from tests.connectors.trips import Trip


class Sale(NamedTuple):
    amount: int


def put(folder, name, *amounts, age=0):
    """Writes a file at once, as if it had been changed so many seconds ago."""
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    (file.parent / f".{file.name}").write_text("\n".join(["amount", *map(str, amounts)]) + "\n")
    os.utime(file.parent / f".{file.name}", (1_700_000_000 - age,) * 2)
    (file.parent / f".{file.name}").rename(file)


def watched(folder, **options):
    return CsvSource(f"{folder}", Sale, name="sales", monitor=True, **options)


def bounded(folder, **options):
    return CsvSource(f"{folder}", Sale, name="sales", **options)


def names(position):
    return sorted(position.files())


def test_a_stream_reads_each_file_once_and_tells_which(spark, tmp_path):
    put(tmp_path / "in", "b.csv", 2, age=10)
    put(tmp_path / "in", "a.csv", 1)
    stream = Query(spark, watched(tmp_path / "in", max_files_per_trigger=1), tmp_path / "job")

    def more(query):
        put(tmp_path / "in", "late.csv", 3, age=1_000_000)
        put(tmp_path / "in" / "day=1", "c d%.csv", 4)
        put(tmp_path / "in", "_hidden.csv", 5)
        stream.look(query)

    assert stream.run(more) == [1, 2, 3, 4]
    assert stream.read == [[2], [1], [3], [4]]
    assert names(stream.position()) == ["a.csv", "b.csv", "day=1/c d%.csv", "late.csv"]
    assert names(stream.position(epoch=0)) == ["b.csv"]
    assert names(stream.position(epoch=2)) == ["a.csv", "b.csv", "late.csv"]
    assert stream.position().root == str(tmp_path / "in")


@pytest.mark.a_day(1)
@pytest.mark.parametrize(("limit", "epochs"), [(4, [1, 4, 4, 2]), (None, [1, 10]), (1, [1] * 11)])
def test_a_job_that_starts_with_another_limit_reads_by_that(spark, tmp_path, limit, epochs):
    for n in range(11):
        put(tmp_path / "in", f"{n:02d}.csv", n, age=-n)
    stream = Query(spark, watched(tmp_path / "in", max_files_per_trigger=1), tmp_path / "job")
    query = stream.start(stream.source.read_stream(spark, UPath(tmp_path / "job/sources/sales")))
    query.processAllAvailable()
    query.stop()  # as a job that is killed when it has read the first of them
    assert stream.read == [[0]]
    stream.source = watched(tmp_path / "in", max_files_per_trigger=limit)
    assert stream.run() == list(range(11))
    assert [len(epoch) for epoch in stream.read] == epochs


def test_a_stream_that_starts_again_goes_on(spark, tmp_path):
    put(tmp_path / "in", "a.csv", 1)
    stream = Query(spark, watched(tmp_path / "in"), tmp_path / "job")
    assert stream.run() == [1]
    put(tmp_path / "in", "b.csv", 2, age=100)
    put(tmp_path / "in", "a.csv", 7)
    assert stream.run() == [1, 2]
    assert stream.run() == [1, 2]
    assert names(stream.position()) == ["a.csv", "b.csv"]


def test_a_new_job_reads_what_came_after_a_position_and_adds_to_it(spark, tmp_path):
    put(tmp_path / "in", "a.csv", 1)
    put(tmp_path / "in", "b.csv", 2)
    first = Query(spark, watched(tmp_path / "in"), tmp_path / "first")
    assert first.run() == [1, 2]
    position = msgspec.json.decode(msgspec.json.encode(first.position()), type=Position)
    put(tmp_path / "in", "c.csv", 3, age=1_000)
    put(tmp_path / "in", "b.csv", 9)
    assert read_batch(spark, bounded(tmp_path / "in").after(position)) == [3]
    second = Query(spark, watched(tmp_path / "in").after(position), tmp_path / "second")
    assert second.position() == position
    assert second.run() == [3]
    assert names(second.position()) == ["a.csv", "b.csv", "c.csv"]
    assert read_batch(spark, bounded(tmp_path / "in").after(second.position())) == []
    assert bounded(tmp_path / "in").after(second.position()).batch_position(spark) == second.position()


def test_a_batch_run_hands_over_to_a_stream_what_it_read(spark, tmp_path):
    put(tmp_path / "in", "a.csv", 1)
    source = bounded(tmp_path / "in")
    position = source.batch_position(spark)
    assert read_batch(spark, source) == [1]
    put(tmp_path / "in", "b.csv", 2, age=50)
    assert Query(spark, watched(tmp_path / "in").after(position), tmp_path / "job").run() == [2]


@pytest.mark.a_day(1)
@pytest.mark.parametrize("interval", [None, "1 s"])
def test_what_comes_during_an_epoch_is_read_by_the_next_one(spark, tmp_path, monkeypatch, interval):
    monkeypatch.setattr(listing, "_BRIEF", 60.0)
    put(tmp_path / "in", "first.csv", 1)
    pipeline = Pipeline("watching")
    pipeline.from_source(watched(tmp_path / "in")).sink_to(PrintSink())
    options = {"execution.checkpointing.dir": str(tmp_path / "job")}
    plan = pipeline.plan(options if interval is None else {**options, "execution.checkpointing.interval": interval})
    epochs = []

    def during(event):
        if isinstance(event, EpochCommitted) and event.rows_in:
            epochs.append(event.rows_in)
            if len(epochs) == 1:
                put(tmp_path / "in", "early.csv", 2)
                time.sleep(5 * listing.PAUSE)  # the job would list it meanwhile
                put(tmp_path / "in", "late.csv", 3)

    StreamingJob(plan, spark, Start("job"), during).run(lambda: sum(epochs) == 3)
    assert epochs == [1, 2]


def test_an_epoch_that_ends_while_another_query_starts_lists_after_it(spark, tmp_path, monkeypatch):
    folder, files = UPath(tmp_path / "job" / "sources" / "sales"), Folder(UPath(tmp_path / "in"))
    begin, failed = listing._begin, []

    def epoch_ends():
        try:
            listing.look_between_epochs(UPath(tmp_path / "job"))
        except Exception as error:
            failed.append(error)

    epoch = Thread(target=epoch_ends)

    def begin_slowly(*arguments):
        epoch.start()
        epoch.join(timeout=1)
        begin(*arguments)

    def start():
        listing.show(spark, folder, files, [], lambda name: False, None, watch=True)

    put(tmp_path / "in", "1.csv", 1)
    start()
    put(tmp_path / "in", "2.csv", 2)
    monkeypatch.setattr(listing, "_BRIEF", 60.0)
    monkeypatch.setattr(listing, "_begin", begin_slowly)
    start()
    epoch.join()
    assert failed == []
    assert sorted(listing.Chunks(folder, files.root).names()) == ["1.csv", "2.csv"]


def test_nothing_is_listed_after_the_last_time(tmp_path, monkeypatch):
    put(tmp_path / "in", "1.csv", 1)
    folder, files = UPath(tmp_path / "job" / "sources" / "sales"), Folder(UPath(tmp_path / "in"))
    shown = listing.Listing(None, files, folder, [], lambda name: False, None)
    epoch, new = Thread(target=shown.look_between_epochs), files.new

    def meanwhile(known):
        found = new(known)
        if not epoch.ident:
            epoch.start()
            put(tmp_path / "in", "2.csv", 2)
        return found

    monkeypatch.setattr(files, "new", meanwhile)
    monkeypatch.setattr(shown, "_are_found", lambda: True)
    shown.end()
    epoch.join()
    shown.end()
    assert list(listing.Chunks(folder, files.root).names()) == ["1.csv"]


def test_a_drain_asks_what_was_read_while_an_epoch_ends(tmp_path, monkeypatch):
    put(tmp_path / "in", "1.csv", 1)
    folder, files = UPath(tmp_path / "job" / "sources" / "sales"), Folder(UPath(tmp_path / "in"))
    shown = listing.Listing(None, files, folder, [], lambda name: False, None)
    shown.look()
    epoch = Thread(target=shown.look_between_epochs)

    def found():
        if not epoch.ident:
            epoch.start()
            epoch.join(timeout=1)
        return [0]

    monkeypatch.setattr(listing, "_BRIEF", 60.0)
    monkeypatch.setattr(shown, "_last_found", found)
    assert shown.all_taken()
    epoch.join()


@pytest.mark.a_day(1)
@pytest.mark.parametrize("seed", range(3))
def test_what_is_read_before_a_random_cut_and_after_it_is_everything_once(spark, tmp_path, seed):
    chance = random.Random(seed)
    files = [f"{chance.choice(['d=1', 'd=2', 'd=3 4'])}/{n}.csv" for n in range(30)]
    cuts = sorted(chance.sample(range(31), 2))
    read = []
    position = None
    for number, (begin, end) in enumerate(zip([0, *cuts], [*cuts, 30], strict=True)):
        for n in range(begin, end):
            put(tmp_path / "in", files[n], n, age=chance.randrange(1_000_000))
        (tmp_path / "in").mkdir(exist_ok=True)
        mode = chance.choice(["BATCH", "STREAMING"]) if begin < end else "STREAMING"
        if mode == "BATCH":
            source = bounded(tmp_path / "in")
            source = source if position is None else source.after(position)
            position = source.batch_position(spark)
            read += read_batch(spark, source)
        else:
            source = watched(tmp_path / "in", max_files_per_trigger=chance.choice([None, 4]))
            job = Query(spark, source if position is None else source.after(position), tmp_path / str(number))
            read += job.run()
            position = job.position()
    assert sorted(read) == list(range(30))


@pytest.mark.a_day(1)
@pytest.mark.parametrize(
    ("template", "path"),
    [
        ("{start:%Y-%m-%d}.csv", "2024-01-{:02d}.csv"),
        ("{start:%Y}/{start:%m}/{start:%Y%m%d}/*.csv", "2024/01/202401{:02d}/part.csv"),
        ("day={key}", "day=2024-01-{:02d}/part.csv"),
        ("until-{end:%F}.csv", "until-2024-01-{:02d}.csv"),
    ],
)
def test_a_stream_begins_at_the_end_of_the_last_partition_of_a_path_template(spark, tmp_path, template, path):
    later = 1 if "end" in template else 0
    for day in (1, 2, 3, 4):
        put(tmp_path / "in", path.format(day + later), day, age=-day)
    source = bounded(f"{tmp_path}/in/{template}")
    part = source.bounded_to(slice_of(BERLIN, "2024-01-02"))
    assert read_batch(spark, part) == [2]
    position = part.batch_position(spark)
    assert isinstance(position, PartitionsRead)
    assert read_batch(spark, source.after(position)) == [3, 4]
    assert read_batch(spark, source.after(position).bounded_to(slice_of(BERLIN, "2024-01-02"))) == []
    assert read_batch(spark, source.after(position).bounded_to(slice_of(BERLIN, "2024-01-03"))) == [3]
    stream = Query(spark, watched(f"{tmp_path}/in/{template}").after(position), tmp_path / "job")
    assert stream.run() == [3, 4]
    put(tmp_path / "in", path.format(2 + later).replace("part", "corrected"), 20)
    put(tmp_path / "in", path.format(5 + later), 5)
    after = stream.position()
    assert after.partitions == position
    assert after.count == 2
    assert Query(spark, watched(f"{tmp_path}/in/{template}").after(after), tmp_path / "next").run() == [5]


def test_files_that_say_no_time_cannot_go_on_after_a_partition(tmp_path):
    position = PartitionsRead(datetime(2024, 1, 3), "2024-01-02")
    with pytest.raises(StateError, match=r"source 'sales'.*has no \{start:%Y-%m-%d\}"):
        bounded(f"{tmp_path}/{{airport}}/*.csv").after(position)
    with pytest.raises(StateError, match=r"source 'sales'.*partitioned_by"):
        bounded(tmp_path).after(position)
    with pytest.raises(StateError, match="source 'sales': it cannot go on after 1 file in /elsewhere: it reads"):
        bounded(tmp_path).after(FilesRead.of("/elsewhere", ["a.csv"]))


def test_a_chunk_that_spark_found_but_did_not_log_is_not_lost(spark, tmp_path):
    """As when the job is killed between the two."""
    put(tmp_path / "in", "a.csv", 1)
    stream = Query(spark, watched(tmp_path / "in", max_files_per_trigger=1), tmp_path / "job")
    assert stream.run() == [1]
    put(tmp_path / "in", "b.csv", 2)
    put(tmp_path / "in", "c.csv", 3)
    assert stream.run() == [1, 2, 3]
    checkpoint = tmp_path / "job" / "spark" / "main"
    for kind in ("offsets/1", "offsets/2", "commits/1", "commits/2", "sources/0/2"):
        (checkpoint / kind).unlink()
        (checkpoint / kind).with_name(f".{(checkpoint / kind).name}.crc").unlink(missing_ok=True)
    assert spark_log.readers(UPath(checkpoint)) == [(UPath(checkpoint / "sources" / "0"), 0)]
    put(tmp_path / "in", "d.csv", 4)
    stream.read.clear()
    assert stream.run() == [2, 3, 4]
    assert stream.run() == [2, 3, 4]
    assert names(stream.position()) == ["a.csv", "b.csv", "c.csv", "d.csv"]


def test_a_job_whose_state_is_dropped_reads_all_files_again(spark, tmp_path):
    put(tmp_path / "in", "a.csv", 1)
    stream = Query(spark, watched(tmp_path / "in"), tmp_path / "job")
    assert stream.run() == [1]
    position = stream.position()
    (tmp_path / "job" / "spark").rename(tmp_path / "dropped")
    put(tmp_path / "in", "b.csv", 2)
    stream.read.clear()
    assert stream.run() == [1, 2]
    (tmp_path / "job" / "spark").rename(tmp_path / "dropped again")
    stream.read.clear()
    stream.source = stream.source.after(position)
    assert stream.run() == [2]


def test_a_checkpoint_in_which_spark_listed_the_files_goes_on(spark, tmp_path):
    put(tmp_path / "in", "a.csv", 1)
    put(tmp_path / "in", "b c%.csv", 2)
    stream = Query(spark, watched(tmp_path / "in"), tmp_path / "job")
    frame = spark.readStream.schema("amount int").option("header", True).csv(f"file://{tmp_path}/in")
    query = stream.start(frame)
    query.processAllAvailable()
    query.stop()
    stream.read.clear()
    put(tmp_path / "in", "c.csv", 3)
    assert names(stream.position()) == ["a.csv", "b c%.csv"]
    assert stream.run() == [3]
    assert names(stream.position()) == ["a.csv", "b c%.csv", "c.csv"]


def test_sparks_log_is_read_over_its_compactions(spark, tmp_path):
    """At every epoch, also where the files before a compaction are gone."""
    stream = Query(spark, watched(tmp_path / "in", max_files_per_trigger=1), tmp_path / "job")
    for n in range(12):
        put(tmp_path / "in", f"{n:02d}.csv", n, age=-n)
    assert stream.run() == list(range(12))
    log = UPath(tmp_path / "job" / "spark" / "main" / "sources" / "0")
    assert (log / "9.compact").exists()
    for gone in (False, True):
        for epoch in range(12):
            assert len(spark_log.files_found(log, epoch)) == epoch + 1
            position = stream.source.stream_position(log, f'{{"logOffset":{epoch}}}')
            assert names(position) == [f"{n:02d}.csv" for n in range(epoch + 1)]
        for n in range(9):
            (log / str(n)).unlink(missing_ok=True)
    (log / "11").unlink()
    with pytest.raises(StateError, match=r"Spark's log of a file source in .* is not whole"):
        spark_log.files_found(log, 11)


def test_what_other_sources_keep_in_a_checkpoint_is_left_alone(spark, tmp_path):
    stream = Query(spark, watched(tmp_path / "in"), tmp_path / "job")
    rate = spark.readStream.format("rate").load().selectExpr("value as amount")
    query = stream.start(rate.unionByName(stream.source.read_stream(spark, UPath(tmp_path / "job/sources/sales"))))
    query.processAllAvailable()
    query.stop()
    own = stream.checkpoint / "sources" / "0" / "0"
    before = own.read_bytes()
    put(tmp_path / "in", "a.csv", 1)
    stream.source.read_stream(spark, UPath(tmp_path / "job/sources/sales"))
    assert own.read_bytes() == before
    with pytest.raises(StateError, match="17 is not an offset of Spark's file source"):
        stream.source.stream_position(UPath(stream.checkpoint / "sources" / "0"), "17")


def test_names_are_kept_together_when_there_are_many_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(listing, "_BLOCK", 4)
    chunks = listing.Chunks(UPath(tmp_path / "job"), str(tmp_path))
    for n in range(10):
        put(tmp_path, f"{n}.csv")
        chunks.add(Folder(UPath(tmp_path / f"{n}.csv")).files(), lambda name: f"file://{tmp_path}/{name}")
    assert sorted(f.name for f in (tmp_path / "job" / "names").iterdir()) == ["0000000003", "0000000007"]
    for until in range(10):
        found = listing.Chunks(UPath(tmp_path / "job"), str(tmp_path)).names(until)
        assert list(found) == [f"{n}.csv" for n in range(until + 1)]


@pytest.mark.a_day(1)
@pytest.mark.parametrize(
    ("files", "patterns"),
    [
        ("a.csv _b.csv .c.csv d/e.csv d/f/g.csv _h/i.csv [k].csv l._COPYING_ m=1", ["", "/*", "/*.csv", "/d", "/d/*"]),
        ("d=1/a.csv d=1/_b.csv d=2/c.csv", ["", "/*", "/d=1", "/*/*.csv", "/d=*"]),
    ],
)
def test_a_folder_is_listed_as_spark_lists_it(spark, tmp_path, files, patterns):
    for name in files.split():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text("x")
    for pattern in patterns:
        path = f"{tmp_path}/in{pattern}"
        rows = spark.read.text(f"file://{path}").select("_metadata.file_path").distinct().collect()
        assert set(Folder(UPath(path)).paths()) == {spark_log.path_of(row.file_path) for row in rows}, pattern


def test_a_bucket_is_listed_like_a_folder():
    bucket = UPath("memory://bucket")
    for name in ("a.csv", "_b.csv", "d=1/e.csv", "j/k/l.csv"):
        (bucket / name).parent.mkdir(parents=True, exist_ok=True)
        (bucket / name).write_text("x")
    for pattern, expected in {"": ["a.csv", "d=1/e.csv"], "*.csv": ["a.csv"], "j/*": ["k/l.csv"]}.items():
        assert sorted(file.name for file in Folder(bucket / pattern if pattern else bucket).files()) == expected
    assert Folder(bucket).files()[0].changed > 1_700_000_000_000


class Dated(NamedTuple):
    amount: int
    day: date


@pytest.mark.a_day(1)
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_the_names_of_folders_tell_columns_in_both_modes(spark, tmp_path, kind):
    for day in ("2024-01-01", "2024-01-02"):
        for hour in (0, 1):
            folder = tmp_path / "in" / f"day={day}" / f"hour={hour}"
            put(folder, "a b.csv", hour)
            if kind == "parquet":
                (folder / "a b.csv").unlink()
                pq.write_table(pa.table({"amount": [hour]}), folder / "a b.parquet")
    source = (CsvSource if kind == "csv" else ParquetSource)(str(tmp_path / "in"), Dated, name="sales")
    rows = []
    frame = source.read_stream(spark, UPath(tmp_path / "job" / "sources" / "sales"))
    query = frame.writeStream.foreachBatch(lambda f, _: rows.extend(f.collect())).start()
    query.processAllAvailable()
    query.stop()
    expected = [(hour, date(2024, 1, day)) for day in (1, 2) for hour in (0, 1)]
    assert sorted(map(tuple, rows)) == sorted(expected)
    assert sorted(map(tuple, source.read(spark).collect())) == sorted(expected)
    rest = source.after(FilesRead.of(f"{tmp_path}/in", ["day=2024-01-01/hour=0/a b." + kind]))
    assert sorted(map(tuple, rest.read(spark).collect())) == sorted(expected[1:])


def test_only_folders_that_changed_are_listed_again(tmp_path):
    for name in ("old=1/a.csv", "b.csv"):
        put(tmp_path, name)
    settled = datetime.now() - timedelta(minutes=1)
    for folder in (tmp_path / "old=1", tmp_path):
        os.utime(folder, (settled.timestamp(),) * 2)
    folder = Folder(UPath(tmp_path))
    known = {file.name for file in folder.new(set())}
    assert known == {"old=1/a.csv", "b.csv"}
    assert folder.new(set()) == []
    put(tmp_path, "old=1/c.csv", age=10_000)
    assert [file.name for file in folder.new(known)] == ["old=1/c.csv"]


def test_json_rows_come_with_the_file_that_they_are_of(spark, tmp_path):
    put(tmp_path / "in", "a.json")
    (tmp_path / "in" / "a.json").write_text('{"amount": 1}\nnonsense\n')
    source = JsonSource(str(tmp_path / "in"), Sale, on_malformed="divert")
    frame = source.read_stream(spark, UPath(tmp_path / "job" / "sources" / "sales"))
    rows = []
    query = frame.writeStream.foreachBatch(lambda f, _: rows.extend(f.collect())).start()
    query.processAllAvailable()
    query.stop()
    assert [row.amount for row in rows] == [1, None]
    assert rows[1]["__malformed"].file == f"file:{tmp_path}/in/a.json"


def test_a_record_within_a_record_that_lacks_a_field_is_malformed(spark, tmp_path):
    whole, lacking = {"x": 1, "y": 2}, {"x": 1}
    trips = [
        {"start": whole, "spots": [whole], "by_name": {"k": whole}},
        {"start": lacking, "spots": [], "by_name": {}},
        {"start": whole, "spots": [whole, lacking], "by_name": {}},
        {"start": whole, "spots": [whole, None], "by_name": {}},
        {"start": whole, "spots": [], "by_name": {"k": lacking}},
        {"spots": [], "by_name": {}},
    ]
    rows = [json.dumps({"id": number, **trip}) for number, trip in enumerate(trips)]
    (tmp_path / "in.json").write_text("\n".join(rows))
    source = JsonSource(str(tmp_path / "in.json"), Trip, on_malformed="divert")
    found = {row.id: row["__malformed"] and row["__malformed"].reason for row in source.read(spark).collect()}
    assert found == {
        0: None,
        1: "field 'start.y' is missing, and its type does not allow None",
        2: "field 'spots[].y' is missing, and its type does not allow None",
        3: "field 'spots[]' is missing, and its type does not allow None",
        4: "field 'by_name[].y' is missing, and its type does not allow None",
        5: "field 'start' is missing, and its type does not allow None",
    }
    trips = record_type(Trip)
    pq.write_table(pa.Table.from_batches([trips.to_batch([Trip(1)])]), tmp_path / "in.parquet")
    read = ParquetSource(str(tmp_path / "in.parquet"), Trip).read(spark)
    assert [record for batch in read.toArrow().to_batches() for record in trips.from_batch(batch)] == [Trip(1)]


def test_a_process_that_was_paused_lists_nothing_that_another_one_has_listed(tmp_path):
    folder, root = UPath(tmp_path / "job/sources/in"), str(tmp_path / "in")

    def add(chunks, name):
        return chunks.add([File(name, 1, 0)], lambda name: f"file://{root}/{name}")

    paused = listing.Chunks(folder, root)
    paused.show([add(paused, "1.csv")])
    other = listing.Chunks(folder, root)
    other.show([add(other, "2.csv")])
    shown = sorted(path.name for path in (folder / "chunks/_spark_metadata").iterdir())
    with pytest.raises(StageError, match=r"job: another process of this job has listed .*/in/ meanwhile"):
        add(paused, "2.csv")
    assert sorted(path.name for path in (folder / "chunks/_spark_metadata").iterdir()) == shown
    assert list(listing.Chunks(folder, root).names()) == ["1.csv", "2.csv"]
    assert add(other, "3.csv") == 2


@pytest.mark.a_day(1)
@pytest.mark.parametrize("monitor", [False, True])
def test_a_file_that_goes_between_listing_and_reading_fails_the_epoch_until_it_is_back(
    spark, run_streaming, tmp_path, monkeypatch, monitor
):
    put(tmp_path / "in", "a.csv", 1)
    put(tmp_path / "in", "b.csv", 2)
    pipeline = Pipeline("sales")
    source = (watched if monitor else bounded)(tmp_path / "in")
    pipeline.from_source(source).sink_to(FileSink(str(tmp_path / "out"), name="out"))
    spark.conf.set("spark.sql.files.ignoreMissingFiles", "true")
    show = sources.show

    def shown(*arguments):
        found = show(*arguments)
        (tmp_path / "in" / "b.csv").rename(tmp_path / "elsewhere")
        return found

    monkeypatch.setattr(sources, "show", shown)
    try:
        with pytest.raises(StageError, match=r"^sales: stage 'main': .*/in/b\.csv is gone, .* next attempt") as failed:
            run_streaming(pipeline)
        assert failed.value.retryable
        assert not list((tmp_path / "out").glob("*.parquet"))
        monkeypatch.undo()
        (tmp_path / "elsewhere").rename(tmp_path / "in" / "b.csv")
        if not monitor:
            run_streaming(pipeline)
            assert sorted(pq.read_table(tmp_path / "out")["amount"].to_pylist()) == [1, 2]
    finally:
        spark.conf.unset("spark.sql.files.ignoreMissingFiles")
