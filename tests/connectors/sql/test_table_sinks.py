"""What all sinks into tables do, in each real database: modes, repeats, partitions, and what they refuse."""

from contextlib import closing
from datetime import date
from typing import NamedTuple

import pytest
from dagster import StaticPartitionsDefinition

from dagster_unified.api import Pipeline
from dagster_unified.connectors import CsvSource, DatabaseSink, PostgresSink
from dagster_unified.connectors.protocol.frame import Malformed
from dagster_unified.engine.commit import WriteContext
from dagster_unified.errors import LeaseLostError, PipelineError, SinkError
from dagster_unified.graph.connectors import Slice
from dagster_unified.orchestration import BatchDeployment
from dagster_unified.records import record_type
from tests.connectors.sql.support import MANY, Sale, everything, execute
from tests.connectors.support import LocalCommits, identity, write


def test_a_missing_table_is_made(database):
    write(database.sink(), [Sale(1, "a", 1.5)], [Sale(2, "b", None)])
    assert database.rows() == [(1, "a", 1.5), (2, "b", None)]


@pytest.mark.parametrize("tasks", [[[Sale(1, "a")]], [MANY, MANY], [MANY, [Sale(-1, "few")], []]])
def test_an_execution_appends_once(database, tasks):
    count = sum(map(len, tasks))
    assert not write(database.sink(), *tasks).repeated
    assert write(database.sink(), *tasks).repeated
    assert database.rows("SELECT count(*) FROM sales") == [(count,)]
    write(database.sink(), *tasks, execution="another")
    assert database.rows("SELECT count(*) FROM sales") == [(2 * count,)]
    assert database.left() == []


def test_an_epoch_is_written_once_and_no_job_on_an_earlier_timeline_may_write(database):
    sink = database.sink()
    for epoch in (0, 1, 1, 0, 2):
        write(sink, [Sale(epoch, "a")], epoch=epoch)
    assert [row[0] for row in database.rows()] == [0, 1, 2]
    write(sink, [Sale(3, "a")], epoch=1, timeline=1)
    with pytest.raises(LeaseLostError, match="timeline 1"):
        write(sink, [Sale(4, "a")], epoch=8)
    assert [row[0] for row in database.rows()] == [0, 1, 2, 3]


def test_no_rows_are_remembered_as_well(database):
    assert not write(database.sink(), [], record=Sale, epoch=3).repeated
    assert write(database.sink(), [Sale(1, "a")], epoch=3).repeated
    assert database.rows() == []


@pytest.mark.parametrize("more", [[], MANY])
def test_the_last_record_of_a_key_stays(database, more):
    sink = database.sink(mode="upsert", key="id")
    write(sink, [Sale(1, "first"), Sale(2, "x"), Sale(1, "second"), *more[3:]], epoch=0)
    assert database.rows()[:2] == [(1, "second", None), (2, "x", None)]
    write(sink, [Sale(1, "third", 3.0), *more[3:]], [Sale(2, "y")], epoch=1)
    assert database.rows()[:2] == [(1, "third", 3.0), (2, "y", None)]
    assert len(database.rows()) == max(2, len(more) - 1)


class Measured(NamedTuple):
    level: float
    text: str


@pytest.mark.parametrize("levels", [(0.0, -0.0), (-0.0, 0.0)])
def test_a_key_of_minus_zero_is_that_of_zero(database, levels):
    sink = database.sink("measured", mode="upsert", key="level")
    write(sink, [Measured(levels[0], "first"), Measured(levels[1], "second")], epoch=0)
    assert database.rows("SELECT text FROM measured") == [("second",)]
    write(sink, [Measured(levels[0], "third")], epoch=1)
    assert database.rows("SELECT text FROM measured") == [("third",)]


class Pair(NamedTuple):
    left: str
    right: date


def test_a_key_may_be_all_there_is(database):
    sink = database.sink("pairs", mode="upsert", key=("left", "right"))
    write(sink, [Pair("a", date(2024, 1, 1))] * 2, epoch=0)
    write(sink, [Pair("a", date(2024, 1, 1)), Pair("b", date(2024, 1, 2))], epoch=1)
    assert database.rows("SELECT count(*) FROM pairs") == [(2,)]


def test_overwrite_replaces_the_table_in_batch_and_what_was_there_before_a_stream(database):
    sink = database.sink(mode="overwrite")
    write(sink, MANY, execution="one")
    write(sink, [Sale(1, "a")], execution="two")
    assert database.rows() == [(1, "a", None)]
    for epoch in range(3):
        write(sink, [Sale(epoch, "new")], epoch=epoch)
    assert [row[:2] for row in database.rows()] == [(0, "new"), (1, "new"), (2, "new")]


@pytest.mark.parametrize("mode", ["append", "overwrite"])
def test_a_partition_that_runs_again_replaces_its_rows(database, mode):
    sink = database.sink(mode=mode, partition_column="of_run")
    for execution, partition, ids in [("1", "mon", (1, 2)), ("2", "tue", (3,)), ("3", "mon", (4,)), ("4", "tue", ())]:
        write(sink, [Sale(n, "a") for n in ids], record=Sale, execution=execution, partition=partition)
    assert database.rows("SELECT id, of_run FROM sales") == [(4, "mon")]


def test_the_column_of_the_partition_has_its_key_as_dagster_writes_it(database):
    key = "Zürich|2024-01-01-05:00"
    for execution in ("1", "2"):
        write(
            database.sink(partition_column="of_run"),
            [Sale(1, "a")],
            record=Sale,
            execution=execution,
            partition=Slice(key, {}).name,
        )
    assert database.rows("SELECT id, of_run FROM sales") == [(1, key)]


@pytest.mark.parametrize("tasks", [[[Sale(1, "a")]], [[Sale(1, "a")], MANY]])
def test_several_partitions_are_committed_at_once(database, tasks):
    def run(execution):
        with closing(LocalCommits(database.sink(partition_column="of"), Sale)) as commits:
            contexts = [WriteContext(identity(execution, day), "stage") for day in ("mon", "tue")]
            return [result.repeated for result in commits.write(tasks, contexts)]

    count = sum(map(len, tasks))
    assert [run("one"), run("one"), run("two")] == [[False, False], [True, True], [False, False]]
    found = database.rows("SELECT of, count(*) FROM sales GROUP BY of ORDER BY of")
    assert found == [("mon", count), ("tue", count)]
    assert database.left() == []


def test_a_partition_whose_rows_cannot_be_told_is_not_written_twice(database):
    sink = database.sink()
    write(sink, [Sale(1, "a")], execution="one", partition="mon")
    with pytest.raises(SinkError, match=r"partition 'mon' was written before.*partition_column"):
        write(sink, [Sale(1, "a")], execution="two", partition="mon")
    write(sink, [Sale(2, "a")], execution="two", partition="tue")
    assert [row[0] for row in database.rows()] == [1, 2]


def test_a_sink_that_replaces_the_whole_table_is_refused_where_runs_are_for_partitions(database):
    def planned(**options):
        pipeline = Pipeline("sales")
        pipeline.from_source(CsvSource("in/{key}.csv", Sale)).sink_to(database.sink(**options))
        return BatchDeployment(pipeline, partitions=StaticPartitionsDefinition(["a"])).loaded()

    with pytest.raises(PipelineError, match="mode 'overwrite' replaces the whole table, and runs are for partitions"):
        planned(mode="overwrite")
    assert planned(mode="overwrite", partition_column="of").graph.sinks
    with pytest.raises(PipelineError, match="the records have the field 'id', and the sink fills the column 'ID'"):
        planned(mode="overwrite", partition_column="ID")


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ('id text, "order" text, amount float', "column 'id' of .*sales is "),
        ('id bigint, "order" text', "sales has no column 'amount'; "),
        (
            'id bigint, "order" text, amount double precision, who text NOT NULL',
            "column 'who' of .*sales may not be null",
        ),
    ],
)
def test_a_table_that_the_records_do_not_fit_is_refused_before_anything_is_written(database, made, says):
    execute(database.url, f"CREATE TABLE sales ({made})")
    with pytest.raises(SinkError, match=says):
        write(database.sink(), MANY)
    assert database.rows() == []
    assert database.left() == []


def test_what_was_written_can_be_looked_at(database):
    sink = database.sink(partition_column="of").bound_to(record_type(Sale))
    assert not sink.exists()
    assert sink.preview(None, 5) is None
    write(database.sink(partition_column="of"), MANY, partition="mon")
    assert sink.exists()
    assert sink.preview(None, 2).to_pylist() == [sale._asdict() for sale in MANY[:2]]
    held = sink.dataset()
    assert held.schema == sink.records.schema
    assert held.count_rows() == len(MANY)


@pytest.mark.parametrize(("kind", "url"), [(DatabaseSink, "sqlite://"), (PostgresSink, "postgresql://x/y")])
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"mode": "merge"}, "mode 'merge' is not one of append, upsert, overwrite"),
        ({"mode": "upsert"}, "needs the fields that identify a row"),
        ({"key": "id"}, "needs the fields that identify a row"),
        ({"mode": "upsert", "key": "ids"}, "no field 'ids', which is in its key; did you mean 'id'"),
        ({"mode": "upsert", "key": "amount"}, "may be None"),
        ({"mode": "upsert", "key": "id", "partition_column": "p"}, "leave partition_column out"),
        ({"partition_column": "order"}, "give partition_column another name"),
    ],
)
def test_what_makes_no_sense_is_refused_when_the_graph_is_built(kind, url, given, says):
    with pytest.raises(PipelineError, match=says):
        kind(**{"table": "sales", "connection": url, **given}).bound_to(record_type(Sale))


@pytest.mark.parametrize(("kind", "url"), [(DatabaseSink, "sqlite://"), (PostgresSink, "postgresql://x/y")])
def test_explain_says_of_a_partition_that_runs_again_what_the_sink_does(kind, url):
    def promised(**given):
        return kind("sales", url, **given).capabilities.describe()

    assert promised() == (
        "exactly-once, but going back to a savepoint writes rows again, and running a partition again is refused"
    )
    assert promised(partition_column="day") == "exactly-once, but going back to a savepoint writes rows again"
    assert promised(mode="upsert", key="id") == "upsert"


class Part(NamedTuple):
    id: int
    share: float | None


class Mixed(NamedTuple):
    id: int
    part: Part | None = None
    parts: list[Part] = []
    shares: dict[str, float | None] = {}


class Strict(NamedTuple):
    id: int
    part: Part | None
    parts: list[Part]
    shares: dict[str, float]


@pytest.mark.parametrize(
    ("row", "path"),
    [
        (Mixed(1, Part(1, float("nan"))), r"part\.share' is nan"),
        (Mixed(1, None, [Part(1, 0.5), Part(2, float("-inf"))]), r"parts\[\]\.share' is -inf"),
        (Mixed(1, None, [], {"a": 0.5, "b": float("inf")}), r"shares\[\]' is inf"),
    ],
)
def test_a_number_that_json_does_not_have_does_not_become_null(database, row, path):
    with pytest.raises(SinkError, match=rf"sink 'mixed': field '{path}, and JSON, in which the column is written, has"):
        write(database.sink("mixed"), [Mixed(2), row])


def test_a_null_in_a_dict_that_its_type_does_not_allow_makes_a_row_malformed(database):
    whole = Mixed(1, Part(1, 0.5), [], {"a": 1.5})
    write(database.sink("mixed"), [whole, Mixed(2, None, [], {"a": 1.5, "b": None})])
    read = everything(database.source("mixed", Strict, on_malformed="divert"))
    assert [row for row in read if not isinstance(row, Malformed)] == [Strict(1, Part(1, 0.5), [], {"a": 1.5})]
    (malformed,) = [row for row in read if isinstance(row, Malformed)]
    assert "shares" in malformed.reason
    assert "its type does not allow None" in malformed.reason
    assert '"id":2' in malformed.content
