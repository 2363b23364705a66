"""What a source reads of a real database: types, snapshots, splits, partitions, and new rows while others commit."""

import json
import re
import signal
import threading
import time
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import NamedTuple

import psycopg
import pytest
from dagster import DailyPartitionsDefinition
from pyspark import cloudpickle

from dagster_unified.api import Pipeline
from dagster_unified.connectors.protocol.frame import Malformed
from dagster_unified.connectors.protocol.positions import OffsetsRead, Range
from dagster_unified.connectors.protocol.source import read_here
from dagster_unified.connectors.protocol.split_reader import _StreamReader
from dagster_unified.connectors.sql.postgres import PostgresConnection, PostgresSink, PostgresSource
from dagster_unified.connectors.sql.postgres import source as postgres_source
from dagster_unified.connectors.sql.postgres.source import PostgresSplit
from dagster_unified.errors import (
    ConfigurationError,
    PipelineError,
    SourceError,
    UnavailableError,
    UnsupportedError,
)
from dagster_unified.graph.connectors import TimeRange
from dagster_unified.orchestration.partitions import slice_of
from tests.connectors.sql.postgres.test_sink import VALUES, Everything
from tests.connectors.sql.support import everything, execute, planned, read, rows
from tests.connectors.support import write

UTC = timezone.utc
DAYS = DailyPartitionsDefinition("2024-01-01")


class Order(NamedTuple):
    id: int
    shop: str


def orders(url, count, partitioned=False):
    by = " PARTITION BY HASH (id)" if partitioned else ""
    execute(url, f"CREATE TABLE orders (id bigint NOT NULL, shop text){by}")
    if partitioned:
        execute(
            url,
            *[f"CREATE TABLE part{n} PARTITION OF orders FOR VALUES WITH (MODULUS 3, REMAINDER {n})" for n in range(3)],
        )
    execute(url, f"INSERT INTO orders SELECT n, 'shop ' || n FROM generate_series(1, {count}) n")


@pytest.mark.parametrize("copies", [1, 400])
def test_what_a_sink_has_written_comes_back(postgres, copies):
    write(PostgresSink("everything", postgres), VALUES * copies)
    assert everything(PostgresSource("everything", Everything, postgres)) == VALUES * copies


class Colour(Enum):
    RED = "red"


class Point(NamedTuple):
    x: int
    label: str


class Loose(NamedTuple):
    id: str
    colour: Colour
    small: int
    real: float
    price: Decimal
    whole: Decimal
    doc: str
    point: Point
    map: dict[str, int]
    tags: list[str]
    prices: list[Decimal]
    at: datetime
    took: timedelta
    day: date


def test_fields_are_read_from_columns_of_other_types(postgres):
    execute(
        postgres,
        "CREATE TYPE colour AS ENUM ('red')",
        "CREATE TYPE point2 AS (x int, label text)",
        "CREATE TABLE loose (id uuid, colour colour, small smallint, real numeric, price numeric(10,2), whole int,"
        " doc jsonb, point point2, map json, tags varchar(3)[], prices numeric[], at timestamp,"
        " took interval, day date)",
        "INSERT INTO loose VALUES ('2f1c8a52-0000-4000-8000-000000000001', 'red', 7, 1.5, 2.25, 3, '{\"a\": 1}',"
        " ROW(1, 'x'), '{\"k\": 2}', '{a,b}', '{1.5,2}', '2024-01-01 12:00', '1 day 1 second', '2024-01-01')",
    )
    assert everything(PostgresSource("loose", Loose, postgres)) == [
        Loose(
            "2f1c8a52-0000-4000-8000-000000000001", Colour.RED, 7, 1.5, Decimal("2.25"), Decimal(3), '{"a": 1}',
            Point(1, "x"), {"k": 2}, ["a", "b"], [Decimal("1.5"), Decimal(2)],
            datetime(2024, 1, 1, 12, tzinfo=UTC), timedelta(days=1, seconds=1), date(2024, 1, 1),
        )
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ("identity int8, shop text", "has no column 'id'; did you mean 'identity'|has no column 'id'"),
        ("id text, shop text", "column 'id' of table orders is text, and cannot be read as the field's int8"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_before_anything_is_read(postgres, made, says):
    execute(postgres, f"CREATE TABLE orders ({made})")
    with pytest.raises(SourceError, match=says):
        planned(PostgresSource("orders", Order, postgres))


def test_what_cannot_be_read_is_one_sentence(postgres, postgres_server):
    with pytest.raises(SourceError, match=r"source 'orders': .*relation \"orders\" does not exist; check"):
        planned(PostgresSource("orders", Order, postgres))
    with pytest.raises(UnavailableError, match="source 'orders'"):
        planned(PostgresSource("orders", Order, "postgresql://127.0.0.1:1/shop"))
    execute(postgres, "CREATE TABLE orders (id int8, shop text)", "CREATE ROLE nobody LOGIN PASSWORD 'right'")
    try:
        database = postgres.rsplit("/", 1)[1]
        nobody = PostgresConnection(f"postgresql://nobody:right@127.0.0.1:{postgres_server.port}/{database}")
        with pytest.raises(
            ConfigurationError, match='permission denied for table orders; GRANT SELECT ON TABLE orders TO "nobody"'
        ):
            planned(PostgresSource("orders", Order, nobody))
    finally:
        execute(postgres, "DROP ROLE nobody")


@pytest.mark.parametrize("partitioned", [False, True])
def test_all_splits_read_one_snapshot(postgres, partitioned):
    orders(postgres, 50_000, partitioned)
    source = PostgresSource("orders", Order, postgres, parallelism=4)
    splits = planned(source)
    assert len(splits) >= 3
    execute(
        postgres,
        "DELETE FROM orders WHERE id % 2 = 0",
        "UPDATE orders SET shop = 'changed'",
        "INSERT INTO orders SELECT n, 'new' FROM generate_series(60000, 90000) n",
    )
    found = read(source, splits)
    assert sorted(found) == [Order(n, f"shop {n}") for n in range(1, 50_001)]


def test_a_query_is_read_in_ranges_of_a_column(postgres):
    orders(postgres, 1000)
    execute(postgres, "ALTER TABLE orders ALTER id DROP NOT NULL", "INSERT INTO orders VALUES (NULL, 'none')")
    query = "SELECT coalesce(id, 0) AS id, shop FROM orders WHERE id > 10 OR id IS NULL;"
    source = PostgresSource(query, Order, postgres, split_by="id", parallelism=3)
    assert len(planned(source)) == 4
    assert sorted(everything(source)) == [Order(0, "none"), *(Order(n, f"shop {n}") for n in range(11, 1001))]


@pytest.mark.parametrize("kind", ["empty", "view", "materialized"])
def test_anything_that_can_be_asked_is_read(postgres, kind):
    orders(postgres, 0 if kind == "empty" else 10)
    if kind != "empty":
        execute(postgres, f"CREATE {'MATERIALIZED ' * (kind == 'materialized')}VIEW seen AS SELECT * FROM orders")
    table = "orders" if kind == "empty" else "seen"
    assert len(everything(PostgresSource(table, Order, postgres))) == (0 if kind == "empty" else 10)


def test_a_snapshot_that_is_gone_is_transient(postgres, postgres_server):
    orders(postgres, 10)
    source = PostgresSource("orders", Order, postgres)
    splits = planned(source)
    postgres_server.restart()
    with pytest.raises(UnavailableError, match="the snapshot that the run reads is gone"):
        read(source, splits)
    assert len(everything(source)) == 10


def test_a_snapshot_is_let_go_when_nobody_reads_it_any_more(postgres, monkeypatch):
    monkeypatch.setattr(postgres_source, "_LOOK_SECONDS", 0.05)
    orders(postgres, 10)
    source = PostgresSource("orders", Order, postgres)
    (split,) = planned(source)

    def held():
        with psycopg.connect(postgres) as client:
            # in a transaction, whether idle or looking at that moment who reads
            return client.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE xact_start IS NOT NULL AND datname = current_database()"
                " AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
            ).fetchone()[0]

    reading = source.read_split(split)
    next(reading)
    monkeypatch.setattr(postgres_source, "_LINGER_SECONDS", 0.3)
    time.sleep(1)
    assert held() == 2  # the reader and the snapshot
    reading.close()
    deadline = time.monotonic() + 20
    while held() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert held() == 0


class Priced(NamedTuple):
    id: int
    price: Decimal


def test_rows_that_do_not_fit_are_told_apart(postgres):
    execute(
        postgres,
        "CREATE TABLE priced (id int8, price numeric)",
        "INSERT INTO priced VALUES (1, 1.5), (2, 'NaN'), (3, NULL), (4, 0.1234567890123456789), (5, 2)",
    )
    found = everything(PostgresSource("priced", Priced, postgres, on_malformed="divert"))
    assert [row for row in found if isinstance(row, Priced)] == [Priced(1, Decimal("1.5")), Priced(5, Decimal(2))]
    bad = [row for row in found if isinstance(row, Malformed)]
    assert [(row.place, row.content) for row in bad] == [
        ("table priced", '{"id":2,"price":"NaN"}'),
        ("table priced", '{"id":3,"price":null}'),
        ("table priced", '{"id":4,"price":"0.1234567890123456789"}'),
    ]
    assert "field 'price': it is null" in bad[1].reason


class Measured(NamedTuple):
    id: int
    real: float | None
    reals: list[float] | None = None
    more: dict[str, str] | None = None


def test_rows_that_the_server_cannot_cast_are_told_apart(postgres):
    execute(
        postgres,
        "CREATE TABLE measured (id int8, real numeric, reals numeric[], more json)",
        "INSERT INTO measured VALUES (1, 1.5, '{1,2}', '{}'), (2, 1e400, NULL, NULL), (3, -1e400, NULL, NULL),"
        " (4, 1e-400, NULL, NULL), (5, 'NaN', NULL, NULL), (6, 1.7976931348623157e308, NULL, NULL),"
        " (7, 1, '{1,1e400}', NULL), (8, NULL, '{}', NULL), (9, 1, '{{1,2},{3,4}}', NULL),"
        r""" (10, 1, NULL, '{"a": "\ud83d"}'), (11, 1, NULL, '{"a": 1e999999}'), (12, 1, NULL, '{"a": "\u0041"}')""",
    )
    found = everything(PostgresSource("measured", Measured, postgres, on_malformed="divert"))
    assert repr([tuple(row) for row in found if isinstance(row, Measured)]) == repr(
        [
            (1, 1.5, [1.0, 2.0], {}),
            (4, 0.0, None, None),
            (5, float("nan"), None, None),
            (6, 1.7976931348623157e308, None, None),
            (8, None, [], None),
            (12, 1.0, None, {"a": "A"}),
        ]
    )
    reasons = {json.loads(row.content)["id"]: row.reason for row in found if isinstance(row, Malformed)}
    assert set(reasons) == {2, 3, 7, 9, 10, 11}
    assert (
        reasons[2]
        == f"field 'real': it has 1{'0' * 99}, which a float cannot hold; declare a Decimal, or cast it in a query"
    )
    assert reasons[3].startswith("field 'real': it has -10000")
    assert reasons[7].startswith("field 'reals': it has {1,1000")
    assert reasons[9] == "field 'reals': it is an array of several dimensions; declare a list of lists"
    assert reasons[10].startswith("field 'more': ")
    assert reasons[11].startswith("field 'more': ")


def test_a_table_can_be_dropped_when_it_has_been_read(postgres, run_on_spark):
    orders(postgres, 10)
    pipeline = Pipeline("orders")
    pipeline.from_source(PostgresSource("orders", Order, postgres, name="orders")).print()
    run_on_spark(pipeline)
    execute(postgres, "SET lock_timeout = '5s'; DROP TABLE orders")


def test_a_table_can_be_truncated_only_when_it_has_been_read(postgres):
    orders(postgres, 10)
    source = PostgresSource("orders", Order, postgres)
    with read_here():
        splits = planned(source)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            execute(postgres, "SET lock_timeout = '100ms'; TRUNCATE orders")
        assert len(read(source, splits)) == 10
    execute(postgres, "SET lock_timeout = '5s'; TRUNCATE orders")


def test_a_micro_batch_lets_its_snapshot_go_when_it_is_committed(postgres):
    orders(postgres, 10)
    source = PostgresSource("orders", Order, postgres)
    reader = _StreamReader(source, Range({"rows": 0}, {"rows": 1}))
    (split,) = reader.partitions({"rows": 0}, {"rows": 1})
    cloudpickle.loads(cloudpickle.dumps(reader))  # as it goes to workers
    with pytest.raises(psycopg.errors.LockNotAvailable):
        execute(postgres, "SET lock_timeout = '100ms'; DROP TABLE orders")
    assert sum(batch.num_rows for batch in reader.read(split)) == 10
    reader.commit({"rows": 1})
    execute(postgres, "SET lock_timeout = '5s'; DROP TABLE orders")


class Visit(NamedTuple):
    id: int
    at: datetime


def visits(url):
    execute(
        url,
        "CREATE TABLE visits (id bigserial, at timestamptz)",
        "INSERT INTO visits (at)"
        " SELECT timestamptz '2024-01-01Z' + n * interval '1 hour' FROM generate_series(0, 239) n",
    )


def test_a_partition_of_the_field_that_is_followed_is_its_window(postgres):
    visits(postgres)
    by_time = PostgresSource("visits", Visit, postgres, follow="at").bounded_to(slice_of(DAYS, "2024-01-05"))
    assert {visit.at.date() for visit in everything(by_time)} == {date(2024, 1, 5)}


def test_a_stream_reads_what_comes_after_a_batch_run(postgres):
    orders(postgres, 100)
    source = PostgresSource("orders", Order, postgres, follow="id")
    position = source.batch_position(None)
    assert isinstance(position, OffsetsRead)
    assert len(everything(source)) == 100
    execute(postgres, "INSERT INTO orders VALUES (101, 'new'), (102, 'new')")
    after = source.after(position)
    assert [order.id for order in everything(after)] == [101, 102]
    start = position.offsets
    assert [order.id for order in read(source, source.splits(start, source.available(start)))] == [101, 102]


def test_a_table_without_a_column_to_follow_has_no_position(postgres):
    orders(postgres, 1)
    with pytest.raises(UnsupportedError, match="cannot tell what has been read"):
        PostgresSource("orders", Order, postgres).batch_position(None)


def test_a_micro_batch_is_limited(postgres):
    orders(postgres, 100)
    source = PostgresSource("orders", Order, postgres, follow="id", max_records_per_trigger=30)
    start, sizes = dict(source.oldest()), []
    while (end := source.limited(start, source.available(start))) != start:
        sizes.append(len(read(source, source.splits(start, end))))
        start = dict(end)
    assert sizes == [30, 30, 30, 10]


def test_rows_that_are_deleted_after_they_were_read_do_not_end_a_stream(postgres):
    orders(postgres, 100)
    source = PostgresSource("orders", Order, postgres, follow="id")
    start = source.available(source.oldest())
    execute(postgres, "DELETE FROM orders WHERE id > 50")
    assert source.available(start) == start
    execute(postgres, "INSERT INTO orders VALUES (101, 'new')")
    assert [o.id for o in read(source, source.splits(start, source.available(start)))] == [101]


@pytest.mark.parametrize(
    "again",
    [
        ["TRUNCATE orders RESTART IDENTITY"],
        ["DROP TABLE orders", "CREATE TABLE orders (id bigserial PRIMARY KEY, shop text NOT NULL)"],
    ],
)
def test_a_table_whose_numbers_begin_again_is_an_error(postgres, again):
    execute(
        postgres,
        "CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY, shop text NOT NULL)",
        "INSERT INTO orders (shop) SELECT 'old' FROM generate_series(1, 100)",
    )
    source = PostgresSource("orders", Order, postgres, follow="id")
    start = source.available(source.oldest())
    execute(postgres, *again)
    assert source.available(start) == start
    execute(postgres, "INSERT INTO orders (shop) VALUES ('new')")
    with pytest.raises(SourceError, match="was read up to id 100, and its sequence has given numbers up to 1 only"):
        source.available(start)
    assert [order.shop for order in everything(source)] == ["new"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("ALTER TABLE orders RENAME COLUMN shop TO store", "table orders has no column 'shop'; the record has a field"),
        (
            "ALTER TABLE orders ALTER shop TYPE bytea USING NULL",
            "column 'shop' of table orders is bytea, and cannot be",
        ),
        ("DROP TABLE orders", 'relation "orders" does not exist; check the name'),
    ],
)
def test_a_schema_that_changes_under_a_stream_is_one_sentence(postgres, change, says):
    orders(postgres, 10)
    source = PostgresSource("orders", Order, postgres, follow="id")
    start, end = source.oldest(), source.available(source.oldest())
    planned_before = source.splits(start, end)
    execute(postgres, change)
    with pytest.raises(SourceError, match=f"^source 'orders': .*{re.escape(says)}"):
        source.splits(start, end)
    if "bytea" not in change:
        with pytest.raises(SourceError, match=r"^source 'orders': .* does not exist"):
            read(source, planned_before)


def test_a_server_that_goes_away_under_a_stream_is_transient_and_nothing_is_left_out(postgres, postgres_server):
    execute(
        postgres,
        "CREATE TABLE orders (id bigint NOT NULL, shop text)",
        "INSERT INTO orders SELECT n, repeat('x', 200) FROM generate_series(1, 150000) n",  # more than is fetched ahead
    )
    source = PostgresSource("orders", Order, postgres, follow="id", parallelism=1)
    start, end = source.oldest(), source.available(source.oldest())
    (split,) = source.splits(start, end)
    reading = source.read_split(split)
    next(reading)
    postgres_server.stop(signal.SIGKILL)
    try:
        for asked in (
            lambda: list(reading),
            lambda: list(source.read_split(split)),
            lambda: source.available(start),
            lambda: source.splits(start, end),
        ):
            with pytest.raises(
                UnavailableError, match=r"^source 'orders': postgresql://.* does not answer .*reachable"
            ):
                asked()
    finally:
        postgres_server.start()
    assert sorted(order.id for order in read(source, source.splits(start, end))) == list(range(1, 150_001))


@pytest.mark.parametrize(
    ("options", "shop", "kind", "says"),
    [
        ("", "(1 / (150000 - n))::text", SourceError, "refuses it: division by zero"),
        ("?options=-cstatement_timeout=300", "CASE n WHEN 150000 THEN pg_sleep(20)::text END", UnavailableError,
         r"cannot do it now \(canceling statement due to statement timeout\)"),
    ],
)  # fmt: skip
def test_what_the_server_says_while_rows_are_read_is_one_sentence(postgres, options, shop, kind, says):
    source = PostgresSource("orders", Order, postgres + options)
    statement = f"SELECT n::int8 AS id, {shop} AS shop FROM generate_series(1, 300000) n"
    with pytest.raises(kind, match=f"^source 'orders': postgresql://.* {says}"):
        read(source, [PostgresSplit(statement, "table orders")])


def test_a_transaction_that_took_its_number_first_and_commits_last_is_waited_for(postgres):
    execute(postgres, "CREATE TABLE orders (id bigserial PRIMARY KEY, shop text NOT NULL)")
    source = PostgresSource("orders", Order, postgres, follow="id")
    start = source.oldest()
    with psycopg.connect(postgres) as slow:
        slow.execute("INSERT INTO orders (shop) VALUES ('slow')")
        execute(postgres, "INSERT INTO orders (shop) VALUES ('quick')")
        threading.Timer(0.5, slow.commit).start()
        end = source.available(start)
    assert [order.shop for order in read(source, source.splits(start, end))] == ["slow", "quick"]


def test_it_is_waited_for_as_long_as_the_lag(postgres):
    execute(postgres, "CREATE TABLE orders (id bigserial PRIMARY KEY, shop text NOT NULL)")
    source = PostgresSource("orders", Order, postgres, follow="id", lag=timedelta(seconds=0.3))
    with psycopg.connect(postgres) as slow:
        slow.execute("INSERT INTO orders (shop) VALUES ('slow')")
        execute(postgres, "INSERT INTO orders (shop) VALUES ('quick')")
        began = time.monotonic()
        assert source.newest() == {"rows": 3}
        assert time.monotonic() - began < 10


def test_many_who_commit_at_once_lose_nothing_to_a_stream(postgres):
    execute(postgres, "CREATE TABLE orders (id bigserial PRIMARY KEY, shop text NOT NULL)")
    done = threading.Event()

    def writes(name):
        with psycopg.connect(postgres) as client:
            number = 0
            while not done.is_set():
                for _ in range(number % 4 + 1):
                    client.execute("INSERT INTO orders (shop) VALUES (%s)", (name,))
                time.sleep(number % 3 * 0.01)
                client.commit()
                number += 1

    writers = [threading.Thread(target=writes, args=(f"writer {n}",)) for n in range(4)]
    [writer.start() for writer in writers]
    source = PostgresSource("orders", Order, postgres, follow="id")
    start, found, deadline = dict(source.oldest()), [], time.monotonic() + 4
    while time.monotonic() < deadline:
        end = source.available(start)
        found += [order.id for order in read(source, source.splits(start, end))]
        start = dict(end)
    done.set()
    [writer.join() for writer in writers]
    end = source.available(start)
    found += [order.id for order in read(source, source.splits(start, end))]
    with psycopg.connect(postgres) as client:
        committed = [row[0] for row in client.execute("SELECT id FROM orders ORDER BY id").fetchall()]
    assert sorted(found) == committed


def test_times_are_followed_once_they_are_old_enough(postgres):
    execute(
        postgres,
        "CREATE TABLE visits (id bigserial, at timestamptz DEFAULT now())",
        "INSERT INTO visits DEFAULT VALUES",
    )
    young = PostgresSource("visits", Visit, postgres, follow="at", lag=timedelta(hours=1))
    assert young.splits(young.oldest(), young.available(young.oldest())) == []
    old = PostgresSource("visits", Visit, postgres, follow="at", lag=timedelta(0))
    assert len(read(old, old.splits(old.oldest(), old.available(old.oldest())))) == 1


@pytest.mark.parametrize("most", [None, 1])
def test_times_without_a_zone_are_followed_whatever_the_zone_of_the_server(postgres, most):
    database = postgres.rsplit("/", 1)[1]
    execute(
        postgres,
        f"ALTER DATABASE \"{database}\" SET timezone = 'Europe/Berlin'",
        "CREATE TABLE visits (id bigint, at timestamp)",
        "INSERT INTO visits SELECT n, timestamp '2024-01-01' + n * interval '20 minutes' FROM generate_series(1, 9) n",
    )
    source = PostgresSource("visits", Visit, postgres, follow="at", max_records_per_trigger=most)
    start, found = dict(source.oldest()), []
    while (end := source.limited(start, source.available(start))) != start:
        found += [visit.id for visit in read(source, source.splits(start, end))]
        start = dict(end)
    assert sorted(found) == list(range(1, 10))
    now = datetime.now(UTC).replace(tzinfo=None)
    execute(postgres, f"INSERT INTO visits VALUES (10, '{now - timedelta(minutes=1)}'), (11, '{now}')")
    assert [visit.id for visit in read(source, source.splits(start, source.available(start)))] == [10]


def test_a_number_is_waited_for_whose_transaction_has_none_yet(postgres):
    execute(
        postgres,
        "CREATE TABLE orders (id bigserial PRIMARY KEY, shop text NOT NULL)",
        "INSERT INTO orders (shop) VALUES ('first')",  # only the first of 32 numbers gives its transaction a number
        "CREATE FUNCTION slow() RETURNS text LANGUAGE sql AS $$ SELECT 'slow' FROM pg_sleep(1.5) $$",
    )
    source = PostgresSource("orders", Order, postgres, follow="id")
    start = source.available(source.oldest())
    query = "INSERT INTO orders SELECT nextval('orders_id_seq'), slow()"
    slow = threading.Thread(target=execute, args=(postgres, query))
    slow.start()
    while rows(postgres, "SELECT last_value FROM orders_id_seq") == [(1,)]:
        time.sleep(0.02)
    execute(postgres, "INSERT INTO orders (shop) VALUES ('quick')")
    found = read(source, source.splits(start, source.available(start)))
    slow.join()
    assert sorted(order.shop for order in found) == ["quick", "slow"]


def test_a_number_is_waited_for_that_was_asked_for_before_the_row_was_written(postgres):
    execute(
        postgres,
        "CREATE TABLE orders (id bigserial PRIMARY KEY, shop text NOT NULL)",
        "INSERT INTO orders (shop) VALUES ('first')",
    )
    source = PostgresSource("orders", Order, postgres, follow="id")
    start = source.available(source.oldest())
    with psycopg.connect(postgres) as slow:
        number = slow.execute("SELECT nextval('orders_id_seq')").fetchone()
        execute(postgres, "INSERT INTO orders (shop) VALUES ('quick')")

        def writes():
            slow.execute("INSERT INTO orders VALUES (%s, 'slow')", number)
            slow.commit()

        threading.Timer(0.5, writes).start()
        found = read(source, source.splits(start, source.available(start)))
    assert sorted(order.shop for order in found) == ["quick", "slow"]


def test_a_window_that_has_just_ended_is_read_once_it_is_as_old_as_the_lag(postgres):
    execute(postgres, "CREATE TABLE visits (id bigserial, at timestamptz DEFAULT now())")
    end = datetime.now(UTC) + timedelta(seconds=0.5)
    source = PostgresSource("visits", Visit, postgres, follow="at", lag=timedelta(seconds=4))
    source._window = lambda: TimeRange(end - timedelta(days=1), end)
    with psycopg.connect(postgres) as late:
        late.execute("INSERT INTO visits (at) VALUES (%s)", [end - timedelta(seconds=0.1)])
        threading.Timer(1, late.commit).start()
        assert len(everything(source)) == 1
    assert datetime.now(UTC) >= end + timedelta(seconds=4)


@pytest.mark.parametrize("end", [timedelta(days=-1), timedelta(days=1)])
def test_other_windows_are_read_at_once(postgres, end):
    visits(postgres)
    source = PostgresSource("visits", Visit, postgres, follow="at", lag=timedelta(hours=1))
    until = datetime.now(UTC) + end
    source._window = lambda: TimeRange(until - timedelta(days=1), until)
    assert everything(source) == []


def test_how_far_a_stream_is_behind_is_not_counted_in_numbers():
    source = PostgresSource("visits", Visit, "postgresql://x/y", follow="at")
    assert source.backlog('{"rows": 0}', '{"rows": 60000000}') is None


def test_a_query_may_end_in_a_comment(postgres):
    orders(postgres, 3)
    assert len(everything(PostgresSource("SELECT * FROM orders -- all of them", Order, postgres))) == 3


@pytest.fixture
def reader(postgres, postgres_server):
    """The connection of a user with no rights but those that a test grants."""
    execute(postgres, "CREATE ROLE reader LOGIN PASSWORD 'right'")
    database = postgres.rsplit("/", 1)[1]
    yield f"postgresql://reader:right@127.0.0.1:{postgres_server.port}/{database}"
    execute(postgres, "DROP OWNED BY reader", "DROP ROLE reader")


def test_a_partitioned_table_is_read_by_who_may_read_it_but_not_its_partitions(postgres, reader):
    orders(postgres, 100, partitioned=True)
    execute(postgres, "GRANT SELECT ON orders TO reader")
    assert len(everything(PostgresSource("orders", Order, reader))) == 100


def test_one_who_may_read_columns_reads_them(postgres, reader):
    orders(postgres, 50_000)
    execute(postgres, "GRANT SELECT (id, shop) ON orders TO reader")
    assert len(everything(PostgresSource("orders", Order, reader))) == 50_000


@pytest.mark.parametrize("where", ["orders", "part1"])
def test_the_policies_of_a_partitioned_table_hold(postgres, reader, where):
    orders(postgres, 100, partitioned=True)
    execute(
        postgres,
        "GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader",
        f"ALTER TABLE {where} ENABLE ROW LEVEL SECURITY",
        f"CREATE POLICY few ON {where} USING (id <= 10)",
    )
    assert len(everything(PostgresSource("orders", Order, reader))) == (10 if where == "orders" else 100)


def test_partitions_on_other_servers_are_read(postgres):
    execute(
        postgres,
        "CREATE EXTENSION file_fdw",
        "CREATE SERVER files FOREIGN DATA WRAPPER file_fdw",
        "CREATE TABLE orders (id bigint, shop text) PARTITION BY RANGE (id)",
        "CREATE TABLE near PARTITION OF orders FOR VALUES FROM (0) TO (10)",
        "CREATE FOREIGN TABLE far PARTITION OF orders FOR VALUES FROM (10) TO (20) SERVER files"
        " OPTIONS (program 'echo 11,far', format 'csv')",
        "INSERT INTO orders VALUES (1, 'near')",
    )
    assert everything(PostgresSource("orders", Order, postgres)) == [Order(1, "near"), Order(11, "far")]


class Arrays(NamedTuple):
    raws: list[bytes | None] | None
    took: list[timedelta | None] | None


def test_bytes_and_durations_in_lists_come_back(postgres):
    values = [
        Arrays([b"\x00\xff", None, b""], [timedelta(days=-1, seconds=3), None, timedelta(microseconds=1)]),
        Arrays([], []),
        Arrays(None, None),
    ]
    sink = PostgresSink("arrays", postgres)
    write(sink, values)
    assert everything(PostgresSource("arrays", Arrays, postgres)) == values


class Odd(NamedTuple):
    id: int
    at: datetime | None
    day: date | None
    took: timedelta | None
    numbers: list[int] | None
    times: list[timedelta] | None
    notes: dict[str, datetime] | None
    counts: dict[str, int] | None
    address: str | None


ODD = [
    ("at", "'infinity'", "it is infinite, or outside of the years 1 to 9999"),
    ("at", "'0044-03-15 BC'", "it is infinite, or outside of the years 1 to 9999"),
    ("day", "'-infinity'", "it is infinite, or outside of the years 1 to 9999"),
    ("day", "'20000-01-01'", "it is infinite, or outside of the years 1 to 9999"),
    ("took", "'1 mon'", "it has months, which have no length"),
    ("took", "'1000000 years'", "it has months, which have no length"),
    ("times", "ARRAY['1 s', '1 year'::interval]", "it has months, which have no length"),
    ("numbers", "ARRAY[[1, 2], [3, 4]]", "it is an array of several dimensions"),
    ("notes", """'{"a": "2024-01-01T00:00:00.123456789Z"}'""", "is finer than microseconds"),
    ("counts", """'{"a": 12345678901234567890123}'""", "too large"),
]
FITS = [
    ("at", "'9999-12-31 23:59:59.999999'", datetime(9999, 12, 31, 23, 59, 59, 999999, UTC)),
    ("day", "'0001-01-01'", date(1, 1, 1)),
    ("took", "'-1 day 2 hours'", timedelta(days=-1, hours=2)),
    ("took", "'2147483647 days'", None),
    (
        "times",
        "ARRAY['1 s', '-36:00:00.000001'::interval]",
        [timedelta(seconds=1), -timedelta(hours=36, microseconds=1)],
    ),
    ("numbers", "'[0:1]={1,2}'", [1, 2]),
    ("address", "'10.0.0.1'", "10.0.0.1"),
    ("address", "'10.1.0.0/16'", "10.1.0.0/16"),
]


def test_what_python_has_no_value_for_makes_a_row_malformed(postgres):
    """A time of PostgreSQL may be infinite, an interval have months, and an array more dimensions than its type."""
    execute(
        postgres,
        "CREATE TABLE odd (id int, at timestamptz, day date, took interval, numbers int[], times interval[], notes"
        " jsonb, counts json, address inet)",
        *[f"INSERT INTO odd (id, {name}) VALUES ({n}, {value})" for n, (name, value, _) in enumerate([*FITS, *ODD])],
    )
    found = everything(PostgresSource("odd", Odd, postgres, on_malformed="divert"))
    rows_ = {row.id: row for row in found if isinstance(row, Odd)}
    malformed = [one for one in found if isinstance(one, Malformed)]
    fitting = [(number, name, value) for number, (name, _, value) in enumerate(FITS) if value is not None]
    assert [(number, getattr(rows_[number], name)) for number, name, _ in fitting] == [(n, v) for n, _, v in fitting]
    assert len(rows_) == len(fitting)
    too_long = next(number for number, (_, _, value) in enumerate(FITS) if value is None)
    wanted = {len(FITS) + number: (name, reason) for number, (name, _, reason) in enumerate(ODD)}
    wanted[too_long] = ("took", "")
    said = {json.loads(one.content)["id"]: one.reason for one in malformed}
    assert said.keys() == wanted.keys()
    for number, (name, reason) in wanted.items():
        assert f"field '{name}'" in said[number]
        assert reason in said[number]


class Raw(NamedTuple):
    label: str
    raw: bytes | None


class Holder(NamedTuple):
    held: Raw


class Several(NamedTuple):
    held: list[Raw]


@pytest.mark.parametrize(("record", "column"), [(Holder, "raw2"), (Several, "raw2[]")])
def test_bytes_in_composite_types_are_refused_before_anything_is_read(postgres, record, column):
    execute(postgres, "CREATE TYPE raw2 AS (label text, raw bytea)", f"CREATE TABLE holders (held {column})")
    with pytest.raises(SourceError, match=r"column 'held' of table holders is raw2.*cannot be read as"):
        planned(PostgresSource("holders", record, postgres))


def test_bytes_in_json_that_a_sink_wrote_come_back(postgres):
    sink = PostgresSink("holders", postgres)
    write(sink, [Holder(Raw("a", b"\x00\xff"))])
    assert everything(PostgresSource("holders", Holder, postgres)) == [Holder(Raw("a", b"\x00\xff"))]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"follow": "ids"}, "no field 'ids'; did you mean 'id'"),
        ({"follow": "shop"}, "follow='shop' has to be an int or a datetime"),
        ({"split_by": "shop"}, "split_by='shop' has to be an int"),
        ({"bounded": False}, "name it with follow"),
        ({"parallelism": 0}, "at least 1"),
        ({"table": "a.b.c"}, "is no table of PostgreSQL"),
    ],
)
def test_what_makes_no_sense_is_refused_when_the_graph_is_built(given, says):
    with pytest.raises(PipelineError, match=says):
        PostgresSource(**{"table": "orders", "record": Order, "connection": "postgresql://x/y", **given})


class Lists(NamedTuple):
    numbers: list[int]
    floats: list[float]
    value: float


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("'{1,NULL}', '{1}', 1", "field 'numbers': it has a null at '[]', and its type does not allow None there"),
        ("'{1}', '{1,9007199254740993}', 1", "field 'floats': 9007199254740993 is a whole number that a float cannot"),
        ("'{1}', '{1}', 9007199254740993", "field 'value': 9007199254740993 is a whole number that a float cannot"),
    ],
)
def test_what_a_field_does_not_hold_makes_a_row_malformed(postgres, given, says):
    execute(
        postgres,
        "CREATE TABLE lists (numbers int8[], floats int8[], value int8)",
        f"INSERT INTO lists VALUES ({given}), ('{{2}}', '{{9007199254740992}}', 5)",
    )
    found = everything(PostgresSource("lists", Lists, postgres, on_malformed="divert"))
    assert [row for row in found if not isinstance(row, Malformed)] == [Lists([2], [2.0**53], 5.0)]
    assert says in next(row.reason for row in found if isinstance(row, Malformed))
