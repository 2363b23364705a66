"""CSV as RFC 4180 has it, and most programs write it: no value is changed on its way in or out."""

import csv
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagster_unified.api import Pipeline
from dagster_unified.connectors import CsvSource, FileSink
from dagster_unified.errors import MalformedInputError, PipelineError
from tests.depth import examples
from tests.support import MODES

TEXTS = [
    "plain", "", " ", " lead", "trail ", "tab\t", "a,b", 'q"q', '"', '""', "\\", 'back\\"slash', "a,b\\", "\\n", "'",
    "#no", "null", "NULL", "nan", "0", "-", "1e5", "\ufeffmark", "\u2028line", "a\x00b", "\U0001f600", "ümlaut", "a;b",
    "=1+1",
]  # fmt: skip


class Line(NamedTuple):
    number: int
    text: str
    maybe: str | None


class Everything(NamedTuple):
    number: int
    text: str | None
    real: float | None
    at: datetime | None
    day: date | None
    took: timedelta | None
    money: Decimal | None
    yes: bool | None


LINES = [Line(number, text, text or None) for number, text in enumerate(TEXTS)]


def read(run, folder, source):
    pipeline = Pipeline("reading")
    pipeline.from_source(source).sink_to(FileSink(f"{folder}/read", name="read"))
    run(pipeline)
    rows = pq.read_table(f"{folder}/read").to_pylist()
    for row in rows:  # Spark's files have an interval as a number
        if row.get("took") is not None:
            row["took"] = timedelta(microseconds=row["took"])
    return sorted((source.records.python(**row) for row in rows), key=lambda record: record.number)


@pytest.mark.a_day(1)
@MODES
def test_what_other_programs_have_written_is_read_as_it_is(run_in, tmp_path, mode):
    lines = [line for line in LINES if line.text]  # most write no difference between an empty text and none
    (tmp_path / "in").mkdir()
    programs = list(product([csv.QUOTE_MINIMAL, csv.QUOTE_NONNUMERIC], ["\n", "\r\n"]))
    for number, (quoting, ending) in enumerate(programs):
        with (tmp_path / f"in/{number}.csv").open("w", newline="") as file:
            writer = csv.writer(file, quoting=quoting, lineterminator=ending)
            writer.writerow(Line._fields)
            writer.writerows(lines)
    found = read(run_in[mode], tmp_path, CsvSource(str(tmp_path / "in"), Line, name="lines"))
    assert found == [line for line in lines for _ in programs]


@pytest.mark.parametrize(("options", "empty"), [({}, None), ({"null_value": "NA"}, "")])
def test_an_empty_text_in_quotes_is_missing_unless_something_else_is(run_on_spark, tmp_path, options, empty):
    (tmp_path / "lines.csv").write_text('number,text,maybe\n1,a,""\n2,b,\n3,c,NA\n')
    found = read(run_on_spark, tmp_path, CsvSource(str(tmp_path / "lines.csv"), Line, name="lines", **options))
    assert [line.maybe for line in found] == [empty, None, "NA" if empty is None else None]


def test_backslashes_before_quotes_are_read_where_that_is_said(run_on_spark, tmp_path):
    (tmp_path / "lines.csv").write_text('number,text,maybe\n1,"q\\"q","a\\\\"\n')
    found = read(run_on_spark, tmp_path, CsvSource(str(tmp_path / "lines.csv"), Line, name="lines", escape="\\"))
    assert found == [Line(1, 'q"q', "a\\")]


def test_an_escape_is_one_character():
    with pytest.raises(PipelineError, match="source 'lines': escape is one character, not ''"):
        CsvSource("lines.csv", Line, name="lines", escape="")


def records(texts):
    return st.builds(
        Everything,
        number=st.just(0),
        text=st.none() | texts,
        real=st.none() | st.floats(allow_nan=False),
        at=st.none() | st.datetimes(datetime(1900, 1, 1), timezones=st.just(timezone.utc)),
        day=st.none() | st.dates(),
        took=st.none() | st.timedeltas(timedelta(days=-10_000), timedelta(days=10_000)),
        money=st.none() | st.decimals(-(10**15), 10**15, places=3),
        yes=st.none() | st.booleans(),
    )


ONE_LINE = st.sampled_from(TEXTS) | st.text(st.characters(codec="utf-8", exclude_characters="\r\n\ufffd"), max_size=20)


SEVERAL_LINES = st.text(st.sampled_from('a",\\\n\r')) | st.text(
    st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=8
)


@pytest.mark.a_day(1)
@pytest.mark.parametrize(("texts", "multi_line"), [(ONE_LINE, False), (SEVERAL_LINES, True)])
@settings(max_examples=examples(2), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_is_written_comes_back(run_on_spark, tmp_path_factory, texts, multi_line, data):
    folder, drawn = tmp_path_factory.mktemp("csv"), data.draw(st.lists(records(texts), min_size=1, max_size=40))
    found = [record._replace(number=number) for number, record in enumerate(drawn)]
    pipeline = Pipeline("writing")
    pipeline.from_collection(found, Everything, name="found").sink_to(
        FileSink(f"{folder}/out", name="out", format="csv")
    )
    run_on_spark(pipeline)
    source = CsvSource(f"{folder}/out/*.csv", Everything, name="in", null_value="(none)", multi_line=multi_line)
    assert read(run_on_spark, folder, source) == found


def test_another_program_reads_what_is_written(run_on_spark, tmp_path):
    lines = [*LINES, Line(100, "two\nlines", None), Line(101, "two\r\nlines", "\r")]
    pipeline = Pipeline("writing")
    pipeline.from_collection(lines, Line, name="lines").sink_to(
        FileSink(str(tmp_path / "out"), name="out", format="csv")
    )
    run_on_spark(pipeline)
    found = []
    for file in Path(tmp_path / "out").glob("*.csv"):
        with file.open(newline="") as text:
            found += list(csv.reader(text))[1:]
    assert sorted((int(number), text, maybe) for number, text, maybe in found) == [
        (line.number, line.text, line.maybe or "") for line in lines
    ]


BROKEN = [
    Line(number, text, None)
    for number, text in enumerate(
        ["two\nlines", "\n", "a\n\nb", "two\r\nlines", "\r", 'q"\n"q', "end\n", "1,a\n2,b", "one"]
    )
]


@pytest.mark.a_day(2)
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@MODES
def test_texts_of_several_lines_are_read_where_that_is_said(run_in, tmp_path, ending, mode):
    with (tmp_path / "lines.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator=ending)
        writer.writerow(Line._fields)
        writer.writerows(BROKEN)
    source = CsvSource(str(tmp_path / "lines.csv"), Line, name="lines", multi_line=True)
    # Spark reads a break in a text that is as those of the file's lines as one character
    assert read(run_in[mode], tmp_path, source) == [
        line._replace(text=line.text.replace(ending, "\n")) for line in BROKEN
    ]


def test_the_line_of_a_row_of_several_lines_is_its_first(run_on_spark, tmp_path):
    (tmp_path / "lines.csv").write_text('number,text,maybe\n1,"a\nb",c\nmany,"d\ne",f\n')
    source = CsvSource(str(tmp_path / "lines.csv"), Line, name="lines", multi_line=True)
    with pytest.raises(MalformedInputError, match=r"lines\.csv, line 4: field 'number' is not a whole number"):
        read(run_on_spark, tmp_path, source)


@pytest.mark.a_day(1)
@MODES
def test_bytes_that_are_not_utf_8_make_their_row_malformed(run_in, tmp_path, mode):
    (tmp_path / "lines.csv").write_bytes("text\ncafé\n".encode() + "cafè\n".encode("latin-1"))
    pipeline = Pipeline("lines")
    pipeline.from_source(CsvSource(str(tmp_path / "lines.csv"), Note, name="lines")).print()
    with pytest.raises(MalformedInputError, match=r"field 'text' has bytes that are not UTF-8, or U\+FFFD"):
        run_in[mode](pipeline)


class Raw(NamedTuple):
    content: bytes


class Note(NamedTuple):
    text: str | None


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (Note(None), "has one field, which may be None, and an empty line is no row of CSV"),
        (Raw(b""), "field 'content' is bytes, which CSV cannot hold"),
    ],
)
def test_what_csv_cannot_hold_is_not_written_as_csv(record, says):
    stream = Pipeline("notes").from_collection([record], type(record), name="notes")
    with pytest.raises(PipelineError, match=says):
        stream.sink_to(FileSink("/tmp/notes", format="csv"))
