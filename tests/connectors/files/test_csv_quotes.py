"""CSV is read by what its quotes say, and rows of separators or blanks are rows."""

import csv
import gzip
import io
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.api import Pipeline
from dagster_unified.connectors import CsvSource, FileSink
from dagster_unified.connectors.files.texts import CsvRows
from dagster_unified.errors import MalformedInputError, PipelineError
from tests.connectors.files.test_csv import read
from tests.support import MODES


class Note(NamedTuple):
    number: int
    text: str


class Loose(NamedTuple):
    a: str | None
    b: str | None
    c: int | None


class Word(NamedTuple):
    word: str


def rows(spark, source):
    """The rows of a source that fit, and why the others do not."""
    found = source.with_fixed_range().read(spark).collect()
    kept = [tuple(row)[:-1] for row in found if row["__malformed"] is None]
    reasons = [
        source.locate(spark, *(row["__malformed"][part] for part in ("file", "row", "reason"))).args[0]
        for row in found
        if row["__malformed"] is not None
    ]
    return kept, [reason.partition(".csv, ")[2].partition("; fix the file")[0] for reason in reasons]


def diverting(path, record=Note, **options):
    return CsvSource(str(path), record, name="notes", on_malformed="divert", **options)


CASES = [
    ('1,one\n2,"two\nlines"\n3,three\n', [(1, "one"), (3, "three")], 2),
    ('1,one\n2,"two\n', [(1, "one")], 1),
    ('1,"one"more\n2,two\n', [(2, "two")], 1),
    ('1,5" pipe\n2,"a ""q"""\n3,"x,y"\n', [(1, '5" pipe'), (2, 'a "q"'), (3, "x,y")], 0),
    ("1,one,more\n2\n3,three\n", [(3, "three")], 2),
    ('"1","one"\n"2" ,two\n', [(1, "one"), (2, "two")], 0),
    ('1,a\r\n\r\n   \r\n2,"b"\r\n', [(1, "a"), (2, "b")], 0),
]


@pytest.mark.a_day(1)
@pytest.mark.parametrize("packed", [False, True])
def test_a_row_whose_quotes_do_not_close_is_malformed_wherever_it_stands(spark, tmp_path, packed):
    for number, (content, fits, malformed) in enumerate(CASES):
        file = tmp_path / f"{number}.csv"
        if packed:
            file = file.with_suffix(".csv.gz")
        file.write_bytes((gzip.compress if packed else bytes)(f"number,text\n{content}".encode()))
        kept, reasons = rows(spark, diverting(file))
        assert (kept, len(reasons)) == (fits, malformed), content


def test_the_reason_names_the_field_what_was_found_and_what_was_expected(spark, tmp_path):
    (tmp_path / "notes.csv").write_text('number,text\n1,"two\nlines"\nmany,x\n2,b,c\n3\n')
    _, reasons = rows(spark, diverting(tmp_path / "notes.csv"))
    known = "cannot be read as Note(number: int64, text: string)"
    assert reasons == [
        f"line 2: {known}: field 'text' is '\"two', and the quotes of a text have to close at its end: 1,\"two",
        f'line 3: {known}: it has 1 columns, and 2 are expected: number, text: lines"',
        "line 4: field 'number' is not a whole number of 64 bits; it is 'many': many,x",
        f"line 5: {known}: it has 3 columns, and 2 are expected: number, text: 2,b,c",
        f"line 6: {known}: it has 1 columns, and 2 are expected: number, text: 3",
    ]


def test_with_several_lines_only_what_closes_is_a_text(spark, tmp_path):
    for number, (content, fits, malformed) in enumerate(
        [
            ('1,"two\nlines"\n2,b\n', [(1, "two\nlines"), (2, "b")], 0),
            ('1,"open\n2,b\n3,"c"\n4,d\n', [(4, "d")], 1),
            ('1,a\n2,"open\n3,c\n', [(1, "a")], 1),
        ]
    ):
        file = tmp_path / f"{number}.csv"
        file.write_text(f"number,text\n{content}")
        kept, reasons = rows(spark, diverting(file, multi_line=True))
        assert (kept, len(reasons)) == (fits, malformed), content


@pytest.mark.a_day(1)
@MODES
def test_a_file_that_ends_in_a_quote_fails_a_run(run_in, tmp_path, mode):
    (tmp_path / "notes.csv").write_text('number,text\n1,a\n2,"two\n')
    source = CsvSource(str(tmp_path / "notes.csv"), Note, name="notes")
    with pytest.raises(MalformedInputError, match=r"notes\.csv, line 3: .* field 'text' is '\"two', and the quotes"):
        read(run_in[mode], tmp_path, source)


@pytest.mark.a_day(1)
@MODES
def test_rows_of_separators_are_rows(run_in, tmp_path, mode):
    (tmp_path / "a.csv").write_text("a\tb\tc\n\t\t\n \t\t1\n\n   \n\x01\t\x02\t\n")
    pipeline = Pipeline("loose")
    source = CsvSource(str(tmp_path / "a.csv"), Loose, name="loose", delimiter="\t")
    pipeline.from_source(source).sink_to(FileSink(str(tmp_path / "out"), name="out", format="csv"))
    run_in[mode](pipeline)
    (file,) = [f for f in (tmp_path / "out").glob("*.csv") if len(f.read_text().splitlines()) > 1]
    assert file.read_text() == "a,b,c\n,,\n ,,1\n\x01,\x02,\n"


@pytest.mark.parametrize("header", [True, False])
def test_a_row_of_blanks_in_one_column_is_a_row(spark, tmp_path, header):
    (tmp_path / "a.csv").write_text(("word\n" if header else "") + '   \nword\n"a, b"\n\n"open\nend\n')
    kept, reasons = rows(spark, diverting(tmp_path / "a.csv", Word, header=header))
    assert kept == [("   ",), ("word",), ("a, b",), ("end",)]
    assert len(reasons) == 1


def test_a_large_file_is_read_in_pieces_by_the_same_rules(spark, tmp_path):
    for delimiter in (",", "\t"):
        content = f"number{delimiter}text\n" + f'1{delimiter}"a{delimiter}b"\n2{delimiter}"open\n' * 2000
        (tmp_path / "notes.csv").write_text(content)
        before = spark.conf.get("spark.sql.files.maxPartitionBytes")
        spark.conf.set("spark.sql.files.maxPartitionBytes", 4096)
        try:
            frame = diverting(tmp_path / "notes.csv", delimiter=delimiter).with_fixed_range().read(spark)
            assert frame.rdd.getNumPartitions() > 4
            assert frame.where("__malformed IS NULL").groupBy("number", "text").count().collect() == [
                (1, f"a{delimiter}b", 2000)
            ]
            assert frame.where("__malformed IS NOT NULL").count() == 2000
        finally:
            spark.conf.set("spark.sql.files.maxPartitionBytes", before)


@pytest.mark.a_day(1)
@pytest.mark.parametrize("header", ["text,number", "number", "number;text"])
def test_each_files_header_is_looked_at(spark, tmp_path, header):
    for number in range(6):
        (tmp_path / f"{number}.csv").write_text('\ufeff"number","text"\r\n1,a\r\n')
    assert len(rows(spark, diverting(tmp_path))[0]) == 6
    (tmp_path / "5.csv.gz").write_bytes(gzip.compress(f"{header}\n1,a\n".encode()))
    with pytest.raises(MalformedInputError, match=r"the header of .*5\.csv\.gz has the columns .* needs number, text,"):
        rows(spark, diverting(tmp_path))


def test_csv_has_no_nested_fields():
    class Deep(NamedTuple):
        items: list[int]

    with pytest.raises(PipelineError, match="field 'items' is nested, which CSV cannot hold"):
        CsvSource("a.csv", Deep)


FIELD = st.text(st.sampled_from('a",\\ \n\t')) | st.text(st.characters(codec="utf-8", exclude_characters="\r\n"))


@given(st.lists(FIELD, min_size=3, max_size=3), st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))
def test_what_a_writer_of_csv_writes_is_a_row(fields, quoting):
    text = io.StringIO()
    csv.writer(text, quoting=quoting, lineterminator="\n").writerow(fields)
    assert CsvRows(("a", "b", "c"), ",", '"').explain("", text.getvalue()[:-1]) is None


@given(st.text(st.sampled_from('a",\n'), max_size=12))
def test_a_row_is_one_exactly_where_its_quotes_close(text):
    """Held against a walk over its characters."""
    state, columns, broken = "start", 1, False
    for character in text:
        if state == "start":
            state = "quoted" if character == '"' else "plain"
        elif state == "quoted":
            state = "closed" if character == '"' else "quoted"
            continue
        elif state == "closed":
            if character == '"':
                state = "quoted"
                continue
            broken = broken or character not in ", "
        if state in ("plain", "closed"):
            broken = broken or character == "\n"
            if character == ",":
                state, columns = "start", columns + 1
    is_row = not broken and state != "quoted" and columns == 2
    assert (CsvRows(("a", "b"), ",", '"').explain("", text) is None) == is_row
