"""Whole pipelines from a table into a table, in both modes, on Spark."""

from typing import NamedTuple

import pytest

from dagster_unified.api import Pipeline
from dagster_unified.connectors import PostgresConnection, PostgresSink, PostgresSource
from dagster_unified.connectors.sql.postgres.source import PostgresSplit
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.graph.options import Configuration
from dagster_unified.graph.plan import plan
from dagster_unified.operators.layout import PARTITION_INDEX
from dagster_unified.orchestration.partitions import slice_of
from tests.connectors.sql.postgres.test_sink import VALUES, Everything
from tests.connectors.sql.postgres.test_source import DAYS, Visit, visits
from tests.connectors.sql.support import execute, rows, staging_tables
from tests.support import MODES


class Order(NamedTuple):
    id: int
    shop: str
    amount: float


class Total(NamedTuple):
    shop: str
    amount: float


def add(a: Total, b: Total) -> Total:
    return Total(a.shop, a.amount + b.amount)


def total_of(order: Order) -> Total:
    return Total(order.shop, order.amount)


def totals(url, **source):
    built = Pipeline("totals")
    orders = built.from_source(PostgresSource("orders", Order, url, name="orders", follow="id", **source))
    summed = orders.map(total_of).key_by("shop").reduce(add)
    summed.sink_to(PostgresSink("totals", url, mode="upsert", key="shop"))
    return built


@pytest.fixture
def orders(postgres):
    execute(
        postgres,
        "CREATE TABLE orders (id bigserial PRIMARY KEY, shop text, amount float8)",
        "INSERT INTO orders (shop, amount) SELECT 'shop ' || n % 7, n FROM generate_series(1, 30000) n",
    )
    return postgres


def expected(url):
    return rows(url, "SELECT shop, sum(amount) FROM orders GROUP BY shop ORDER BY shop")


@pytest.mark.a_day(1)
@MODES
def test_a_table_is_summed_into_another_and_no_secret_is_in_files_or_logs(orders, run_in, mode, tmp_path, capfd):
    secret = PostgresConnection(orders, password="hidden-password")  # which this user needs not, and may give
    run_in[mode](totals(secret, max_records_per_trigger=20_000))
    assert rows(orders, "SELECT * FROM totals ORDER BY shop") == expected(orders)
    assert staging_tables(orders) == []
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert files
    assert not [file for file in files if b"hidden-password" in file.read_bytes()]
    assert not [text for text in capfd.readouterr() if "hidden-password" in text]


def test_every_type_goes_through_spark_both_ways(postgres, run_on_spark):
    written = Pipeline("written")
    written.from_collection(VALUES).sink_to(PostgresSink("everything", postgres))
    run_on_spark(written)
    copied = Pipeline("copied")
    copied.from_source(PostgresSource("everything", Everything, postgres)).sink_to(PostgresSink("again", postgres))
    run_on_spark(copied)
    source = PostgresSource("again", Everything, postgres)
    found = [record for batch in source.rows().to_batches() for record in source.records.from_batch(batch)]
    assert sorted(found, key=repr) == sorted(VALUES, key=repr)


def test_a_stream_goes_on_with_new_rows(orders, run_streaming):
    run_streaming(totals(orders))
    run_streaming(totals(orders))
    assert rows(orders, "SELECT * FROM totals ORDER BY shop") == expected(orders)


@pytest.mark.a_day(1)
@pytest.mark.parametrize("table", ["orders", "SELECT * FROM orders"])
def test_a_table_that_is_not_followed_is_read_once_in_a_stream(orders, run_streaming, table):
    built = Pipeline("totals")
    read = built.from_source(PostgresSource(table, Order, orders, name="orders"))
    read.map(total_of).key_by("shop").reduce(add).sink_to(PostgresSink("totals", orders, mode="upsert", key="shop"))
    assert run_streaming(built) == "finished"
    assert rows(orders, "SELECT * FROM totals ORDER BY shop") == expected(orders)


def test_several_partitions_are_read_and_written_at_once(postgres, spark, tmp_path):
    visits(postgres)
    source = PostgresSource("visits", Visit, postgres).partitioned_by("at")
    slices = [slice_of(DAYS, key) for key in ("2024-01-03", "2024-01-04")]
    frame = source.bounded_to(slices[0]).read_partitions(spark, [source.bounded_to(one) for one in slices])
    assert {(r[0], r[1]) for r in frame.groupBy(PARTITION_INDEX).count().collect()} == {(0, 24), (1, 24)}


def test_a_partition_that_runs_again_replaces_what_it_wrote(postgres, spark, tmp_path):
    visits(postgres)

    def run(execution, key):
        built = Pipeline("copied")
        source = PostgresSource("visits", Visit, postgres, name="visits").partitioned_by("at")
        built.from_source(source).sink_to(PostgresSink("copied", postgres, partition_column="day"))
        options = Configuration.of({"execution.runtime-mode": "BATCH"})
        part = slice_of(DAYS, key)
        run_of_day = plan(built.graph().bounded_to(part), options)
        run_all(Run(run_of_day, spark, IntermediateStore(str(tmp_path / "store")), execution, execution, part.name))

    run("1", "2024-01-02")
    run("2", "2024-01-03")
    execute(postgres, "DELETE FROM visits WHERE id % 2 = 0")
    run("3", "2024-01-02")
    assert rows(postgres, "SELECT day, count(*) FROM copied GROUP BY day ORDER BY day") == [
        ("2024-01-02", 12),
        ("2024-01-03", 24),
    ]


def test_no_secret_is_in_what_is_shown(postgres, spark):
    secret = PostgresConnection(f"{postgres}?application_name=hidden-option", password="hidden-password")
    built = totals(secret)
    for style in ("text", "mermaid", "json"):
        assert "hidden" not in built.explain(format=style, options={"execution.runtime-mode": "BATCH"})
    source = PostgresSource("visits", Visit, secret)
    assert "hidden" not in repr(PostgresSplit("SELECT 1", "table visits")) + repr(vars(source))
