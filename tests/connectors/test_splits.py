"""A source that is read in splits gives the same records in both modes, however it is cut, stopped and gone on with."""

from datetime import datetime, timedelta, timezone
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from dagster import DailyPartitionsDefinition, StaticPartitionsDefinition
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st
from upath import UPath

from dagster_unified.api import Pipeline
from dagster_unified.connectors import DeltaSink
from dagster_unified.connectors.protocol.positions import EverythingRead, OffsetsRead, PartitionsRead, shared
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.engine.malformed import in_batch
from dagster_unified.errors import MalformedInputError, PipelineError, SourceError, StateError, UnsupportedError
from dagster_unified.graph.connectors import Boundedness
from dagster_unified.operators.layout import PARTITION_INDEX
from dagster_unified.orchestration.partitions import slice_of
from tests.connectors.log_source import Event, LogSource, append
from tests.connectors.support import Query

DAYS = DailyPartitionsDefinition("2024-01-01", timezone="Europe/Berlin")
DAY = 86_400_000
BERLIN = int(datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=1))).timestamp() * 1000)


def event(number, day=0, key="a"):
    return Event(key, number, BERLIN + day * DAY + number)


ALL = [0, 1, 2, 3, 4, 100, 101, 102]
"""The numbers in `logs`."""


@pytest.fixture
def logs(tmp_path):
    folder = tmp_path / "logs"
    append(folder, "left", *[event(n) for n in range(5)])
    append(folder, "right", *[event(n, key="b") for n in range(100, 103)])
    return folder


def numbers(frame):
    return sorted(row.number for row in frame.collect())


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 50), min_size=1),
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 50)),
    st.integers(1, 60),
)
def test_a_micro_batch_takes_of_every_part_what_it_may(start, more, most):
    end = {part: first + more.get(part, 0) for part, first in start.items()}
    found = shared(start, end, most)
    taken = {part: found[part] - first for part, first in start.items()}
    assert all(0 <= taken[part] <= end[part] - start[part] for part in start)
    assert sum(taken.values()) == min(most, sum(end.values()) - sum(start.values()))


@given(st.data())
def test_however_it_is_cut_a_stream_reads_every_record_once(data):
    """Micro-batches of any size, records and parts that arrive between them, restarts at any position."""
    with TemporaryDirectory() as folder:
        logs, count, read = Path(folder), 0, []
        position = None
        for _ in range(data.draw(st.integers(1, 6))):
            for part in data.draw(st.lists(st.sampled_from("abc"), max_size=8)):
                append(logs, part, event(count))
                count += 1
            most = data.draw(st.none() | st.integers(1, 5))
            source = LogSource(logs, most=most, split=data.draw(st.integers(1, 4)))
            position = dict(source.first()) if position is None else position
            epochs = data.draw(st.integers(0, 4))
            read += stream(source, position, epochs)
        read += stream(LogSource(logs), position, None)
        assert sorted(read) == list(range(count))


def stream(source, position, epochs):
    """The numbers that so many micro-batches read, or all that there are; moves the position."""
    read = []
    while epochs is None or epochs > 0:
        end = source.limited(position, source.available(position))
        if end == position:
            break
        for split in source.splits({part: position.get(part, last) for part, last in end.items()}, end):
            for batch in source.read_split(split):
                read += batch.column("number").to_pylist()
        position.update(end)
        epochs = None if epochs is None else epochs - 1
    return read


def test_batch_reads_what_there_is_when_the_source_settles(spark, logs):
    source = LogSource(logs).with_fixed_range()
    append(logs, "left", event(5))
    assert numbers(source.read(spark)) == ALL
    position = source.batch_position(spark)
    assert position == OffsetsRead(f"logs in {logs}", {"left": 5, "right": 3})
    append(logs, "new", event(7))
    assert numbers(LogSource(logs).after(position).read(spark)) == [5, 7]


@pytest.fixture
def query(spark, logs, tmp_path):
    return Query(spark, LogSource(logs), tmp_path, Event._fields.index("number"))


def test_a_stream_keeps_its_offsets_in_the_checkpoint(query, logs):
    assert query.run() == ALL
    append(logs, "left", event(5))
    assert query.run()
    assert query.read == [ALL, [5]]
    assert query.position() == OffsetsRead(f"logs in {logs}", {"left": 6, "right": 3})


def test_a_stream_begins_where_batch_ended_and_batch_where_a_stream_ended(spark, query, logs):
    query.source = LogSource(logs).after(LogSource(logs).batch_position(spark))
    append(logs, "right", event(103))
    append(logs, "new", event(200))
    assert query.run() == [103, 200]
    after = query.position()
    append(logs, "new", event(201))
    assert numbers(LogSource(logs).after(after).read(spark)) == [201]


def test_a_part_that_appears_while_a_stream_runs_is_read_from_its_beginning(query, logs):
    def more(running):
        append(logs, "new", event(200), event(201))
        running.processAllAvailable()

    query.run(more)
    assert query.read[1:] == [[200, 201]]


def test_a_micro_batch_has_a_limit(query, logs):
    query.source = LogSource(logs, most=3)
    assert query.run() == ALL
    assert [len(epoch) for epoch in query.read] == [3, 3, 2]


def test_a_stream_of_what_is_available_ends(query, logs):
    query.source = LogSource(logs, most=3)
    assert query.run(availableNow=True) == ALL
    append(logs, "new", event(200))
    assert query.run(availableNow=True) == [*ALL, 200]


def test_a_given_end_holds_in_both_modes_also_after_a_restart(spark, query, logs):
    query.source = LogSource(logs, until={"left": 2, "right": 1})
    assert numbers(query.source.read(spark)) == query.run() == [0, 1, 100]
    append(logs, "new", event(200))
    query.source = LogSource(logs, until={"left": 4, "right": 1})  # where it ends was decided at its start
    assert query.run() == [0, 1, 100]


def test_two_sources_of_one_class_in_one_plan(spark, logs, tmp_path):
    append(tmp_path / "other", "only", event(900))
    both = LogSource(logs, "one").read(spark).unionByName(LogSource(tmp_path / "other", "two").read(spark))
    assert numbers(both) == [*ALL, 900]


def test_a_source_without_records(spark, tmp_path):
    append(tmp_path / "logs", "left")
    assert numbers(LogSource(tmp_path / "logs").read(spark)) == []


def test_a_partition_is_the_range_of_positions_of_its_window(spark, logs):
    append(logs, "left", event(10, day=1), event(11, day=1), event(20, day=2))
    first, second = (LogSource(logs, bounded=False).bounded_to(slice_of(DAYS, f"2024-01-0{n}")) for n in (1, 2))
    assert second.boundedness is Boundedness.BOUNDED
    assert numbers(second.read_partition(spark)) == [10, 11]
    assert numbers(first.read_partition(spark)) == ALL
    position = second.batch_position(spark)
    assert position == OffsetsRead(f"logs in {logs}", {"left": 7, "right": 3})
    assert numbers(LogSource(logs).after(position).read(spark)) == [20]
    after = PartitionsRead(datetime.fromtimestamp((BERLIN + DAY) / 1000, timezone.utc), "2024-01-01")
    assert numbers(LogSource(logs).after(after).read(spark)) == [10, 11, 20]
    rows = first.read_partitions(spark, [first, second]).groupBy(PARTITION_INDEX).count().collect()
    assert sorted(row["count"] for row in rows) == [2, 8]


def test_what_no_window_and_no_field_says_cannot_bound_a_source(logs):
    with pytest.raises(PipelineError, match=r"which records belong to the partitions, which are not in time; .*"):
        LogSource(logs).bounded_to(slice_of(StaticPartitionsDefinition(["a"]), "a"))
    by_key = LogSource(logs).partitioned_by("key").bounded_to(slice_of(StaticPartitionsDefinition(["a"]), "a"))
    with pytest.raises(UnsupportedError, match="partitions that are not in time have no order"):
        by_key.batch_position(None)


def test_a_field_can_say_the_partition_instead_of_the_window(spark, logs):
    append(logs, "left", event(10, day=1, key="b"))
    by_key = LogSource(logs).partitioned_by("key").bounded_to(slice_of(StaticPartitionsDefinition(["a", "b"]), "b"))
    assert numbers(by_key.read_partition(spark)) == [10, 100, 101, 102]


def test_it_tells_how_much_waits(logs):
    assert LogSource(logs).backlog('{"left": 2, "right": 3}', '{"left": 5, "new": 4, "right": 4}') == 4
    assert LogSource(logs).backlog("{}", "null") is None


def test_positions_that_it_cannot_go_on_after(logs):
    with pytest.raises(StateError, match=r"cannot go on after logs in /other \(x up to 1\): it reads logs in"):
        LogSource(logs).after(OffsetsRead("logs in /other", {"x": 1}))
    with pytest.raises(StateError, match="a LogSource does not know such a position"):
        LogSource(logs).after(EverythingRead(1))
    ahead = LogSource(logs).after(OffsetsRead(f"logs in {logs}", {"left": 9, "right": 3}))
    with pytest.raises(SourceError, match="left ends at offset 5, and has been read up to 9"):
        ahead.with_fixed_range()
    bounded = LogSource(logs, until={"left": 3, "right": 2}).after(OffsetsRead(f"logs in {logs}", {"left": 100}))
    with pytest.raises(SourceError, match="left ends at offset 5, and has been read up to 100"):
        bounded.with_fixed_range()


def broken(logs):
    append(logs, "left", "no json", event(5), '["a", "x", 1]')


def test_what_does_not_fit_fails_a_run_in_one_sentence(run_on_spark, run_streaming, logs, tmp_path):
    broken(logs)
    for run in (run_on_spark, run_streaming):
        pipeline = Pipeline("checked")
        pipeline.from_source(LogSource(logs, split=100)).map(lambda event: event.number, int).sink_to(
            DeltaSink(f"{tmp_path}/out")
        )
        with pytest.raises(
            MalformedInputError, match=r"checked: source 'log': left@5: .*'no json'; correct what writes"
        ):
            run(pipeline)


def test_what_does_not_fit_is_dropped_or_set_aside(spark, logs, tmp_path):
    broken(logs)
    pipeline = Pipeline("checked")
    source = LogSource(logs, on_malformed="divert", split=100)
    pipeline.from_source(source).map(lambda event: event.number, int).sink_to(DeltaSink(f"{tmp_path}/out"))
    plan = pipeline.plan({"execution.runtime-mode": "BATCH"})
    store = IntermediateStore(str(tmp_path / "store"))
    run_all(Run(plan, spark, store, "run", "run"))
    (node,) = plan.graph.sources
    kept = in_batch(store, "checked", node).table(10).to_pylist()
    assert sorted((row["file"], row["line"], row["content"]) for row in kept) == [
        ("left@5", None, "no json"),
        ("left@7", None, '["a", "x", 1]'),
    ]
    assert sorted(rows(tmp_path / "out")) == [(0,), (1,), (2,), (3,), (4,), (5,), (100,), (101,), (102,)]


def totals(logs, table, **options):
    pipeline = Pipeline("totals")
    events = pipeline.from_source(LogSource(logs, most=3, **options)).map(lambda e: (e.key, e.number), tuple[str, int])
    events.key_by(0).sum(1).sink_to(DeltaSink(str(table), mode="upsert", key="f0"))
    return pipeline


def rows(table):
    return sorted(tuple(row.values()) for row in DeltaTable(str(table)).to_pyarrow_table().to_pylist())


def test_a_job_that_begins_anew_decides_again_where_its_sources_end(run_streaming, logs, tmp_path):
    for end, expected in ((2, [("a", 1)]), (4, [("a", 6)])):
        run_streaming(totals(logs, tmp_path / str(end), until={"left": end}))
        assert rows(tmp_path / str(end)) == expected


def test_both_modes_give_the_same_and_one_goes_on_where_the_other_ended(run_on_spark, run_streaming, logs, tmp_path):
    run_on_spark(totals(logs, tmp_path / "batch"), {"execution.savepoint.path": str(tmp_path / "saved")})
    run_streaming(totals(logs, tmp_path / "stream"), {"execution.checkpointing.dir": str(tmp_path / "one")})
    assert rows(tmp_path / "batch") == rows(tmp_path / "stream") == [("a", 10), ("b", 303)]
    append(logs, "left", event(5), event(6, key="b"))
    run_streaming(
        totals(logs, tmp_path / "batch"),
        {
            "execution.state-recovery.path": str(tmp_path / "saved"),
            "execution.checkpointing.dir": str(tmp_path / "two"),
        },
    )
    assert rows(tmp_path / "batch") == [("a", 15), ("b", 309)]


def test_a_stream_that_begins_behind_its_bound_reads_nothing_and_keeps_its_position(logs, tmp_path):
    read = {"left": 4, "gone": 7}
    source = LogSource(logs, until={"left": 2, "right": 2}).after(OffsetsRead(f"logs in {logs}", read))
    range_ = source.stream_range(UPath(tmp_path))
    assert range_.end == {"left": 4, "gone": 7, "right": 2}
