"""The Delta source: a table as it stands, then what its versions add; what it refuses before anything is read."""

import json
from collections import Counter
from datetime import date, datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.api import Pipeline
from dagster_unified.connectors import ChangeKind, DeltaSink, DeltaSource
from dagster_unified.errors import ConfigurationError, PipelineError, SourceError, StateError
from dagster_unified.graph.connectors import Slice, TimeRange
from tests.connectors.support import Query
from tests.support import MODES, table_rows


class Order(NamedTuple):
    id: int
    shop: str


def orders(*ids, shop="north"):
    return pa.table({"id": pa.array(ids, pa.int64()), "shop": [shop] * len(ids)})


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "orders")


def rows_between(source, first, last):
    """The ids that a range of versions gives, as workers read it."""
    reading = source._with_table_columns()
    splits = reading.splits({"version": first}, {"version": last})
    return sorted(value for split in splits for batch in reading.read_split(split) for value in batch["id"].to_pylist())


def read_whole(source):
    return rows_between(source, 0, source.newest()["version"])


def test_a_table_is_read_as_it_stands_whatever_its_versions_did(path):
    write_deltalake(path, orders(1, 2))
    write_deltalake(path, orders(3), mode="append")
    DeltaTable(path).delete("id = 2")
    assert read_whole(DeltaSource(path, Order)) == [1, 3]


def test_later_versions_give_the_rows_that_they_add(path):
    write_deltalake(path, orders(1))
    write_deltalake(path, orders(2, 3), mode="append")
    write_deltalake(path, orders(4), mode="append")
    source = DeltaSource(path, Order)
    assert rows_between(source, 1, 3) == [2, 3, 4]
    assert rows_between(source, 2, 3) == [4]
    assert rows_between(DeltaSource(path, Order, starting_version=0), 0, 2) == [1, 2, 3]


def test_compaction_emits_nothing(path):
    write_deltalake(path, orders(1))
    write_deltalake(path, orders(2), mode="append")
    DeltaTable(path).optimize.compact()
    write_deltalake(path, orders(3), mode="append")
    assert rows_between(DeltaSource(path, Order), 1, 4) == [2, 3]


def commit(path, *actions):
    """Adds an entry to a table's log, as another writer than deltalake would; returns its version."""
    log = Path(path) / "_delta_log"
    number = DeltaTable(path).version() + 1
    (log / f"{number:020d}.json").write_text("\n".join(map(json.dumps, actions)))
    return number


def metadata_of(path):
    first = (Path(path) / "_delta_log" / f"{0:020d}.json").read_text().splitlines()
    return next(action["metaData"] for action in map(json.loads, first) if "metaData" in action)


@pytest.mark.parametrize(
    ("change", "operation"),
    [
        (lambda path: DeltaTable(path).delete("id = 1"), "DELETE"),
        (lambda path: DeltaTable(path).update({"shop": "'south'"}, predicate="id = 1"), "UPDATE"),
        (lambda path: write_deltalake(path, orders(9), mode="overwrite"), 'WRITE, "Overwrite"'),
    ],
)
def test_a_version_that_changes_rows_is_an_error_before_anything_of_it_is_read(path, change, operation):
    write_deltalake(path, orders(1))
    write_deltalake(path, orders(2), mode="append")
    change(path)
    with pytest.raises(SourceError, match=rf"source 'orders': version 2 .* \({operation}\) changes or deletes rows"):
        rows_between(DeltaSource(path, Order), 1, 3)
    assert rows_between(DeltaSource(path, Order), 1, 2) == [2]


def test_a_version_that_was_cleaned_up_is_an_error_that_says_where_the_log_begins(path):
    for number in range(4):
        write_deltalake(path, orders(number), mode="append")
    DeltaTable(path).create_checkpoint()
    for number in (0, 1):
        (Path(path) / "_delta_log" / f"{number:020d}.json").unlink()
    with pytest.raises(SourceError, match=r"version 1 is no longer in the log .* begins with version 2"):
        rows_between(DeltaSource(path, Order), 1, 4)


def test_a_file_that_was_vacuumed_is_an_error_that_names_it(path):
    write_deltalake(path, orders(1))
    write_deltalake(path, orders(2), mode="append")
    DeltaTable(path).optimize.compact()
    DeltaTable(path).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    with pytest.raises(SourceError, match=r"source 'orders': .*\.parquet is gone, since it was vacuumed or deleted"):
        rows_between(DeltaSource(path, Order), 1, 2)
    assert read_whole(DeltaSource(path, Order)) == [1, 2]


def test_a_folder_without_a_table_is_an_error(path):
    with pytest.raises(SourceError, match="source 'orders': there is no Delta table at"):
        DeltaSource(path, Order).newest()
    with pytest.raises(SourceError, match="there is no Delta table at"):
        DeltaSource(path, Order)._with_table_columns()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"configuration": {"delta.columnMapping.mode": "name"}}, "requires column mapping of its readers"),
        ({"schemaString": json.dumps({"type": "struct", "fields": []})}, "column 'id' .* is gone in version 1"),
    ],
)
def test_a_version_that_changes_what_readers_have_to_know_is_an_error_that_names_it(path, change, words):
    write_deltalake(path, orders(1))
    reading = DeltaSource(path, Order)._with_table_columns()
    commit(path, {"metaData": metadata_of(path) | change})
    with pytest.raises(SourceError, match=words):
        reading.splits({"version": 1}, {"version": 2})


def test_a_table_with_a_feature_that_the_source_does_not_know_is_refused_as_a_whole(path):
    write_deltalake(path, orders(1))
    features = {"readerFeatures": ["variantType"], "writerFeatures": ["variantType"]}
    commit(path, {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}})
    with pytest.raises(SourceError, match=r"requires variantType of its readers|cannot be read"):
        DeltaSource(path, Order)._with_table_columns()


def test_a_file_with_a_deletion_vector_is_refused(path):
    write_deltalake(path, orders(1))
    vector = {"storageType": "u", "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^", "sizeInBytes": 4, "cardinality": 1}
    added = {"path": "a.parquet", "partitionValues": {}, "size": 1, "modificationTime": 1, "dataChange": True}
    commit(path, {"add": {**added, "deletionVector": vector}})
    with pytest.raises(SourceError, match=r"file a\.parquet has a deletion vector in version 1"):
        rows_between(DeltaSource(path, Order), 1, 2)


@pytest.mark.parametrize("place", ["file:///elsewhere/a.parquet", "/elsewhere/a.parquet", "s3://lake/a.parquet"])
def test_a_file_of_a_shallow_clone_is_refused(path, place):
    write_deltalake(path, orders(1))
    added = {"path": place, "partitionValues": {}, "size": 1, "modificationTime": 1, "dataChange": True}
    commit(path, {"add": added})
    for first in (0, 1):
        with pytest.raises(SourceError, match=r"a\.parquet of version 1 .* is not in the table's folder"):
            rows_between(DeltaSource(path, Order), first, 2)


def test_a_column_that_a_later_version_adds_is_none_in_the_files_before_it(path):
    class Priced(NamedTuple):
        id: int
        price: float | None

    write_deltalake(path, orders(1))
    write_deltalake(path, orders(2).append_column("price", pa.array([2.5])), mode="append", schema_mode="merge")
    reading = DeltaSource(path, Priced)._with_table_columns()
    batches = [b for s in reading.splits({"version": 0}, {"version": 2}) for b in reading.read_split(s)]
    assert sorted(row for b in batches for row in zip(*map(pa.Array.to_pylist, b.columns), strict=True)) == [
        (1, None),
        (2, 2.5),
    ]


def test_a_field_without_a_column_is_an_error_that_names_the_nearest(path):
    class Misspelt(NamedTuple):
        shopp: str

    write_deltalake(path, orders(1))
    with pytest.raises(SourceError, match="has no column 'shopp'; did you mean 'shop'"):
        DeltaSource(path, Misspelt)._with_table_columns()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"starting_version": 1, "starting_time": datetime(2026, 1, 1, tzinfo=timezone.utc)}, "not both"),
        ({"starting_version": -1}, "starting_version is a version of the table, not -1"),
        ({"starting_time": datetime(2026, 1, 1)}, "starting_time needs a time zone"),
        ({"max_versions_per_trigger": 0}, "max_versions_per_trigger"),
    ],
)
def test_options_that_mean_nothing_are_refused_where_they_are_written(path, options, words):
    with pytest.raises(PipelineError, match=words):
        DeltaSource(path, Order, **options)


def test_a_starting_time_is_the_first_version_committed_at_it_or_later(path):
    write_deltalake(path, orders(1))
    write_deltalake(path, orders(2), mode="append")
    times = [entry["timestamp"] for entry in reversed(DeltaTable(path).history())]
    moment = datetime.fromtimestamp(times[1] / 1000, timezone.utc)
    assert DeltaSource(path, Order, starting_time=moment).first() == {"version": 1}
    assert DeltaSource(path, Order, starting_time=moment + timedelta(days=1)).first() == {"version": 2}


def test_a_starting_version_that_is_not_there_yet_is_an_error(path):
    write_deltalake(path, orders(1))
    assert DeltaSource(path, Order, starting_version=1).first() == {"version": 1}
    with pytest.raises(SourceError, match="has versions up to 0, and starting_version is 3"):
        DeltaSource(path, Order, starting_version=3).first()


def test_partition_values_and_folders_of_any_characters_are_read_as_they_are(path):
    class Sold(NamedTuple):
        id: int
        shop: str | None

    shops = ["a/b", "x y", "50%", "é", "a=b", "q?*", "+", "%2F", "\\", None]
    rows = pa.table({"id": range(len(shops)), "shop": shops})
    write_deltalake(path, rows, partition_by=["shop"])
    odd = Path(path).rename(f"{path} [1] {{b}} é#")
    for source in (DeltaSource(str(odd), Sold), DeltaSource(str(odd), Sold, starting_version=0)):
        reading = source._with_table_columns()
        batches = [b for s in reading.splits({"version": 0}, {"version": 1}) for b in reading.read_split(s)]
        assert pa.Table.from_batches(batches).sort_by("id").to_pylist() == rows.to_pylist()


def test_a_record_of_fields_that_no_file_has_is_read_for_each_row(path):
    class Shop(NamedTuple):
        shop: str

    write_deltalake(path, orders(1, 2), partition_by=["shop"])
    reading = DeltaSource(path, Shop)._with_table_columns()
    (split,) = reading.splits({"version": 0}, {"version": 1})
    assert [row for batch in reading.read_split(split) for row in batch.to_pylist()] == [{"shop": "north"}] * 2


def test_a_folder_that_readers_of_delta_do_not_find_is_refused(path):
    with pytest.raises(ConfigurationError, match=r"source 'rows': .* has a backslash, or a % before two hexadecimal"):
        DeltaSource(f"{path}%41", Order, "rows")


class Visit(NamedTuple):
    day: date
    at: datetime
    n: int | None


def of_day(source, day):
    start = datetime(2026, 5, day, tzinfo=timezone.utc)
    return source.bounded_to(Slice(start.date().isoformat(), {"": TimeRange(start, start + timedelta(days=1))}))


def files_of(source):
    reading = source._with_table_columns()
    return [file for split in reading.splits({"version": 0}, source.newest()) for file in split]


def visits(days):
    return pa.table(
        {
            "day": pa.array([date(2026, 5, day) for day in days], pa.date32()),
            "at": pa.array([datetime(2026, 5, day, 23, 59, tzinfo=timezone.utc) for day in days]),
            "n": pa.array(days, pa.int64()),
        }
    )


@pytest.mark.parametrize("field", ["day", "at"])
@pytest.mark.parametrize("partition_by", [["day"], None])
def test_a_run_for_a_partition_leaves_out_files_that_have_no_rows_of_it(path, field, partition_by):
    for day in (1, 5, 9):
        write_deltalake(path, visits([day]), mode="append", partition_by=partition_by)
    source = DeltaSource(path, Visit).partitioned_by(field)
    assert len(files_of(source)) == 3
    assert len(files_of(of_day(source, 5))) == 1
    assert len(files_of(of_day(source, 3))) == 0


def changes_between(source, first, last):
    """The changes that a range of versions gives, in the order in which they are read."""
    reading = source._with_table_columns()
    splits = reading.splits({"version": first}, {"version": last})
    batches = [batch for split in splits for batch in reading.read_split(split)]
    records = [change for batch in batches for change in batch.to_pylist()]
    return [(change["kind"], tuple(change["row"].values()), change["version"]) for change in records]


def changes_of(path, first, last):
    return changes_between(DeltaSource(path, Order, changes=True), first, last)


FEED = {"delta.enableChangeDataFeed": "true"}


def test_a_change_data_feed_says_each_change_and_what_was_before_comes_first(path):
    write_deltalake(path, orders(1, 2, 3), configuration=FEED)
    DeltaTable(path).update({"shop": "'south'"}, predicate="id = 2")
    DeltaTable(path).delete("id = 3")
    write_deltalake(path, orders(4), mode="append")
    assert changes_of(path, 0, 1) == [("insert", (n, "north"), 0) for n in (1, 2, 3)]
    assert changes_of(path, 1, 4) == [
        ("update_before", (2, "north"), 1),
        ("update_after", (2, "south"), 1),
        ("delete", (3, "north"), 2),
        ("insert", (4, "north"), 3),
    ]


def test_without_a_feed_the_rows_of_removed_files_are_deleted_and_those_of_added_ones_inserted(path):
    write_deltalake(path, orders(1, 2))
    DeltaTable(path).delete("id = 2")
    assert changes_of(path, 1, 2) == [
        ("delete", (1, "north"), 1),
        ("delete", (2, "north"), 1),
        ("insert", (1, "north"), 1),
    ]


def test_changes_of_a_removed_file_of_an_unknown_partition_are_refused(path):
    write_deltalake(path, orders(1), partition_by=["shop"])
    file = pa.table(DeltaTable(path).get_add_actions()).to_pylist()[0]["path"]
    commit(path, {"remove": {"path": file, "dataChange": True, "deletionTimestamp": 1}})
    with pytest.raises(SourceError, match=r"version 1 .* does not say of which partition it removes"):
        changes_of(path, 1, 2)


def test_the_time_of_a_change_is_that_of_the_commit(path):
    write_deltalake(path, orders(1))
    reading = DeltaSource(path, Order, changes=True, starting_version=0)._with_table_columns()
    (split,) = reading.splits({"version": 0}, {"version": 1})
    (batch,) = reading.read_split(split)
    committed = DeltaTable(path).history()[0]["timestamp"]
    assert batch["committed_at"].to_pylist() == [datetime.fromtimestamp(committed / 1000, timezone.utc)]


def write_at_random(path, write, number):
    table = DeltaTable(path)
    if write == "compact":
        table.optimize.compact()
    elif write == "checkpoint":
        table.create_checkpoint()
    elif write == "delete":
        table.delete(f"id % 3 = {number % 3}")
    elif write == "update":
        table.update({"shop": f"'{number}'"}, predicate=f"id % 2 = {number % 2}")
    elif write == "merge":
        merger = table.merge(orders(2, 1000 + number, shop="merged"), "t.id = s.id", source_alias="s", target_alias="t")
        merger.when_matched_update_all().when_not_matched_insert_all().execute()
    else:
        write_deltalake(path, orders(*range(number * 10, number * 10 + 3), shop="s" * number), mode=write)


def in_steps(data, first, end):
    """A range of versions, cut anywhere."""
    return sorted({first, end, *data.draw(st.sets(st.integers(first, end), max_size=3))})


CHANGES = ["append", "overwrite", "compact", "checkpoint", "delete", "update", "merge"]


@given(
    writes=st.lists(st.sampled_from(CHANGES), min_size=1, max_size=6),
    options=st.sampled_from([{}, {"configuration": FEED}]),
    parts=st.sampled_from([None, ["shop"]]),
    data=st.data(),
)
def test_the_changes_after_any_snapshot_lead_to_the_table(tmp_path_factory, writes, options, parts, data):
    path = str(tmp_path_factory.mktemp("delta") / "orders")
    write_deltalake(path, orders(0, 1, 2, 3), partition_by=parts, **options)
    for number, write in enumerate(writes, 1):
        write_at_random(path, write, number)
    end = DeltaTable(path).version() + 1
    steps = in_steps(data, data.draw(st.integers(1, end)), end)
    rows = Counter()
    for first, last in pairwise([0, *steps]):
        for kind, row, _ in changes_of(path, first, last):
            rows[row] += 1 if kind in ("insert", "update_after") else -1
            assert rows[row] >= 0
    assert rows == Counter(map(tuple, map(dict.values, DeltaTable(path).to_pyarrow_table().to_pylist())))


@given(writes=st.lists(st.sampled_from(["append", "compact", "checkpoint"]), min_size=1, max_size=8), data=st.data())
def test_the_versions_after_any_snapshot_give_the_rest_of_the_table(tmp_path_factory, writes, data):
    path = str(tmp_path_factory.mktemp("delta") / "orders")
    write_deltalake(path, orders(0))
    for number, write in enumerate(writes, 1):
        write_at_random(path, write, number)
    source = DeltaSource(path, Order)
    end = source.newest()["version"]
    steps = [0, *in_steps(data, data.draw(st.integers(1, end)), end)]
    ids = [number for first, last in pairwise(steps) for number in rows_between(source, first, last)]
    assert sorted(ids) == sorted(DeltaTable(path).to_pyarrow_table()["id"].to_pylist())


# On Spark


def test_batch_reads_the_table_as_it_stands(spark, path):
    write_deltalake(path, orders(1, 2))
    source = DeltaSource(path, Order)
    assert sorted(map(tuple, source.read(spark).collect())) == [(1, "north"), (2, "north")]
    assert source.batch_position(spark).offsets == {"version": 1}


def test_batch_goes_on_after_a_position(spark, path):
    write_deltalake(path, orders(1))
    position = DeltaSource(path, Order).batch_position(spark)
    write_deltalake(path, orders(2, 3), mode="append")
    assert sorted(row.id for row in DeltaSource(path, Order).after(position).read(spark).collect()) == [2, 3]


def test_a_position_in_a_table_that_was_made_again_is_refused(spark, path):
    write_deltalake(path, orders(1))
    position = DeltaSource(path, Order).batch_position(spark)
    write_deltalake(f"{path}2", orders(7))
    (Path(path)).rename(f"{path}-old")
    Path(f"{path}2").rename(path)
    with pytest.raises(SourceError, match="the table was deleted and made again"):
        DeltaSource(path, Order).after(position).read(spark)
    with pytest.raises(StateError, match="it reads Delta table at"):
        DeltaSource(f"{path}-old", Order).after(position)


def test_a_column_is_widened_to_its_field_and_never_narrowed(spark, path):
    class Wide(NamedTuple):
        id: float

    class Narrow(NamedTuple):
        shop: int

    write_deltalake(path, orders(1, 2**53))
    assert sorted(row.id for row in DeltaSource(path, Wide).read(spark).collect()) == [1.0, 2.0**53]
    with pytest.raises(PipelineError, match="column 'shop' is string, and a value of it could change"):
        DeltaSource(path, Narrow).read(spark)


def test_values_of_the_tables_partitions_have_their_types(spark, path):
    write_deltalake(path, visits([1, 2]), partition_by=["day", "at"])
    empty = visits([3]).set_column(2, "n", pa.array([None], pa.int64()))
    write_deltalake(path, empty, mode="append")
    rows = DeltaSource(path, Visit).read(spark).orderBy("day").collect()
    assert [(row.day, row["at"].astimezone(timezone.utc), row.n) for row in rows] == [
        (date(2026, 5, day), datetime(2026, 5, day, 23, 59, tzinfo=timezone.utc), n)
        for day, n in ((1, 1), (2, 2), (3, None))
    ]


def test_a_stream_reads_the_table_and_then_each_version_once_also_after_a_restart(spark, path, tmp_path):
    write_deltalake(path, orders(1, 2))
    source = DeltaSource(path, Order, bounded=False)
    query = Query(spark, source, tmp_path / "job")

    def more(running):
        write_deltalake(path, orders(3), mode="append")
        running.processAllAvailable()

    assert query.run(more) == [1, 2, 3]
    write_deltalake(path, orders(4), mode="append")
    write_deltalake(path, orders(5), mode="append")
    again = Query(spark, DeltaSource(path, Order, bounded=False, max_versions_per_trigger=1), tmp_path / "job")
    assert again.run() == [4, 5]
    assert again.read == [[4], [5]]


class Stock(NamedTuple):
    shop: str
    orders: int


def stock(change) -> Stock:
    return Stock(change.row.shop, 1 if change.kind in (ChangeKind.INSERT, ChangeKind.UPDATE_AFTER) else -1)


@MODES
def test_a_pipeline_keeps_a_table_up_to_date_by_the_changes_of_another(
    path, mode, run_on_spark, run_streaming, tmp_path
):
    write_deltalake(path, orders(1, 2, 3), configuration=FEED)
    DeltaTable(path).update({"shop": "'south'"}, predicate="id = 2")
    DeltaTable(path).delete("id = 3")
    pipeline = Pipeline("stock")
    changes = pipeline.from_source(DeltaSource(path, Order, changes=True, starting_version=0))
    changes.map(stock).key_by("shop").sum("orders").sink_to(DeltaSink(f"{tmp_path}/n", mode="upsert", key="shop"))
    (run_on_spark if mode == "BATCH" else run_streaming)(pipeline)
    assert table_rows(f"{tmp_path}/n") == [("north", 1), ("south", 1)]


@MODES
def test_a_pipeline_writes_a_table_from_a_table_in_both_modes(path, mode, run_on_spark, run_streaming, tmp_path):
    write_deltalake(path, orders(1, 2, 3))
    pipeline = Pipeline("shops")
    totals = pipeline.from_source(DeltaSource(path, Order)).key_by("shop").sum("id")
    totals.sink_to(DeltaSink(f"{tmp_path}/totals", mode="upsert", key="shop"))
    (run_on_spark if mode == "BATCH" else run_streaming)(pipeline)
    assert table_rows(f"{tmp_path}/totals") == [(6, "north")]
