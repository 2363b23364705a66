"""What a sink leaves in a real database: modes, types, and what it refuses."""

import math
from contextlib import closing
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import NamedTuple

import pytest

from dagster_unified.connectors.sql.postgres import PostgresConnection, PostgresSink
from dagster_unified.engine.commit import WriteContext
from dagster_unified.errors import ConfigurationError, PipelineError, SinkError, UnavailableError
from dagster_unified.records import record_type
from tests.connectors.sql.support import execute, rows, staging_tables
from tests.connectors.support import LocalCommits, identity, write


class Sale(NamedTuple):
    id: int
    shop: str
    amount: float | None = None


MANY = [Sale(n, f"shop {n % 100}", n / 2) for n in range(20_000)]
"""More than travel with a committable, so that they are staged in a table."""


def sales(url):
    return rows(url, "SELECT * FROM sales ORDER BY id")


def test_columns_that_a_sink_makes_may_be_null_where_their_fields_may_be_none(postgres):
    write(PostgresSink("sales", postgres), [Sale(1, "a", 1.5)])
    columns = rows(
        postgres,
        "SELECT column_name, is_nullable FROM information_schema.columns"
        " WHERE table_name = 'sales' ORDER BY ordinal_position",
    )
    assert columns == [("id", "NO"), ("shop", "NO"), ("amount", "YES")]


class Named(NamedTuple):
    key: str
    value: int


@pytest.mark.parametrize(
    ("column", "spellings"),
    [
        ("uuid", ["2f1c8a52-0000-4000-8000-00000000000a", "2F1C8A52-0000-4000-8000-00000000000A"]),
        ("citext", ["Lisbon", "LISBON"]),
        ("char(9)", ["Lisbon", "Lisbon "]),
        ("inet", ["10.0.0.1", "10.0.0.1/32"]),
        ('text COLLATE "No Case"', ["Lisbon", "LISBON"]),
    ],
)
@pytest.mark.parametrize("few", [True, False])
def test_two_spellings_of_a_key_are_one_row(postgres, column, spellings, few):
    execute(
        postgres,
        "CREATE EXTENSION IF NOT EXISTS citext",
        "CREATE COLLATION IF NOT EXISTS \"No Case\" (provider=icu, locale='und-u-ks-level2', deterministic=false)",
        f"CREATE TABLE named (key {column} PRIMARY KEY, value int8)",
    )
    times = 1 if few else 5_000
    records = [Named(spelling, number) for number, spelling in enumerate(spellings)] * times
    write(PostgresSink("named", postgres, mode="upsert", key="key"), records)
    assert rows(postgres, "SELECT value FROM named") == [(1,)]


@pytest.mark.parametrize("count", [10, len(MANY)])
def test_a_trigger_may_leave_rows_out(postgres, count):
    execute(
        postgres,
        "CREATE TABLE sales (id int8, shop text, amount float8)",
        "CREATE FUNCTION odd() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN IF NEW.id % 2 = 0 THEN RETURN NULL; END IF; RETURN NEW; END $$",
        "CREATE TRIGGER odd BEFORE INSERT ON sales FOR EACH ROW EXECUTE FUNCTION odd()",
    )
    write(PostgresSink("sales", postgres), MANY[:count])
    assert rows(postgres, "SELECT count(*) FROM sales") == [(count // 2,)]


def test_names_are_taken_as_they_are_written(postgres):
    execute(postgres, 'CREATE SCHEMA "My Shop"')
    write(PostgresSink("My Shop.Select", postgres), [Sale(1, "a")])
    assert rows(postgres, 'SELECT * FROM "My Shop"."Select"') == [(1, "a", None)]


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Point:
    x: int
    at: datetime | None


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
    colour: Colour | None
    texts: list[str] | None
    numbers: list[int | None] | None
    days: list[date] | None
    prices: list[Decimal] | None
    point: Point | None
    points: list[Point] | None
    counts: dict[str, int] | None


UTC = timezone.utc
VALUES = [
    Everything(
        "é€\n\t\\N",
        -(2**63),
        -0.0,
        True,
        b"\x00\xff",
        date(1, 1, 1),
        datetime(2024, 2, 29, 12, 30, 1, 5, UTC),
        Decimal("-12345678901234567890.123456789012345678"),
        timedelta(days=-3, microseconds=1),
        Colour.RED,
        ["a", "", "{}"],
        [1, None],
        [date(2024, 1, 1)],
        [Decimal("1.5")],
        Point(1, datetime(2024, 1, 1, tzinfo=UTC)),
        [Point(2, None)],
        {"a": 1},
    ),
    Everything(*[None] * 17),
    Everything(
        "", 2**63 - 1, math.inf, False, b"", date(9999, 12, 31), datetime(9999, 12, 31, 23, 59, 59, 999999, UTC),
        Decimal(0), timedelta(0), Colour.BLUE, [], [], [], [], Point(-1, None), [], {},
    ),
]  # fmt: skip


@pytest.mark.parametrize("copies", [1, 400], ids=["with committables", "in a table"])
def test_every_type_arrives(postgres, copies):
    write(PostgresSink("everything", postgres), VALUES * copies)
    found = rows(postgres, "SELECT * FROM everything")
    expected = []
    for value in VALUES:
        points = None if value.points is None else [{"x": p.x, "at": None} for p in value.points]
        point = None
        if value.point is not None:
            point = {"x": value.point.x, "at": value.point.at and "2024-01-01T00:00:00Z"}
        colour = value.colour and value.colour.value
        expected.append((*value[:9], colour, *value[10:14], point, points, value.counts))
    assert len(found) == len(VALUES) * copies
    assert found == expected * copies
    (types,) = rows(postgres, "SELECT " + ", ".join(f"pg_typeof({name})::text" for name in Everything._fields)
                    + " FROM everything LIMIT 1")  # fmt: skip
    assert types == (
        "text", "bigint", "double precision", "boolean", "bytea", "date", "timestamp with time zone", "numeric",
        "interval", "text", "text[]", "bigint[]", "date[]", "numeric[]", "jsonb", "jsonb", "jsonb",
    )  # fmt: skip


class Loose(NamedTuple):
    id: str
    colour: Colour
    small: int
    price: Decimal
    code: str
    doc: str
    tags: list[str]
    point: Point


def test_columns_that_are_there_may_be_of_narrower_types(postgres):
    execute(
        postgres,
        "CREATE TYPE colour AS ENUM ('red', 'blue')",
        "CREATE DOMAIN code AS varchar(3) CHECK (VALUE <> '')",
        "CREATE TABLE loose (serial bigserial, id uuid PRIMARY KEY, small smallint, colour colour,"
        " price numeric(10,2), code code, doc jsonb, tags jsonb, point json, added timestamptz DEFAULT now())",
    )
    sink = PostgresSink("loose", postgres, mode="upsert", key="id")
    one = "2f1c8a52-0000-4000-8000-000000000001"
    record = Loose(one, Colour.BLUE, 7, Decimal("1.25"), "abc", '{"a": [1]}', ["x"], Point(1, None))
    write(sink, [record], epoch=0)
    write(sink, [record._replace(small=8)] * 5000, epoch=1)
    found = rows(postgres, "SELECT id::text, small, colour::text, price, code, doc, tags, point FROM loose")
    assert found == [(one, 8, "blue", Decimal("1.25"), "abc", {"a": [1]}, ["x"], {"x": 1, "at": None})]
    for wrong, says in [
        (record._replace(small=70_000), "smallint out of range"),
        (
            record._replace(code="abcd"),
            "field 'code' has longer texts than its column holds, which is code; cut them",
        ),
        (record._replace(id="?"), "invalid input syntax for type uuid"),
        (record._replace(doc="{"), "invalid input syntax for type json"),
    ]:
        with pytest.raises(SinkError, match=says):
            write(sink, [wrong], epoch=2)


class Precise(NamedTuple):
    money: Decimal
    at: datetime
    took: timedelta
    prices: list[Decimal]
    hundreds: int
    many_hundreds: list[int]


@pytest.mark.parametrize("copies", [1, 60_000])
def test_a_value_that_a_column_would_round_is_refused(postgres, copies):
    execute(
        postgres,
        "CREATE DOMAIN price AS numeric(20,2)",
        "CREATE TABLE precise (money price, at timestamptz(3), took interval(0), prices numeric(20,1)[],"
        " hundreds numeric(5,-2), many_hundreds numeric(5,-2)[])",
    )
    sink = PostgresSink("precise", postgres)
    fits = Precise(
        Decimal("1.25"), datetime(2024, 1, 1, 0, 0, 0, 1000, UTC), timedelta(seconds=1), [Decimal(2)], 1_200, [300]
    )
    write(sink, [fits] * copies, epoch=0)
    for wrong, name in [
        (fits._replace(money=Decimal("1.255")), "money"),
        (fits._replace(at=fits.at + timedelta(microseconds=1)), "at"),
        (fits._replace(took=timedelta(milliseconds=1)), "took"),
        (fits._replace(prices=[Decimal("0.25")]), "prices"),
        (fits._replace(hundreds=120), "hundreds"),
        (fits._replace(many_hundreds=[100, 90]), "many_hundreds"),
    ]:
        with pytest.raises(
            SinkError, match=f"field '{name}' has values with more digits than its column holds, which is"
        ):
            write(sink, [*[fits] * copies, wrong], epoch=1)
    assert rows(postgres, "SELECT DISTINCT money, count(*) OVER () FROM precise") == [(Decimal("1.25"), copies)]


@pytest.mark.parametrize("copies", [1, 60_000])
def test_text_that_the_server_cannot_hold_is_refused(postgres, copies):
    with pytest.raises(SinkError, match=r"sink 'sales': .*(NUL|0x00)"):
        write(PostgresSink("sales", postgres), [Sale(1, "a\0b")] * copies)
    write(PostgresSink("sales", postgres), [Sale(1, "a")])
    assert staging_tables(postgres) == []


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ("id text, shop text, amount float8", "column 'id' of public.sales is text, and the records' field needs int8"),
        ("id int8, shop text", "has no column 'amount'; .*ADD COLUMN \"amount\" float8"),
        ("id int8, shop text, amount float4", "column 'amount' of public.sales is real, and the records' field needs"),
        ("id int8, shop text, amount float8, who text NOT NULL", "column 'who' of public.sales may not be null"),
        ("id int8 GENERATED ALWAYS AS IDENTITY, shop text, amount float8", "column 'id' .* is generated"),
    ],
)
def test_a_table_that_the_records_do_not_fit_is_refused_before_anything_is_written(postgres, made, says):
    execute(postgres, f"CREATE TABLE sales ({made})")
    with pytest.raises(SinkError, match=says):
        write(PostgresSink("sales", postgres), MANY)
    assert staging_tables(postgres) == []


def test_upserts_need_a_unique_index(postgres):
    execute(postgres, "CREATE TABLE sales (id int8, shop text, amount float8)")
    sink = PostgresSink("sales", postgres, mode="upsert", key=("id", "shop"))
    with pytest.raises(SinkError, match=r'CREATE UNIQUE INDEX ON "public"."sales" \("id", "shop"\)'):
        write(sink, [Sale(1, "a")])
    execute(postgres, "CREATE UNIQUE INDEX ON sales (shop, id)")
    write(sink, [Sale(1, "a")])


def test_a_view_is_refused(postgres):
    execute(postgres, "CREATE VIEW sales AS SELECT 1::int8 AS id, ''::text AS shop, 0::float8 AS amount")
    with pytest.raises(SinkError, match=r"public\.sales is no table"):
        write(PostgresSink("sales", postgres), [Sale(1, "a")])


@pytest.fixture
def limited(postgres, postgres_server):
    """The connection of a user with no rights but those that a test grants."""
    execute(postgres, "CREATE ROLE limited LOGIN PASSWORD 'right'")
    database = postgres.rsplit("/", 1)[1]
    yield PostgresConnection(f"postgresql://limited:right@127.0.0.1:{postgres_server.port}/{database}")
    execute(postgres, "DROP OWNED BY limited CASCADE", "DROP ROLE limited")


def granted(postgres, attempt):
    """Does what each error says, until an attempt succeeds; returns the statements."""
    done = []
    while True:
        try:
            attempt()
            return done
        except ConfigurationError as error:
            done.append(str(error).split("; ")[-1])
            assert len(done) < 9, done
            execute(postgres, done[-1])


@pytest.mark.parametrize("library", [[], ["CREATE SCHEMA dagster_unified"]])
def test_missing_rights_are_granted_by_the_statements_of_the_errors(postgres, limited, library):
    execute(
        postgres,
        *library,
        "CREATE SCHEMA private",
        "CREATE TABLE private.sales (id int8 PRIMARY KEY, shop text, amount float8)",
    )
    sink = PostgresSink("private.sales", limited, mode="upsert", key="id")
    database = postgres.rsplit("/", 1)[1]
    assert granted(postgres, lambda: write(sink, MANY)) == [
        *(
            ['GRANT USAGE, CREATE ON SCHEMA "dagster_unified" TO "limited"']
            if library
            else [f'GRANT CREATE ON DATABASE "{database}" TO "limited"']
        ),
        'GRANT USAGE ON SCHEMA "private" TO "limited"',
        'GRANT INSERT, SELECT, UPDATE ON TABLE "private"."sales" TO "limited"',
    ]
    assert rows(postgres, "SELECT count(*) FROM private.sales") == [(len(MANY),)]
    execute(
        postgres,
        "ALTER TABLE dagster_unified.commits OWNER TO postgres",
        "REVOKE ALL ON dagster_unified.commits FROM limited",
    )
    again = granted(postgres, lambda: write(sink, MANY))
    assert again == ['GRANT SELECT, INSERT, UPDATE ON TABLE "dagster_unified".commits TO "limited"']


def test_a_schema_in_which_no_table_may_be_made_is_named(postgres, limited):
    execute(postgres, "CREATE SCHEMA dagster_unified AUTHORIZATION limited", "CREATE SCHEMA private")
    made = granted(postgres, lambda: write(PostgresSink("private.sales", limited), [Sale(1, "a")]))
    rights = [f'GRANT {right} ON SCHEMA "private" TO "limited"' for right in ("USAGE", "CREATE")]
    assert made == rights


def test_rows_that_a_policy_refuses_are_no_missing_right(postgres, limited):
    execute(
        postgres,
        "CREATE SCHEMA dagster_unified AUTHORIZATION limited",
        "CREATE TABLE sales (id int8 PRIMARY KEY, shop text, amount float8)",
        "GRANT ALL ON sales TO limited",
        "ALTER TABLE sales ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY own ON sales FOR ALL TO limited USING (shop = 'a')",
    )
    sink = PostgresSink("sales", limited)
    with pytest.raises(SinkError, match=r"row-level security policy for table .sales.; change the policy or"):
        write(sink, [Sale(1, "a"), Sale(2, "b")])
    assert rows(postgres, "SELECT * FROM sales") == []


def test_a_schema_that_changes_under_the_job_is_one_sentence(postgres):
    with closing(LocalCommits(PostgresSink("sales", postgres), Sale)) as commits:
        commits.write([[Sale(1, "a")]], [WriteContext(identity(epoch=0), "stage")])
        execute(postgres, "ALTER TABLE sales RENAME COLUMN shop TO store")
        with pytest.raises(SinkError, match=r'column "shop" of relation "sales" does not exist'):
            commits.write([[Sale(2, "a")]], [WriteContext(identity(epoch=1), "stage")])
        execute(postgres, "DROP TABLE sales")
        with pytest.raises(SinkError, match=r'relation "public.sales" does not exist; check the name, or create it'):
            commits.write([[Sale(2, "a")]], [WriteContext(identity(epoch=1), "stage")])


def test_a_server_that_is_away_is_transient(postgres_server):
    with pytest.raises(UnavailableError, match=r"sink 'sales': postgresql://127.0.0.1:1/shop"):
        write(PostgresSink("sales", "postgresql://127.0.0.1:1/shop"), [Sale(1, "a")])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"table": "a.b.c"}, "is no table of PostgreSQL"),
        ({"table": 'sa"les'}, "cannot be the name"),
        ({"table": "s" * 64}, "cannot be the name"),
    ],
)
def test_what_is_no_name_of_a_table_is_refused_when_the_graph_is_built(given, says):
    with pytest.raises(PipelineError, match=says):
        PostgresSink(**{"table": "sales", "connection": "postgresql://x/y", **given}).bound_to(record_type(Sale))
