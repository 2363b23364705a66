"""Asset checks: each passes where it should, and fails where something is wrong.

Those of sinks, and that of partitions whose carried state begins where another run has ended since.
"""

import shutil
from datetime import datetime, timedelta, timezone
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from dagster import (
    AssetKey,
    AssetObservation,
    BackfillPolicy,
    DagsterInstance,
    DailyPartitionsDefinition,
    Definitions,
    MetadataValue,
    asset,
    define_asset_job,
)
from deltalake import write_deltalake

from dagster_unified.api import Pipeline
from dagster_unified.connectors import CsvSource, DatabaseSink, DeltaSink, FileSink
from dagster_unified.engine.comparison import compare
from dagster_unified.errors import ConfigurationError
from dagster_unified.orchestration import (
    BatchDeployment,
    Checks,
    Parity,
    StreamingDeployment,
    unified_definitions,
)
from dagster_unified.orchestration.checks import stale_partitions
from dagster_unified.orchestration.metadata import CARRIED_FROM, MADE_BY
from dagster_unified.orchestration.partitions import slice_of
from dagster_unified.orchestration.streaming import UPDATED
from tests.orchestration.support import resources

SINK = AssetKey(["sales", "totals"])


class Sale(NamedTuple):
    shop: str
    at: datetime
    amount: int


def live(folder, monitor=True):
    """Sales of files that appear, by shop and day."""
    pipeline = Pipeline("sales")
    source = CsvSource(str(folder / "in"), Sale, name="sales", monitor=monitor)
    sales = pipeline.from_source(source.partitioned_by("at"))
    days = sales.map(lambda s: Sale(s.shop, s.at.replace(hour=0), s.amount), output_type=Sale)
    added = days.key_by("shop", "at").reduce(lambda a, b: Sale(a.shop, a.at, a.amount + b.amount))
    added.sink_to(DeltaSink(str(folder / "totals"), name="totals", mode="upsert", key=("shop", "at")))
    return pipeline


@pytest.fixture
def check(spark, tmp_path, run_streaming):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.csv").write_text(
        "shop,at,amount\na,2024-01-01T10:00:00Z,1\na,2024-01-01T11:00:00Z,2\nb,2024-01-02T10:00:00Z,4\n"
    )
    with DagsterInstance.ephemeral() as instance:

        def run(checks, *observed):
            """Whether each check passed, and what it says."""
            for event in observed:
                instance.report_runless_asset_event(event)
            definitions = unified_definitions(
                StreamingDeployment(live(tmp_path), checks=checks), resources=resources(tmp_path)
            )
            result = definitions.resolve_job_def("sales_checks").execute_in_process(instance=instance)
            return {e.check_name: (e.passed, e.description) for e in result.get_asset_check_evaluations()}

        yield run


DAY = slice_of(DailyPartitionsDefinition("2024-01-01"), "2024-01-01")
FIRST = Parity(lambda: DAY, lambda part: (pc.field("at") >= part.time().start) & (pc.field("at") < part.time().end))


def test_a_sound_table_passes(check, tmp_path, run_streaming):
    run_streaming(live(tmp_path, monitor=False))  # its input ends, so that the test does
    found = check(Checks(parity=FIRST))
    assert {name: passed for name, (passed, _) in found.items()} == {
        "totals_schema": True,
        "totals_unique_keys": True,
        "totals_parity": True,
    }
    assert found["totals_parity"][1] == "0 rows differ: 1 by BATCH, 1 in the table"


def test_what_is_wrong_is_told(check, tmp_path, run_streaming):
    run_streaming(live(tmp_path, monitor=False))  # its input ends, so that the test does
    at = datetime(2024, 1, 1, tzinfo=timezone.utc)
    schema = pa.schema([("shop", pa.string()), ("at", pa.timestamp("us", "UTC")), ("amount", pa.int64())])
    write_deltalake(
        str(tmp_path / "totals"),
        pa.Table.from_pylist([{"shop": "a", "at": at, "amount": 7}, {"shop": "c", "at": at, "amount": 1}], schema),
        mode="append",
    )
    found = check(Checks(parity=FIRST))
    assert found["totals_unique_keys"] == (False, "1 keys are there more than once")
    assert found["totals_parity"] == (False, "2 rows differ: 1 by BATCH, 3 in the table")


def test_another_schema_is_told(check, tmp_path):
    write_deltalake(str(tmp_path / "totals"), pa.table({"shop": ["a"], "at": ["soon"]}))
    found = check(Checks(unique_keys=False))
    assert found == {
        "totals_schema": (False, "'at' is string, and should be timestamp; 'amount' is missing, and should be bigint")
    }


def test_a_table_that_is_not_there_is_told(check):
    found = check(Checks(parity=FIRST))
    assert set(found) == {"totals_schema", "totals_unique_keys", "totals_parity"}
    for passed, description in found.values():
        assert not passed
        assert description.startswith("sales: sink 'totals' (Delta table ")
        assert "nothing is there yet" in description


class Item(NamedTuple):
    code: str
    day: str
    note: str | None
    took: timedelta


@pytest.fixture
def stock(spark, tmp_path):
    """Runs a pipeline in BATCH that writes CSV, and an asset behind it; gives the checks and whether the asset ran."""

    @asset(deps=[AssetKey(["stock", "items"])])
    def report() -> None: ...

    with DagsterInstance.ephemeral() as instance:

        def run(checks, *items):
            pipeline = Pipeline("stock")
            given = pipeline.from_collection(items, Item, "given")
            given.sink_to(FileSink(str(tmp_path / "items"), "items", format="csv"))
            definitions = Definitions.merge(
                unified_definitions(BatchDeployment(pipeline, checks=checks), resources=resources(tmp_path)),
                Definitions(assets=[report], jobs=[define_asset_job("all")]),
            )
            result = definitions.resolve_job_def("all").execute_in_process(instance=instance, raise_on_error=False)
            found = {e.check_name: (e.passed, e.description) for e in result.get_asset_check_evaluations()}
            return found, bool(result.asset_materializations_for_node("report"))

        yield run


SEVEN = Item("07", "2024-01-01", None, timedelta(seconds=90))


def test_columns_of_csv_are_as_declared_whatever_their_values_look_like(stock):
    found, ran = stock(Checks(blocking=True), SEVEN, Item("7", "no day", 'two\nlines and "', timedelta(days=2)))
    assert found == {"items_schema": (True, "as declared")}
    assert ran
    found, ran = stock(Checks(blocking=True))
    assert found == {"items_schema": (True, "as declared")}


def test_a_row_count_that_collapses_stops_what_comes_after_it(stock):
    checks = Checks(schema=False, rows_within=0.5, blocking=True, fresh_within=timedelta(hours=1))
    for _ in range(2):
        found, ran = stock(checks, *[SEVEN] * 100)
        assert (found["row_count"][0], found["freshness_check"][0], ran) == (True, True, True)
    found, ran = stock(checks, *[SEVEN] * 10)
    assert found["row_count"] == (False, "10 rows, and 100 in the median of the 2 before")
    assert not ran


def test_each_partition_of_a_range_is_judged_by_those_that_were_there_before(spark, tmp_path):
    (tmp_path / "in").mkdir()
    rows = dict.fromkeys(range(1, 7), 10) | {5: 1}
    lines = [f"a,2024-01-{day:02d}T10:00:00Z,1" for day, n in rows.items() for _ in range(n)]
    (tmp_path / "in" / "1.csv").write_text("\n".join(["shop,at,amount", *lines, ""]))
    pipeline = Pipeline("sales")
    sales = pipeline.from_source(CsvSource(str(tmp_path / "in"), Sale, name="given").partitioned_by("at"))
    sales.sink_to(DeltaSink(str(tmp_path / "totals"), name="totals"))
    deployed = BatchDeployment(
        pipeline,
        partitions=DailyPartitionsDefinition("2024-01-01"),
        backfill_policy=BackfillPolicy.single_run(),
        checks=Checks(schema=False, rows_within=0.2),
    )
    job = unified_definitions(deployed, resources=resources(tmp_path)).resolve_job_def("sales_batch")
    with DagsterInstance.ephemeral() as instance:

        def run(first, last):
            tags = {"dagster/asset_partition_range_start": first, "dagster/asset_partition_range_end": last}
            (found,) = job.execute_in_process(instance=instance, tags=tags).get_asset_check_evaluations()
            return found.passed, found.description

        assert run("2024-01-01", "2024-01-03") == (True, "there is no history yet")
        expected = (False, "1 rows in partition 2024-01-05, and 10 in the median of the 3 before")
        assert run("2024-01-04", "2024-01-06") == expected


def test_a_table_without_its_key_has_no_unique_keys(check, tmp_path):
    write_deltalake(str(tmp_path / "totals"), pa.table({"n": [1]}))
    assert check(Checks(schema=False)) == {"totals_unique_keys": (False, "the table has no column 'shop'")}


def test_a_stream_is_fresh_while_rows_come(check, tmp_path):
    write_deltalake(str(tmp_path / "totals"), pa.table({"shop": ["a"]}))
    checks = Checks(schema=False, unique_keys=False, fresh_within=timedelta(hours=1))
    for ago, fresh in ((30, True), (90, False)):
        at = datetime.now(timezone.utc) - timedelta(minutes=ago)
        found = check(checks, AssetObservation(SINK, metadata={UPDATED: MetadataValue.timestamp(at)}))
        assert found["freshness_check"][0] is fresh


def test_tables_compare_by_key_or_as_bags():
    ours, theirs = pa.table({"k": ["a", "b", "b"], "n": [1, 2, 2]}), pa.table({"k": ["a", "b", "c"], "n": [1, 2, 2]})
    bag = compare(ours, theirs)
    assert [(d.batch, d.table) for d in bag.first] == [("k='b', n=2", None), (None, "k='c', n=2")]
    keyed = compare(pa.table({"k": ["a", "b"], "n": [1, 2]}), pa.table({"k": ["a", "b"], "n": [1, 3]}), ["k"])
    assert [(d.key, d.batch, d.table) for d in keyed.first] == [("k='b'", "k='b', n=2", "k='b', n=3")]
    assert compare(ours, theirs, limit=1).different == 2


def test_checks_that_cannot_be_are_errors():
    with pytest.raises(ConfigurationError, match=r"rows_within is a number such as 0.5, not negative"):
        Checks(rows_within=-1)
    with pytest.raises(ConfigurationError, match="history must be at least 1"):
        Checks(history=0)
    pipeline = Pipeline("sales")
    pipeline.from_source(CsvSource("in", Sale)).sink_to(DatabaseSink("out", "sqlite:///out.db"))
    with pytest.raises(ConfigurationError, match="sales: parity compares the tables of a DeltaSink or a FileSink, and"):
        unified_definitions(BatchDeployment(pipeline, checks=Checks(parity=Parity())))
    pipeline = Pipeline("sales")
    pipeline.from_source(CsvSource("in", Sale, monitor=True)).sink_to(DeltaSink("out"))
    with pytest.raises(ConfigurationError, match="sales: rows_within compares the row counts of runs in BATCH"):
        unified_definitions(StreamingDeployment(pipeline, checks=Checks(rows_within=0.5)))


DAYS = [f"2013-03-0{d}" for d in range(1, 6)]


@pytest.fixture
def run(spark, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "sales.csv").write_text(
        "shop,at,amount\n" + "".join(f"north,{day}T12:00:00Z,{i}\n" for i, day in enumerate(DAYS))
    )
    pipeline = Pipeline("sales")
    sales = pipeline.from_source(CsvSource(str(tmp_path / "in"), Sale, name="incoming").partitioned_by("at"))
    sales.key_by("shop").reduce(lambda a, b: Sale(a.shop, b.at, a.amount + b.amount)).name("totals").sink_to(
        DeltaSink(str(tmp_path / "table"), mode="append")
    )
    daily = DailyPartitionsDefinition(DAYS[0], end_date="2013-03-06")
    job = unified_definitions(
        BatchDeployment(pipeline, retry_policy=None, partitions=daily, carry_state=True), resources=resources(tmp_path)
    ).resolve_job_def("sales_batch")
    with DagsterInstance.ephemeral() as instance:

        def go(first, last=None):
            """Runs a range of days; gives what the check of the stage with state says."""
            days = {"dagster/asset_partition_range_start": first, "dagster/asset_partition_range_end": last or first}
            result = job.execute_in_process(instance=instance, tags=days)
            (found,) = result.get_asset_check_evaluations()
            assert found.asset_key == AssetKey(["sales", "table_stage"])
            return found.passed, found.description

        go.folder = tmp_path
        yield go


def test_days_after_one_that_has_run_again_are_stale_until_a_backfill_has_made_them_again(run):
    follows = (True, "every partition goes on from the one before it")
    assert run(DAYS[0], DAYS[3]) == follows
    assert run(DAYS[1]) == (
        False,
        "2013-03-03 to 2013-03-04 went on from a state that has been replaced since: run a backfill over them",
    )
    assert run(DAYS[4]) == (
        False,
        "2013-03-03 to 2013-03-05 went on from a state that has been replaced since: run a backfill over them",
    )
    assert run(DAYS[2], DAYS[3]) == (
        False,
        "2013-03-05 went on from a state that has been replaced since: run a backfill over it",
    )
    assert run(DAYS[4]) == follows


def test_days_are_stale_also_where_the_janitor_has_freed_what_they_were_made_of(run):
    run(DAYS[0], DAYS[3])
    for partition in (run.folder / "store" / "sales" / "table").iterdir():
        if DAYS[3] not in partition.name:
            shutil.rmtree(partition)
    assert run(DAYS[0]) == (
        False,
        "2013-03-02 to 2013-03-04 went on from a state that has been replaced since: run a backfill over them",
    )


def test_a_day_that_was_the_first_is_stale_once_there_is_one_before_it():
    made = {MADE_BY: MetadataValue.dagster_run("a")}
    shown = {DAYS[1]: made, DAYS[2]: {**made, CARRIED_FROM: MetadataValue.dagster_run("a")}}
    assert stale_partitions(DAYS, shown) == []
    assert stale_partitions(DAYS, {DAYS[0]: {MADE_BY: MetadataValue.dagster_run("b")}, **shown}) == DAYS[1:3]
    assert stale_partitions(DAYS, {DAYS[0]: {}, DAYS[1]: {}}) == []  # of a stage without state
