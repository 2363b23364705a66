"""What a source reads of real databases: types, splits, partitions, and what it refuses."""

import json
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import NamedTuple
from uuid import UUID

import pytest
from dagster import DailyPartitionsDefinition, StaticPartitionsDefinition

from dagster_unified.api import Pipeline
from dagster_unified.connectors import DatabaseSink, DatabaseSource
from dagster_unified.connectors.protocol.frame import Malformed
from dagster_unified.connectors.sql.generic.connection import Database
from dagster_unified.connectors.sql.table_source import ReadField, converted
from dagster_unified.errors import ConfigurationError, PipelineError, SourceError, UnavailableError, UnsupportedError
from dagster_unified.orchestration.partitions import slice_of
from dagster_unified.records import record_type
from tests.connectors.sql.generic.test_sink import VALUE, Everything
from tests.connectors.sql.support import MANY, Sale, everything, execute, planned, rows
from tests.connectors.support import write
from tests.connectors.trips import Parcel, Spot, Trip
from tests.ports import free_port
from tests.support import MODES

DAYS = DailyPartitionsDefinition("2024-01-01")


class Visit(NamedTuple):
    id: int
    at: datetime


def test_what_a_sink_has_written_comes_back(url):
    values = [VALUE, Everything(*[None] * 11)]
    write(DatabaseSink("everything", url), values)
    assert sorted(everything(DatabaseSource("everything", Everything, url)), key=repr) == sorted(values, key=repr)


def test_ranges_of_a_column_are_the_whole_table(url):
    write(DatabaseSink("sales", url), MANY)
    source = DatabaseSource("sales", Sale, url, split_by="id", parallelism=3)
    assert len(planned(source)) == 4
    assert sorted(everything(source)) == MANY


def test_a_query_is_read(url):
    write(DatabaseSink("sales", url), MANY[:20])
    query = """SELECT id, "order", amount FROM sales WHERE "order" <> ':x' AND id > 10; """
    if url.startswith("mariadb"):  # a query is written as its database has it
        query = query.replace('"', "`")
    assert sorted(everything(DatabaseSource(None, Sale, url, query=query, split_by="id"))) == MANY[11:20]


def test_a_value_of_another_type_is_not_left_out_with_a_key(tmp_path):
    shop = f"sqlite:///{tmp_path}/shop.db"
    execute(shop, "CREATE TABLE parcels (region TEXT, shelf BIGINT, at BIGINT)")
    execute(shop, "INSERT INTO parcels VALUES ('a', 'first', 0), ('b', 1, 0), ('c', 2, 0)")
    shelves = StaticPartitionsDefinition(["1"])
    source = DatabaseSource("parcels", Parcel, shop, on_malformed="divert").partitioned_by("shelf")
    found = everything(source.bounded_to(slice_of(shelves, "1")))
    assert [one.shelf if isinstance(one, Parcel) else "malformed" for one in found] == ["malformed", 1]


def test_what_is_no_time_is_not_left_out_with_a_window(tmp_path):
    shop = f"sqlite:///{tmp_path}/shop.db"
    execute(shop, "CREATE TABLE visits (id bigint, at DATETIME)")
    execute(shop, "INSERT INTO visits VALUES (1, 1704447000), (2, '2024-01-05 10:00:00'), (3, '2024-01-20 10:00:00')")
    source = DatabaseSource("visits", Visit, shop, on_malformed="divert").partitioned_by("at")
    found = everything(source.bounded_to(slice_of(DAYS, "2024-01-05")))
    assert [one.id if isinstance(one, Visit) else one.reason for one in found] == [
        "field 'at': 1704447000 is not a time", 2
    ]  # fmt: skip


def test_rows_that_do_not_fit_are_told_apart(url):
    execute(url, 'CREATE TABLE sales (id bigint, "order" text, amount double)')
    execute(url, "INSERT INTO sales VALUES (1, 'a', 1), (NULL, 'b', 1), (3, 'c', NULL)")
    found = everything(DatabaseSource("sales", Sale, url, on_malformed="divert"))
    assert [one for one in found if isinstance(one, Sale)] == [Sale(1, "a", 1.0), Sale(3, "c", None)]
    assert [(one.place, "field 'id': it is null" in one.reason) for one in found if isinstance(one, Malformed)] == [
        ("table sales", True)
    ]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ('ids bigint, "order" text, amount double', "has no column 'id'; did you mean 'ids'"),
        ('id text, "order" text, amount double', "column 'id' of table sales is .*cannot be read as the field's int64"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_before_anything_is_read(url, made, says):
    execute(url, f"CREATE TABLE sales ({made})")
    with pytest.raises(SourceError, match=says):
        planned(DatabaseSource("sales", Sale, url))
    with pytest.raises(SourceError, match="has no table gone; check the name"):
        planned(DatabaseSource("gone", Sale, url))
    with pytest.raises(UnsupportedError, match="cannot tell what has been read"):
        DatabaseSource("sales", Sale, url).batch_position(None)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"table": None}, "either a table or query"),
        ({"query": "SELECT 1"}, "either a table or query"),
        ({"split_by": "ids"}, "no field 'ids'; did you mean 'id'"),
        ({"split_by": "order"}, "has to be an int"),
        ({"parallelism": 0}, "at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused_when_the_graph_is_built(given, says):
    with pytest.raises(PipelineError, match=says):
        DatabaseSource(**{"table": "sales", "record": Sale, "connection": "sqlite://", **given})


@pytest.mark.a_day(2)
@MODES
def test_a_table_is_copied_on_spark(url, run_in, mode):
    write(DatabaseSink("sales", url), MANY)
    built = Pipeline("copied")
    source = DatabaseSource("sales", Sale, url, split_by="id", parallelism=3)
    built.from_source(source).sink_to(DatabaseSink("copied", url, mode="upsert", key="id"))
    run_in[mode](built)
    assert rows(url, "SELECT * FROM copied ORDER BY id") == [tuple(sale) for sale in MANY]


def test_reading_what_is_not_there_makes_no_file(tmp_path):
    for kind in ("sqlite", "duckdb"):
        with pytest.raises(ConfigurationError, match=r"there is no file .*gone.db; check the path"):
            planned(DatabaseSource("sales", Sale, f"{kind}:///{tmp_path}/gone.db"))
    assert list(tmp_path.iterdir()) == []


class Day(NamedTuple):
    day: date


def test_a_time_is_not_cut_to_a_date(tmp_path):
    shop = f"duckdb:///{tmp_path}/shop.duckdb"
    execute(shop, "CREATE TABLE visits (moment TIMESTAMP)")
    execute(shop, "INSERT INTO visits VALUES ('2024-01-01 12:00:00')")
    source = DatabaseSource(None, Day, shop, query="SELECT moment AS day FROM visits", on_malformed="divert")
    assert ["is not a date" in one.reason for one in everything(source)] == [True]


class Number(NamedTuple):
    value: int | None


class Moment(NamedTuple):
    value: datetime


class Took(NamedTuple):
    value: timedelta


@pytest.mark.parametrize(
    ("record", "values", "says"),
    [
        (Number, [7, 1.5, None], "1.5 is not an int"),
        (Number, [7, Decimal("1.5")], "Decimal('1.5') is not an int"),
        (Number, [7, float("inf")], "inf is not an int"),
        (Number, [Decimal(7), "7"], "'7' is not an int"),
        (Day, [date(2024, 1, 1), 5], "5 is not a date"),
        (Day, [1.5], "1.5 is not a date"),
        (Took, [7, 1.5], "1.5 is not an int"),
        (Moment, [datetime(9999, 12, 31, 23, tzinfo=timezone(timedelta(hours=-5)))], "outside of the years 1 to 9999"),
        (Moment, [datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=5)))], "outside of the years 1 to 9999"),
        (Moment, [datetime(2024, 1, 1), "9999-12-31 23:00:00-05:00"], "date value out of range"),
    ],
)
def test_a_value_that_would_be_changed_is_refused(record, values, says):
    (field,) = ReadField.of(record_type(record))
    refused = [one for one in converted([values], [field], "table shop") if isinstance(one, Malformed)]
    assert [one.place for one in refused] == ["table shop"]
    assert refused[0].reason.startswith(f"field '{field.field.name}': ")
    assert says in refused[0].reason


def test_a_whole_number_is_read_whatever_the_driver_makes_of_it():
    found = converted([[7, 2.0, Decimal("3.00"), None]], ReadField.of(record_type(Number)), "table shop")
    assert [batch.to_pylist() for batch in found] == [[{"value": 7}, {"value": 2}, {"value": 3}, {"value": None}]]


def test_half_a_number_of_a_database_is_refused(tmp_path):
    shop = f"sqlite:///{tmp_path}/shop.db"
    execute(shop, "CREATE TABLE visits (value INTEGER)")
    execute(shop, "INSERT INTO visits VALUES (1), (1.5)")
    found = everything(DatabaseSource("visits", Number, shop, on_malformed="divert"))
    assert [one.reason if isinstance(one, Malformed) else one for one in found] == [
        Number(1), "field 'value': 1.5 is not an int"
    ]  # fmt: skip


class Alike(NamedTuple):
    id: int
    small: int | None
    big: float | None
    text: str | None
    other: str | None
    kind: str | None
    raw: bytes | None
    yes: bool | None
    number: Decimal | None
    day: date | None
    moment: datetime | None
    shown: list[int] | None


Unlike = NamedTuple("Unlike", [*Alike.__annotations__.items(), ("takes", timedelta)])

TIMES = ["2024-02-29 10:00:00.123456+02", "0001-01-01 00:00:00+00", "infinity", "-infinity", "20000-01-01 00:00:00+00"]


def test_duckdbs_arrow_columns_are_what_its_driver_gives(tmp_path):
    shop = f"duckdb:///{tmp_path}/shop.duckdb"
    execute(
        shop,
        "CREATE TABLE shop (id BIGINT, small UTINYINT, big BIGINT, text VARCHAR, other UUID, kind ENUM('a', 'b'),"
        " raw BLOB, yes INTEGER, number DECIMAL(12, 2), day DATE, moment TIMESTAMPTZ, shown JSON, takes INTERVAL)",
    )
    for number, moment in enumerate([*TIMES, None]):
        given = f"{number}, 200, {2**53}, 'x', '{UUID(int=number)}', 'b', 'y', 1, 12.34, '2024-02-29'"
        given = given if moment else f"{number}, " + ", ".join(["NULL"] * 9)
        moment = f"'{moment}'" if moment else "NULL"
        execute(shop, f"INSERT INTO shop VALUES ({given}, {moment}, '[1, 2]', INTERVAL 1 HOUR)")
    by_column = everything(DatabaseSource("shop", Alike, shop, on_malformed="divert"))
    by_row = everything(DatabaseSource(None, Unlike, shop, query="SELECT * FROM shop", on_malformed="divert"))
    fit = [row for row in by_column if not isinstance(row, Malformed)]
    assert fit == [Alike(*row[:-1]) for row in by_row if not isinstance(row, Malformed)]
    assert [row.id for row in fit] == [0, 1, 5]
    assert fit[0].big == 2**53
    assert fit[0].moment == datetime(2024, 2, 29, 8, 0, 0, 123456, timezone.utc)
    assert [json.loads(one.content)["id"] for one in by_column if isinstance(one, Malformed)] == [2, 3, 4]


class Floating(NamedTuple):
    value: float


@pytest.mark.parametrize("kind", ["BIGINT", "UBIGINT"])
def test_a_whole_number_that_a_float_cannot_hold_is_malformed(tmp_path, kind):
    shop = f"duckdb:///{tmp_path}/shop.duckdb"
    most = 2**63 - 1 if kind == "BIGINT" else 2**64 - 1
    given = [3, 2**53, 2**53 + 1, 2**60, most]
    execute(shop, f"CREATE TABLE shop (value {kind})")
    execute(shop, "INSERT INTO shop VALUES " + ", ".join(f"({value})" for value in given))
    for query in (None, "SELECT value FROM shop"):
        table = "shop" if query is None else None
        rows = everything(DatabaseSource(table, Floating, shop, query=query, on_malformed="divert"))
        assert [row.value for row in rows if not isinstance(row, Malformed)] == [3.0, 2.0**53, 2.0**60]
        reasons = [row.reason for row in rows if isinstance(row, Malformed)]
        assert [
            f"{value} is a whole number that a float cannot hold" in why
            for value, why in zip((2**53 + 1, most), reasons, strict=True)
        ] == [True, True]


class Times(NamedTuple):
    at: datetime | None
    day: date | None
    took: timedelta | None


Nested = NamedTuple("Nested", [*Times.__annotations__.items(), ("spots", list[Spot] | None), ("held", dict[str, int])])

ODD_TIMES = {
    "TIMESTAMP_NS '2024-01-01 00:00:00.1234567', NULL, NULL": "finer than microseconds",
    "NULL, DATE '-infinity', NULL": "field 'day'",
    "NULL, NULL, INTERVAL '14 months'": "it has months",
}


@pytest.mark.parametrize("record", [Times, Nested])
def test_times_of_duckdb_are_read_as_they_are_or_not_at_all(tmp_path, record):
    """With nested columns, rows come by the driver, which would cut times off, and give a month thirty days."""
    shop = f"duckdb:///{tmp_path}/shop.duckdb"
    nested = "[{'x': 1, 'y': 2, 'z': NULL}], MAP {'a': 1}"
    execute(
        shop,
        'CREATE TABLE seen ("at" TIMESTAMP_NS, day DATE, took INTERVAL, spots STRUCT(x INTEGER, y DOUBLE, z INTEGER)[],'
        " held MAP(VARCHAR, INTEGER))",
    )
    fitting = "TIMESTAMP_NS '2024-01-01 00:00:00.123456000', DATE '2024-01-01', INTERVAL '1 day -3 seconds'"
    for given in [fitting, *ODD_TIMES]:
        execute(shop, f"INSERT INTO seen VALUES ({given}, {nested})")
    found = everything(DatabaseSource("seen", record, shop, on_malformed="divert"))
    times = (datetime(2024, 1, 1, 0, 0, 0, 123456, timezone.utc), date(2024, 1, 1), timedelta(days=1, seconds=-3))
    rest = () if record is Times else ([Spot(1.0, 2.0)], {"a": 1})
    assert [row for row in found if not isinstance(row, Malformed)] == [record(*times, *rest)]
    for one, problem in zip((one for one in found if isinstance(one, Malformed)), ODD_TIMES.values(), strict=True):
        assert problem in one.reason


class Measured(NamedTuple):
    value: float
    other: float | None


def test_numbers_of_single_precision_are_read_as_they_are(mariadb):
    """MariaDB sends them with six digits."""
    execute(mariadb, "CREATE TABLE measured (value FLOAT, other DOUBLE)")
    execute(mariadb, "INSERT INTO measured VALUES (16777216, 0.1), (0.1, 1234567.25), (-0.5, NULL)")
    for source in (
        DatabaseSource("measured", Measured, mariadb),
        DatabaseSource(None, Measured, mariadb, query="SELECT value, other FROM measured"),
    ):
        found = [tuple(row) for row in everything(source)]
        assert found == [(16777216.0, 0.1), (0.10000000149011612, 1234567.25), (-0.5, None)]


def test_a_query_that_fails_while_it_is_read_is_an_error_of_the_source(url):
    write(DatabaseSink("sales", url), MANY)
    failing = "abs(-9223372036854775807 - CASE WHEN id > 15000 THEN 1 ELSE 0 END)"
    source = DatabaseSource(None, tuple[int], url, query=f"SELECT {failing} AS f0 FROM sales")
    with pytest.raises(SourceError, match=r"source 'query': .* refuses it: .*(?i:overflow|out of range)"):
        everything(source)


class Seen(NamedTuple):
    at: datetime


def test_times_that_sqlite_has_as_text_are_read_however_they_are_written(tmp_path):
    shop = f"sqlite:///{tmp_path}/shop.db"
    execute(shop, "CREATE TABLE seen (at DATETIME)")
    texts = ["2024-01-05 10:00:00", "2024-01-05T10:00:00.500000", "2024-01-05", "2024-01-05 10:00:00+02:00"]
    wrong = ["2024-02-30 10:00:00", "0000-01-01 10:00:00", "2024-01-05 25:00:00", "2024-01-05 10:00:00.1234567"]
    for text in texts + wrong:
        execute(shop, f"INSERT INTO seen VALUES ('{text}')")
    found = everything(DatabaseSource("seen", Seen, shop, on_malformed="divert"))
    day = datetime(2024, 1, 5, tzinfo=timezone.utc)
    read = sorted(one.at - day for one in found if isinstance(one, Seen))
    assert read == [timedelta(hours=hours) for hours in (0, 8, 10)] + [timedelta(hours=10, milliseconds=500)]
    assert sorted(one.content for one in found if isinstance(one, Malformed)) == sorted(
        f'{{"at":"{text}"}}' for text in wrong
    )


def test_a_database_with_cursors_of_its_own_is_read(postgres):
    execute(
        postgres,
        "CREATE TABLE sales AS SELECT n AS id, 'x' AS \"order\", n / 2.0 AS amount FROM generate_series(1, 25000) n",
    )
    source = DatabaseSource("sales", Sale, postgres.replace("postgresql://", "postgresql+psycopg://"))
    assert sorted(everything(source)) == [Sale(n, "x", n / 2) for n in range(1, 25_001)]


def test_a_record_within_a_record_that_lacks_a_field_does_not_fit(url):
    trips = [Trip(1), Trip(2, spots=[], by_name={"k": Spot(1.0, 2.0, 3)})]
    write(DatabaseSink("trips", url), trips)
    whole, lacking, null = '{"x": 1, "y": 2}', '{"x": 1}', '{"x": 1, "y": null}'
    for number, spots in ((3, f"[{whole}, {lacking}]"), (4, f"[{null}]"), (5, "[null]"), (6, f"[{whole}]")):
        execute(url, f"INSERT INTO trips VALUES ({number}, '{whole}', '{spots}', '{{}}')")
    found = everything(DatabaseSource("trips", Trip, url, on_malformed="divert"))
    fitting = [*trips, Trip(6, Spot(1.0, 2.0), [Spot(1.0, 2.0)], {})]
    assert sorted(row for row in found if isinstance(row, Trip)) == fitting
    assert sorted(row.reason for row in found if isinstance(row, Malformed)) == [
        "field 'spots': Expected `float`, got `null` - at `$[0].y`",
        "field 'spots': Expected `object`, got `null` - at `$[0]`",
        "field 'spots': Object missing required field `y` - at `$[1]`",
    ]


class Real(NamedTuple):
    id: int
    text: str
    real: float


def test_a_text_that_is_none_is_malformed(tmp_path):
    shop = f"sqlite:///{tmp_path}/shop.db"
    execute(shop, "CREATE TABLE shop (id integer, text text, real real)")
    execute(shop, "INSERT INTO shop VALUES (1, 'one', 1.5), (2, CAST(x'636166e9' AS TEXT), 1), (3, 'x', 2)")
    found = everything(DatabaseSource("shop", Real, shop, on_malformed="divert"))
    assert [row for row in found if isinstance(row, Real)] == [Real(1, "one", 1.5), Real(3, "x", 2.0)]
    (bad,) = [row for row in found if isinstance(row, Malformed)]
    assert json.loads(bad.content) == {"id": 2, "text": r"'caf\udce9'", "real": 1.0}
    assert bad.reason.startswith("field 'text': 'caf")
    assert bad.reason.endswith("has bytes that are not UTF-8")


def test_a_decimal_that_no_float_holds_is_malformed():
    columns = [[1, 2, 3], ["a", "b", "c"], [Decimal("1.5"), Decimal("1e400"), Decimal("1e-400")]]
    found = list(converted(columns, ReadField.of(record_type(Real, "shop")), "table shop"))
    assert [row for batch in found if not isinstance(batch, Malformed) for row in batch.to_pylist()] == [
        {"id": 1, "text": "a", "real": 1.5},
        {"id": 3, "text": "c", "real": 0.0},
    ]
    (bad,) = [one for one in found if isinstance(one, Malformed)]
    assert bad.reason == "field 'real': it is 1E+400, which a float cannot hold; declare a Decimal"


@pytest.mark.parametrize("dialect", ["postgresql+psycopg", "mysql+pymysql"])
def test_a_database_where_nobody_listens_is_transient_and_says_what_to_look_at(dialect):
    connection = Database(f"{dialect}://reader@127.0.0.1:{free_port()}/sales")
    said = r"^source 's': .*127\.0\.0\.1:\d+/sales cannot do it now \(.*\); see that it runs, and that \S+ reaches it$"
    with pytest.raises(UnavailableError, match=said), connection.transaction("source 's'"):
        pass
