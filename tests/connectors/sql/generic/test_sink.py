"""What a sink leaves in real databases: modes, types, and what it refuses."""

import sqlite3
from contextlib import closing
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import mssql, mysql, oracle, registry

from dagster_unified.connectors import DatabaseSink, DeliveryGuarantee
from dagster_unified.connectors.protocol.commits import WriteAttempt, WriterTask
from dagster_unified.connectors.secrets import Environment
from dagster_unified.connectors.sql.generic.connection import Database, dialect_of
from dagster_unified.connectors.sql.generic.dialect import column_type
from dagster_unified.connectors.sql.generic.sink import StagedRows
from dagster_unified.engine import commit
from dagster_unified.engine.commit import WriteContext
from dagster_unified.errors import (
    ConfigurationError,
    MissingRequirementError,
    PipelineError,
    SinkError,
    UnavailableError,
    UnifiedError,
)
from dagster_unified.records import record_type
from tests.connectors.sql.support import MANY, Sale, execute, rows
from tests.connectors.support import LocalCommits, identity, write
from tests.depth import chance
from tests.ports import free_port
from tests.small_disk import NEEDS_ROOT, small_disk

UTC = timezone.utc


def sales(url):
    return rows(url, "SELECT * FROM sales ORDER BY id")


class Point(NamedTuple):
    x: int
    label: str | None


class Everything(NamedTuple):
    text: str | None
    number: int | None
    real: float | None
    flag: bool | None
    raw: bytes | None
    day: date | None
    at: datetime | None
    money: Decimal | None
    took: timedelta | None
    point: Point | None
    texts: list[str] | None


VALUE = Everything(
    "é€\n", -(2**63), 1.5, True, b"\x00\xff", date(2024, 2, 29), datetime(2024, 2, 29, 12, 30, 1, 5, UTC),
    Decimal("-12345678901234567890.123456789012345678"), timedelta(days=-3, microseconds=1), Point(1, None), ["a", ""],
)  # fmt: skip


def test_every_type_arrives(url):
    write(DatabaseSink("everything", url), [VALUE, Everything(*[None] * 11)])
    first, second = rows(url, "SELECT * FROM everything ORDER BY number IS NULL")
    took = -3 * 24 * 3600 * 10**6 + 1
    assert second == (None,) * 11
    assert first[0:3] + first[4:5] + first[8:] == (
        "é€\n", -(2**63), 1.5, b"\x00\xff", took, '{"x":1,"label":null}', '["a",""]',
    )  # fmt: skip
    assert bool(first[3])
    assert str(first[5]) == "2024-02-29"
    assert Decimal(first[7]) == VALUE.money
    at = first[6] if isinstance(first[6], datetime) else datetime.fromisoformat(first[6])
    assert (at if at.tzinfo else at.replace(tzinfo=UTC)) == VALUE.at


def test_names_are_taken_as_they_are_written(url):
    write(DatabaseSink('my "Select', url), [Sale(1, "a'); DROP TABLE x")])
    assert rows(url, 'SELECT "order" FROM "my ""Select"') == [("a'); DROP TABLE x",)]


def test_upserts_need_a_unique_index(url):
    execute(url, 'CREATE TABLE sales (id bigint, "order" text, amount double)')
    with pytest.raises(SinkError, match=r"no primary key or unique index of \(id\), which upserts need"):
        write(DatabaseSink("sales", url, mode="upsert", key="id"), [Sale(1, "a")])


def test_a_table_that_changes_under_the_job_is_terminal(url):
    with closing(LocalCommits(DatabaseSink("sales", url), Sale)) as commits:
        commits.write([[Sale(1, "a")]], [WriteContext(identity(epoch=0), "stage")])
        execute(url, "DROP TABLE sales")
        with pytest.raises(SinkError, match=r"sink 'sales': .* refuses it: .*sales"):
            commits.write([[Sale(2, "a")]], [WriteContext(identity(epoch=1), "stage")])


def test_what_a_constraint_refuses_leaves_nothing_and_shows_no_values(url):
    execute(url, 'CREATE TABLE sales (id bigint, "order" text, amount double CHECK (amount < 9))')
    sink = DatabaseSink("sales", url)
    with pytest.raises(SinkError, match=r"sink 'sales': .* refuses it: ") as refused:
        write(sink, [Sale(1, "hidden", 1.0), Sale(2, "hidden", 10.0)])
    assert "hidden" not in str(refused.value)
    assert sales(url) == []
    assert not write(sink, [Sale(1, "a", 1.0)]).repeated


def test_a_database_that_stays_locked_is_transient(tmp_path):
    url = f"sqlite:///{tmp_path}/shop.db?timeout=0.05"
    write(DatabaseSink("sales", url), [Sale(1, "a")])
    with closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(
            UnavailableError, match=r"sink 'sales': sqlite:///.*shop.db is locked by another connection"
        ):
            write(DatabaseSink("sales", url), [Sale(2, "a")], execution="other")


def test_a_write_that_another_one_holds_up_comes_through(tmp_path):
    url = f"sqlite:///{tmp_path}/shop.db?timeout=0.05"
    other = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
    held = []

    def hold():
        """Lock once, before the commit; let go when it is asked about again."""
        if held:
            other.execute("ROLLBACK")
        else:
            other.execute("BEGIN IMMEDIATE")
            held.append(True)

    with closing(other):
        write(DatabaseSink("sales", url), [Sale(1, "a")], before_commit=hold)
    assert [row[0] for row in rows(f"sqlite:///{tmp_path}/shop.db", "SELECT id FROM sales")] == [1]


def test_many_rows_are_staged_in_files_that_are_removed(tmp_path):
    sink = DatabaseSink("sales", f"sqlite:///{tmp_path}/shop.db").bound_to(record_type(Sale))
    attempt = WriteAttempt(identity(), "one", "stage", f"{tmp_path}/staging/of writer/one")
    writer = sink.writer(WriterTask(attempt, 0, 0))
    for _ in range(100):
        writer.write(sink.records.to_batch(MANY))
    staged = list(writer.prepare_commit())
    assert all(Path(one.file).exists() and not one.content for one in staged)
    assert sum(one.table().num_rows for one in staged) == 100 * len(MANY)
    sink.committer(sink.records.schema).clean_up([attempt], committed=True)
    assert not any(path.is_file() for path in (tmp_path / "staging").rglob("*"))


def test_what_is_missing_is_named():
    upsert = {"mode": "upsert", "key": "id"}
    with pytest.raises(MissingRequirementError, match="the driver 'MySQLdb' is not installed; install"):
        write(DatabaseSink("sales", "mysql+mysqldb://u@h/d", **upsert), [Sale(1, "a")])
    with pytest.raises(MissingRequirementError, match="the dialect 'snowflake' is not installed"):
        write(DatabaseSink("sales", "snowflake://u@h/d", **upsert), [Sale(1, "a")])
    with pytest.raises(ConfigurationError, match="environment variable NOT_SET has no value"):
        write(DatabaseSink("sales", Environment("NOT_SET")), [Sale(1, "a")])


def test_no_secret_is_in_what_is_shown():
    for password in ("hidden", "hid/den", "hid#den", "hid[den", "%40hidden"):
        database = Database.of(f"mysql+pymysql://etl:{password}@host:3306/shop?ssl_key=hidden", "sink")
        assert database.describe() == "mysql+pymysql://host:3306/shop"
    with pytest.raises(PipelineError, match="no URL of SQLAlchemy") as raised:
        Database.of("mysql+pymysql://etl:hid@den:w0rd@host/shop", "sink")
    assert "hid" not in str(raised.value)
    assert Database.of("sqlite:////data/shop#1.db", "sink").describe() == "sqlite:////data/shop#1.db"
    assert "hidden" not in repr(database)
    with pytest.raises(PipelineError) as refused:
        DatabaseSink("sales", "hidden")
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize("table", ["dagster_unified_commits", "", "a\0b"])
def test_what_is_no_name_of_a_table_is_refused_when_the_graph_is_built(table):
    with pytest.raises(PipelineError, match="cannot be the name of a table"):
        DatabaseSink(table, "sqlite://")


@pytest.mark.parametrize("kind", ["postgresql+psycopg", "mysql+pymysql"])
def test_exactly_once_is_refused_where_it_is_not_known_to_hold(monkeypatch, kind):
    said = (
        rf"writes exactly once to SQLite, DuckDB, MariaDB .*; for {kind.partition('+')[0]} that is not known: give"
        r" delivery_guarantee=DeliveryGuarantee.AT_LEAST_ONCE, or mode='upsert'.* PostgresSink"
    )
    url = f"{kind}://nobody@127.0.0.1:1/shop"
    with pytest.raises(PipelineError, match=said):
        DatabaseSink("sales", url)
    monkeypatch.setenv("SHOP_DATABASE", url)
    with pytest.raises(SinkError, match=said):
        write(DatabaseSink("sales", Environment("SHOP_DATABASE")), [Sale(1, "a")])


def test_what_is_promised_of_other_databases():
    url, at_least_once = "oracle://db/shop", DeliveryGuarantee.AT_LEAST_ONCE
    assert DatabaseSink("sales", url, mode="upsert", key="id").guarantee.value == "upsert"
    assert DatabaseSink("sales", url, delivery_guarantee=at_least_once).guarantee.value == "at-least-once"
    assert DatabaseSink("sales", "sqlite://", delivery_guarantee=at_least_once).guarantee.value == "at-least-once"


def test_a_database_that_takes_texts_for_the_same_that_differ_loses_no_row(mariadb):
    url = mariadb.replace("mariadb+", "mysql+")
    execute(mariadb, 'CREATE TABLE sales (id bigint, "order" varchar(9), amount double)')
    sink = DatabaseSink("sales", url, mode="upsert", key="order")
    write(sink, [Sale(1, "a")])
    with pytest.raises(SinkError, match=r"the text 'a', which table sales has, is the same as another one that is wri"):
        write(sink, [Sale(2, "A")], execution="second")
    write(sink, [Sale(3, "a"), Sale(4, "b")], execution="third")
    assert sales(mariadb) == [(3, "a", None), (4, "b", None)]
    options = {"partition_column": "day", "delivery_guarantee": DeliveryGuarantee.AT_LEAST_ONCE}
    execute(mariadb, 'CREATE TABLE days (id bigint, "order" text, amount double, day varchar(9))')
    write(DatabaseSink("days", url, **options), [Sale(1, "a")], partition="monday")
    with pytest.raises(SinkError, match="the text 'monday', which table days has, is the same as another"):
        write(DatabaseSink("days", url, **options), [Sale(2, "a")], partition="Monday")


def test_columns_of_databases_that_cannot_be_had_here():
    """What SQLAlchemy makes of the tables, and which columns that are there are refused."""
    wanted = {
        "mysql": ("varchar(255) character set utf8mb4 collate utf8mb4_bin", "datetime(6)", "longtext"),
        "mssql": ("nvarchar(255)", "datetimeoffset", "ntext"),
        "oracle": ("varchar2(255 char)", "timestamp with time zone", "clob"),
    }
    for name, columns in wanted.items():
        dialect = registry.load(name)()
        kinds = column_type(pa.string(), True), column_type(pa.timestamp("us", "UTC")), column_type(pa.string())
        assert tuple(kind.compile(dialect=dialect).lower() for kind in kinds) == columns
    at = pa.timestamp("us", "UTC")
    assert not dialect_of("mysql").holds(at, mysql.DATETIME())
    assert not dialect_of("mssql").holds(at, mssql.DATETIME())
    assert not dialect_of("oracle").holds(at, oracle.DATE())
    assert dialect_of("oracle").holds(at, oracle.TIMESTAMP(timezone=True))
    assert dialect_of("mssql").holds(at, mssql.DATETIMEOFFSET())
    assert dialect_of("mssql").holds(pa.float64(), mssql.FLOAT(53))
    assert not dialect_of("mssql").holds(pa.float64(), mssql.FLOAT(24))


class Price(NamedTuple):
    amount: Decimal


def test_decimals_do_not_become_floats(tmp_path):
    url = f"sqlite:///{tmp_path}/shop.db"
    execute(url, "CREATE TABLE prices (amount NUMERIC)")
    with pytest.raises(SinkError, match=r"'amount' of prices is NUMERIC, which does not hold the field's decimal"):
        write(DatabaseSink("prices", url), [Price(Decimal("12345678901234567890.12"))])
    url = f"duckdb:///{tmp_path}/shop.duckdb"
    execute(url, "CREATE TABLE prices (amount DOUBLE)")
    with pytest.raises(SinkError, match="which does not hold the field's decimal"):
        write(DatabaseSink("prices", url), [Price(Decimal("12345678901234567890.12"))])


def test_nan_does_not_become_null(url):
    nan = Sale(1, "a", float("nan"))
    if not url.startswith("duckdb"):
        with pytest.raises(SinkError, match=r"field 'amount' is NaN, which (SQLite|MariaDB) has no number for"):
            write(DatabaseSink("sales", url), [nan])
        assert sales(url) == []
    else:
        write(DatabaseSink("sales", url), [nan])
        assert str(sales(url)) == "[(1, 'a', nan)]"


@pytest.mark.parametrize("kind", ["duckdb", "mariadb"])
def test_a_column_that_would_shorten_values_is_refused_and_decimals_that_fit_are_not(tmp_path, mariadb, kind):
    url = mariadb if kind == "mariadb" else f"duckdb:///{tmp_path}/shop.duckdb"
    execute(url, "CREATE TABLE prices (amount NUMERIC(20, 2))")
    write(DatabaseSink("prices", url), [Price(Decimal("1.25"))])
    with pytest.raises(SinkError, match="field 'amount' has more than the 2 digits after the point that its column"):
        write(DatabaseSink("prices", url), [Price(Decimal("1.255"))], execution="second")
    assert rows(url, "SELECT * FROM prices") == [(Decimal("1.25"),)]
    execute(url, 'CREATE TABLE sales (id bigint, "order" text, amount float)')
    with pytest.raises(SinkError, match=r"column 'amount' of sales is (FLOAT|REAL), which does not hold the field's"):
        write(DatabaseSink("sales", url), [Sale(1, "a", 0.1)])
    kept = "TIMESTAMP(3)" if kind == "mariadb" else "TIMESTAMP_MS"
    execute(url, f'CREATE TABLE visits ("at" {kept})')
    with pytest.raises(SinkError, match="column 'at' of visits is TIMESTAMP, which does not hold the field's"):
        write(DatabaseSink("visits", url), [Visit(datetime(2024, 1, 1, tzinfo=UTC))])


def test_mariadb_takes_texts_as_they_are_and_refuses_tables_where_it_would_not(mariadb):
    keys = ["A", "a", "a ", "ä", "\U0001f600"]
    upsert = {"mode": "upsert", "key": "order"}
    write(DatabaseSink("sales", mariadb, **upsert), [Sale(n, key) for n, key in enumerate(keys)])
    assert sorted(rows(mariadb, 'SELECT "order" FROM sales')) == sorted((key,) for key in keys)
    execute(mariadb, 'CREATE TABLE loose (id bigint, "order" varchar(9) PRIMARY KEY, amount double)')
    with pytest.raises(
        SinkError, match=r"column 'order' of loose has the collation .*, by which texts that differ are"
    ):
        write(DatabaseSink("loose", mariadb, **upsert), [Sale(1, "a")])
    execute(mariadb, 'CREATE TABLE twice (id bigint PRIMARY KEY, "order" varchar(9) UNIQUE, amount double)')
    with pytest.raises(SinkError, match=r"has unique columns beside the key \(order\): MariaDB would replace a row"):
        write(DatabaseSink("twice", mariadb, mode="upsert", key="id"), [Sale(1, "a")])
    execute(mariadb, 'CREATE TABLE loose_engine (id bigint, "order" text, amount double) ENGINE = Aria')
    with pytest.raises(SinkError, match="table loose_engine is in the engine Aria, which has no transactions"):
        write(DatabaseSink("loose_engine", mariadb), [Sale(1, "a")])
    execute(mariadb, "CREATE TABLE visits (at DATETIME)")
    with pytest.raises(SinkError, match="column 'at' of visits is DATETIME, which does not hold the field's timestamp"):
        write(DatabaseSink("visits", mariadb), [Visit(datetime(2024, 1, 1, tzinfo=UTC))])
    execute(mariadb, 'CREATE TABLE short (id bigint, "order" varchar(3), amount double)')
    with pytest.raises(SinkError, match="refuses it: Data too long for column 'order'"):
        write(DatabaseSink("short", mariadb), [Sale(1, "abcd")], execution="second")
    with pytest.raises(
        SinkError, match=r"'order' has longer texts than its column holds, which is varchar\(3\), if only"
    ):
        write(DatabaseSink("short", mariadb), [Sale(1, "abc"), Sale(2, "ü   ")], execution="second")
    write(DatabaseSink("short", mariadb), [Sale(1, "abc"), Sale(2, "ü  ")], execution="third")
    assert sorted(rows(mariadb, "SELECT id, `order` FROM short")) == [(1, "abc"), (2, "ü  ")]
    with pytest.raises(SinkError, match="field 'amount' is infinite, which MariaDB has no number for"):
        write(DatabaseSink("other", mariadb), [Sale(1, "a", float("inf"))], execution="second")


@pytest.mark.parametrize(
    ("text", "size"), [("a" * (17 << 20), 17825792), ("a'" * (6 << 20), 18874368), ("é" * (9 << 20), 18874368)]
)
def test_a_value_that_is_longer_than_mariadb_takes_is_refused_and_not_tried_again(mariadb, text, size):
    with pytest.raises(SinkError, match=rf"a row of {size} bytes.* max_allowed_packet of 16777216"):
        write(DatabaseSink("sales", mariadb), [Sale(1, "b"), Sale(1, text)])


@pytest.mark.parametrize("text", ["a" * ((16 << 20) - (1 << 16)), "\n" * ((8 << 20) - (1 << 15))])
def test_mariadb_takes_a_value_that_is_as_long_as_may_be(mariadb, text):
    execute(mariadb, "CREATE TABLE sales (id bigint, `order` longtext, amount double)")
    write(DatabaseSink("sales", mariadb), [Sale(1, "b"), Sale(1, text)])
    assert sorted(len(row[1]) for row in rows(mariadb, "SELECT * FROM sales")) == [1, len(text)]


def test_a_server_that_takes_short_statements_only_is_told_apart_from_one_that_is_away(mariadb):
    engine = sa.create_engine(mariadb)
    with engine.connect() as connection:
        most = connection.execute(sa.text("SELECT @@max_allowed_packet")).scalar_one()
        connection.execute(sa.text("SET GLOBAL max_allowed_packet = 1048576"))
    try:
        with pytest.raises(SinkError, match="max_allowed_packet is 1048576 bytes, and statements of many rows need"):
            write(DatabaseSink("sales", mariadb), [Sale(1, "b")])
    finally:
        with engine.connect() as connection:
            connection.execute(sa.text(f"SET GLOBAL max_allowed_packet = {most}"))
        engine.dispose()


def test_mariadb_that_is_away_is_transient_and_what_is_wrong_for_good_is_not(mariadb, mariadb_server):
    away = mariadb.replace(str(mariadb_server.port), str(free_port()))
    with pytest.raises(
        UnavailableError, match=r"cannot do it now \(Can't connect to MySQL server.*\); see that it runs"
    ):
        write(DatabaseSink("sales", away), [Sale(1, "a")])
    with pytest.raises(SinkError, match="refuses it: Access denied for user 'nobody'"):
        write(DatabaseSink("sales", mariadb.replace("root@", "nobody:hidden@")), [Sale(1, "a")])
    with pytest.raises(SinkError, match="refuses it: Unknown database 'gone'"):
        write(DatabaseSink("sales", mariadb_server.url("gone")), [Sale(1, "a")])


def test_a_user_who_may_not_write_is_told_so_and_not_tried_again(mariadb, mariadb_server):
    write(DatabaseSink("sales", mariadb), [Sale(1, "a")])
    user = f"reader_{mariadb.rpartition('/')[2]}"
    mariadb_server.execute(f"CREATE USER {user}@'127.0.0.1'")
    mariadb_server.execute(f"GRANT SELECT ON *.* TO {user}@'127.0.0.1'")
    with pytest.raises(SinkError, match=rf"refuses it: .*command denied to user '{user}'"):
        write(DatabaseSink("sales", mariadb.replace("root@", f"{user}@")), [Sale(2, "a")], execution="second")
    assert sales(mariadb) == [(1, "a", None)]


@NEEDS_ROOT
@pytest.mark.parametrize("kind", ["sqlite", "duckdb"])
def test_a_full_disk_is_transient_and_leaves_nothing(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(commit, "_LONGEST_PAUSE", 0.05)
    random, url = chance("full disk"), f"{kind}:///{tmp_path}/small/shop.db"
    long = [Sale(n, random.randbytes(500).hex()) for n in range(5_000)]
    with small_disk(tmp_path / "small", megabytes=2) as resize:
        write(DatabaseSink("sales", url), [Sale(-1, "before")])
        with pytest.raises(UnifiedError, match=r"sink 'sales': .*(full|No space)") as failed:
            write(DatabaseSink("sales", url), long, execution="second")
        assert failed.value.retryable
        assert sales(url) == [(-1, "before", None)]
        resize(64)
        assert not write(DatabaseSink("sales", url), long, execution="second").repeated
        assert write(DatabaseSink("sales", url), long, execution="second").repeated
        assert [row[0] for row in sales(url)] == [-1, *range(5_000)]


class Visit(NamedTuple):
    at: datetime


@pytest.mark.parametrize("column", ["TIMESTAMP", "TIMESTAMPTZ"])
def test_times_are_utc_whatever_the_zone_of_the_session(tmp_path, monkeypatch, column):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    url = f"duckdb:///{tmp_path}/shop.duckdb"
    execute(url, f'CREATE TABLE visits ("at" {column})')
    write(DatabaseSink("visits", url), [Visit(datetime(2024, 1, 1, 12, tzinfo=UTC))])
    assert rows(url, 'SELECT epoch("at") FROM visits') == [(datetime(2024, 1, 1, 12, tzinfo=UTC).timestamp(),)]


def test_looking_at_a_table_makes_no_file(tmp_path):
    for kind in ("sqlite", "duckdb"):
        sink = DatabaseSink("sales", f"{kind}:///{tmp_path}/gone.db").bound_to(record_type(Sale))
        assert not sink.exists()
        assert sink.preview(None, 1) is None
    assert list(tmp_path.iterdir()) == []


def test_staged_rows_that_another_job_removed_are_staged_again(tmp_path):
    with pytest.raises(UnavailableError, match="another attempt stages them again"):
        StagedRows(file=str(tmp_path / "gone.arrows"), rows=1, bytes=1).table()
