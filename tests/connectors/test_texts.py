"""Times, dates and decimals in CSV and JSON: read as they are, or malformed, and never changed."""

import json
from datetime import date, datetime, timezone
from decimal import Decimal
from typing import Annotated, NamedTuple

import msgspec
import pytest
from deltalake import DeltaTable

from dagster_unified.api import CsvSource, DeltaSink, JsonSource, Pipeline
from dagster_unified.errors import MalformedInputError

NOON = datetime(2024, 1, 31, 12, tzinfo=timezone.utc)
TIME, DATE, NUMBER = (
    "is not a time in ISO 8601",
    "is not a date such as 2024-01-31",
    "is not a number of at most 18 digits",
)


class Row(NamedTuple):
    number: int
    at: datetime | None = None
    day: date | None = None
    money: Decimal | None = None


CASES = [
    ("at", "2024-01-31T12:00:00Z", NOON),
    ("at", "2024-01-31 12:00:00", NOON),
    ("at", "2024-01-31T13:00:00+01:00", NOON),
    ("at", "2024-01-31T12:00:00.123456000Z", NOON.replace(microsecond=123456)),
    ("at", "2024-01-31T12:00:00.123456789Z", TIME),
    ("at", "2024-02-31", TIME),
    ("at", 1706702400000, TIME),
    ("at", 1706702400, TIME),
    ("at", 2024, TIME),
    ("at", "noon", TIME),
    ("at", "20000-01-01T00:00:00Z", TIME),
    ("at", "9999-12-31T23:59:59-01:00", TIME),
    ("at", "0000-12-31T23:59:59Z", TIME),
    ("at", "-0044-03-15T12:00:00Z", TIME),
    ("day", "2024-01-31", NOON.date()),
    ("day", "2024-1-3", date(2024, 1, 3)),
    ("day", "2024-01-31T00:00:00.000Z", NOON.date()),
    ("day", "2024-01-31T12:00:00Z", DATE),
    ("day", "2024-02-31", DATE),
    ("day", 19753, DATE),
    ("day", 2024, DATE),
    ("day", "0001-01-01", date(1, 1, 1)),
    ("day", "9999-12-31", date(9999, 12, 31)),
    ("day", "10000-01-01", DATE),
    ("day", "0000-12-31", DATE),
    ("money", "1.10", Decimal("1.1")),
    ("money", 12, Decimal(12)),
    ("money", "1.5e3", Decimal(1500)),
    ("money", "0.123456789012345678", Decimal("0.123456789012345678")),
    ("money", "0.1234567890123456789", NUMBER),
    ("money", "1e-20", NUMBER),
    ("money", "1234567.0000000000000000001", NUMBER),
    ("money", "99999999999999999999.000000000000000001", Decimal("99999999999999999999.000000000000000001")),
    ("money", "100000000000000000000", NUMBER),
    ("money", "much", NUMBER),
]


def write(folder, form):
    if form == "csv":
        lines = [
            f"{number},{','.join(str(text) if field == one else '' for one in Row._fields[1:])}"
            for number, (field, text, _) in enumerate(CASES)
        ]
        (folder / "rows.csv").write_text("\n".join(["number,at,day,money", *lines]) + "\n")
        return CsvSource(str(folder / "rows.csv"), Row, name="rows", on_malformed="divert")
    rows = [{"number": number, field: text} for number, (field, text, _) in enumerate(CASES)]
    (folder / "rows.json").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return JsonSource(str(folder / "rows.json"), Row, name="rows", on_malformed="divert")


@pytest.mark.parametrize("form", ["csv", "json"])
def test_a_text_is_read_as_it_is_or_not_at_all(spark, tmp_path, form):
    source = write(tmp_path, form)
    found = {}
    frame = source.settled().read(spark)
    for row in frame.where("__malformed IS NULL").collect():
        (found[row["number"]],) = [value for value in row[1:4] if value is not None]
    for row in frame.where("__malformed IS NOT NULL").select("number", "__malformed").collect():
        found[row["number"]] = row["__malformed"]["reason"]
    for number, (field, text, expected) in enumerate(CASES):
        what = found[number]
        if isinstance(expected, str):
            assert f"field '{field}' {expected}" in what, (field, text, what)
        else:
            what = what.replace(tzinfo=timezone.utc) if field == "at" else what
            assert what == expected, (field, text, what)


class Naive(NamedTuple):
    at: Annotated[datetime, msgspec.Meta(tz=False)]


@pytest.mark.parametrize("text", ["2024-01-31T12:00:00Z", "2024-01-31 12:00:00+01:00", "2024-01-31T12:00 UTC"])
def test_a_time_with_a_zone_is_none_without(spark, tmp_path, text):
    (tmp_path / "rows.csv").write_text(f"at\n{text}\n2024-01-31T12:00:00\n2024-01-31\n")
    source = CsvSource(str(tmp_path / "rows.csv"), Naive, name="rows", on_malformed="divert")
    rows = source.settled().read(spark).collect()
    assert [row["__malformed"] and row["__malformed"]["reason"] for row in rows] == [
        f"field 'at' {TIME}, to the microsecond and without a zone, in the years 1 to 9999", None, None
    ]  # fmt: skip


class Inner(NamedTuple):
    at: datetime
    many: list[Decimal]


class Outer(NamedTuple):
    number: int
    inner: Inner | None
    by_name: dict[str, date]


def test_texts_within_other_values(run_on_spark, tmp_path):
    good = {"number": 1, "inner": {"at": "2024-01-31T12:00:00Z", "many": [1, "2.5"]}, "by_name": {"a": "2024-01-31"}}
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "good.json").write_text(json.dumps(good) + '\n{"number": 2, "by_name": {}}\n')
    run(run_on_spark, tmp_path, "good")
    (first, second) = sorted(
        DeltaTable(str(tmp_path / "good")).to_pyarrow_table().to_pylist(), key=lambda r: r["number"]
    )
    assert first["inner"] == {"at": NOON, "many": [Decimal(1), Decimal("2.5")]}
    assert dict(first["by_name"]) == {"a": NOON.date()}
    assert second["inner"] is None
    assert dict(second["by_name"]) == {}
    for number, (where, problem) in enumerate(
        [
            ({"inner": {**good["inner"], "at": 1706702400}}, rf"field 'inner\.at' {TIME}"),
            ({"inner": {**good["inner"], "many": [1, 1e-30]}}, rf"field 'inner\.many\[\]' {NUMBER}"),
            ({"by_name": {"a": "2024-01-31T12:00:00Z"}}, rf"field 'by_name\[\]' {DATE}"),
        ]
    ):
        (tmp_path / "in" / "good.json").write_text(json.dumps({**good, **where}) + "\n")
        with pytest.raises(MalformedInputError, match=f"line 1: {problem}"):
            run(run_on_spark, tmp_path, f"bad{number}")


def run(run_on_spark, folder, table):
    pipeline = Pipeline(table)
    source = JsonSource(str(folder / "in" / "*.json"), Outer, name="rows")
    pipeline.from_source(source).sink_to(DeltaSink(str(folder / table), name="table"))
    run_on_spark(pipeline)
