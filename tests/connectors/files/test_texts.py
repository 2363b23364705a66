"""Times, dates and decimals in CSV and JSON: read as they are, or malformed, and never changed."""

import json
import re
from datetime import date, datetime, timezone
from decimal import Decimal
from typing import Annotated, NamedTuple

import msgspec
import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.api import Pipeline
from dagster_unified.connectors import CsvSource, DeltaSink, JsonSource
from dagster_unified.connectors.files.texts import JsonRows, explained
from dagster_unified.errors import MalformedInputError
from dagster_unified.records import record_type
from tests.support import MODES

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
    ("at", "2024-07-01 12:00:00 PST", TIME),
    ("at", "2024-03-10T02:30:00 America/New_York", TIME),
    ("at", "2024-07-01 12:00:00 UTC", TIME),
    ("at", "2024-07-01T12:00:00[Europe/Paris]", TIME),
    ("at", "2024-07-01T12:00:00 GMT+2", TIME),
    ("at", "2024-01", TIME),
    ("at", "2024-1-31T12:00:00Z", TIME),
    ("at", "2024-01-31T1:2:3Z", TIME),
    ("at", "T12:00:00Z", TIME),
    ("at", "2024-01-31T24:00:00Z", TIME),
    ("at", "2024-01-31T13:00:00+01", TIME),
    ("at", "2024-01-31T13:00:00+0100", TIME),
    ("at", "2024-01-31T12:00:00.5Z", NOON.replace(microsecond=500_000)),
    ("at", "2024-01-31", NOON.replace(hour=0)),
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
    frame = source.with_fixed_range().read(spark)
    for row in frame.where("__malformed IS NULL").collect():
        (found[row["number"]],) = [value for value in row[1:4] if value is not None]
    for row in frame.where("__malformed IS NOT NULL").select("number", "__malformed").collect():
        found[row["number"]] = row["__malformed"]["reason"]
    for number, (field, text, expected) in enumerate(CASES):
        what = found[number]
        assert isinstance(what, str) == isinstance(expected, str), (field, text, what)
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
    rows = source.with_fixed_range().read(spark).collect()
    assert [row["__malformed"] and row["__malformed"]["reason"] for row in rows] == [
        f"field 'at' {TIME}, to the microsecond and without a zone, in the years 1 to 9999; it is '{text}'", None, None
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


class Heard(NamedTuple):
    number: int
    text: str | None = None
    counts: dict[str, int] | None = None
    inner: Inner | None = None
    flags: list[bool] | None = None
    real: float | None = None


KNOWN = r"cannot be read as Heard\(.*\): "
ROWS = [
    (r'{"number": 1, "text": "\ud83d\ude00 \\ud83d"}', None),
    (r'{"number": 2, "text": "\ud83d"}', KNOWN + r"field 'text' is .*ud83d.*, with half a character of two surrogates"),
    (r'{"number": 3, "text": "\ude00\ud83d"}', KNOWN + "field 'text' is .*half a character"),
    (r'{"number": 4, "counts": {"a\uD83D": 1}}', KNOWN + "field 'counts' is .*half a character"),
    (r'{"number": 5, "text": "\\\ud83d\ude00"}', None),
    (
        '{"number": 6, "counts": {"a": 1, "b": null}}',
        r"field 'counts\[\]' is missing, and its type does not allow None",
    ),
    ('{"number": 7, "counts": {"a": 1, "b": "x"}}', KNOWN + r"field 'counts\['b'\]' is \"x\", not a whole number"),
    ('{"number": 8, "counts": [1]}', KNOWN + r"field 'counts' is \[1\], not an object of names and values"),
    ('{"number": 9, "inner": {"at": "2024-01-31", "many": 5}}', KNOWN + r"field 'inner\.many' is 5, not a list"),
    ('{"number": 10, "flags": [true, 1]}', KNOWN + r"field 'flags\[1\]' is 1, not true or false"),
    ('{"number": 11, "real": 1e400}', "field 'real' is not a number that a float holds; it is 'Infinity'"),
    ('{"number": 12, "real": 1e300}', None),
    ('{"number": 1.5}', KNOWN + "field 'number' is 1.5, not a whole number of 64 bits"),
    ('{"number": 9223372036854775808}', KNOWN + "field 'number' is 9223372036854775808, not a whole number of 64 bits"),
    ("[1]", KNOWN + r"it is \[1\], and an object is expected"),
    ('{"number": 16, "text": "open', KNOWN + "it is no JSON: Unterminated string"),
    ("null", KNOWN + "it is null, and an object is expected"),
]


def test_a_row_of_json_says_which_field_does_not_fit(spark, tmp_path):
    (tmp_path / "rows.json").write_text("".join(f"{row}\n\n" for row, _ in ROWS))
    (tmp_path / "latin.json").write_bytes('{"number": 0, "text": "caf\xe9"}\n'.encode("latin-1"))
    source = JsonSource(str(tmp_path), Heard, name="rows", on_malformed="divert")
    found = {}
    for row in source.with_fixed_range().read(spark).collect():
        bad = row["__malformed"]
        text = f'{{"number": {row["number"]}' if bad is None else bad["row"]
        found[text] = None if bad is None else explained(source.rows, bad["file"], bad["row"], bad["reason"])
    for row, expected in ROWS:
        reason = found[row if expected else row.partition(",")[0]]
        assert (reason is None) if expected is None else re.match(expected, reason), (row, reason)
    assert len(found) == len(ROWS) + 1


@pytest.mark.a_day(1)
@MODES
def test_half_a_surrogate_pair_and_a_null_in_a_dict_fail_a_run_with_their_line(run_in, tmp_path, mode):
    for number, (row, expected) in enumerate([ROWS[1], ROWS[5]]):
        (tmp_path / f"{number}.json").write_text(f'{{"number": 0}}\n{row}\n')
        pipeline = Pipeline("heard")
        pipeline.from_source(JsonSource(str(tmp_path / f"{number}.json"), Heard, name="rows")).print()
        checkpoints = {"execution.checkpointing.dir": f"{tmp_path}/{number}"} if mode == "STREAMING" else {}
        with pytest.raises(MalformedInputError, match=rf"\.json, line 2: {expected}"):
            run_in[mode](pipeline, checkpoints)


@given(st.text(st.sampled_from("\\uddD8d38f0") | st.characters(codec="utf-8"), max_size=12))
def test_json_that_a_writer_writes_is_explained_by_nothing(text):
    row = json.dumps({"number": 1, "text": text, "counts": {text: 1}})
    assert JsonRows(record_type(Heard, "rows").schema).explain("", row) is None
