"""Lists in arrays of PostgreSQL: of enums, and of texts that have a length."""

from enum import Enum
from typing import NamedTuple

import pytest

from dagster_unified.connectors.sql.postgres import PostgresSink, PostgresSource
from dagster_unified.errors import SinkError
from tests.connectors.sql.support import everything, execute, rows
from tests.connectors.support import write


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Painted(NamedTuple):
    id: int
    colours: list[Colour] | None


class Other(NamedTuple):
    id: int
    colours: list[str]


class Tagged(NamedTuple):
    id: int
    tags: list[str | None]


def test_lists_of_enums_are_written_to_arrays_of_enums_and_read(postgres):
    execute(
        postgres,
        "CREATE TYPE colour AS ENUM ('red', 'blue')",
        "CREATE DOMAIN colours AS colour[]",
        "CREATE TABLE plain (id bigint, colours colour[])",
        "CREATE TABLE below (id bigint, colours colours)",
    )
    painted = [Painted(1, [Colour.BLUE, Colour.RED]), Painted(2, []), Painted(3, None)]
    for table in ("plain", "below"):
        write(PostgresSink(table, postgres), painted, execution=table)
        assert sorted(everything(PostgresSource(table, Painted, postgres))) == painted
    with pytest.raises(SinkError, match='invalid input value for enum colour: "green"'):
        write(PostgresSink("plain", postgres), [Other(1, ["green"])], execution="other")


@pytest.mark.parametrize("column", ["varchar(3)[]", "short"])
def test_a_text_that_an_array_would_cut_off_is_refused(postgres, column):
    execute(postgres, "CREATE DOMAIN short AS varchar(3)[]", f"CREATE TABLE tagged (id bigint, tags {column})")
    sink = PostgresSink("tagged", postgres)
    write(sink, [Tagged(1, ["abc", None])])
    with pytest.raises(SinkError, match=r"field 'tags' has longer texts than its column holds, which is (char|short)"):
        write(sink, [Tagged(2, ["abcd"])], execution="second")
    assert rows(postgres, "SELECT id, tags FROM tagged") == [(1, ["abc", None])]


def test_blanks_are_nothing_to_an_array_of_char(postgres):
    execute(postgres, "CREATE TABLE tagged (id bigint, tags char(3)[])")
    write(PostgresSink("tagged", postgres), [Tagged(1, ["abc", "a ", "abc  "])])
    with pytest.raises(SinkError, match=r"value too long for type character\(3\)"):
        write(PostgresSink("tagged", postgres), [Tagged(2, ["abcd"])], execution="second")
    assert everything(PostgresSource("tagged", Tagged, postgres)) == [Tagged(1, ["abc", "a", "abc"])]


class Coded(NamedTuple):
    id: int
    code: str | None


@pytest.mark.parametrize(
    ("column", "kept", "cut"),
    [
        ("varchar(3)", ["abc", "ab ", None], ["abcd", "abc  "]),
        ("short", ["abc", "ab ", None], ["abc "]),
        ("varchar", ["abc  ", None], []),
    ],
)
def test_a_text_that_a_column_would_cut_off_or_strip_is_refused(postgres, column, kept, cut):
    execute(postgres, "CREATE DOMAIN short AS varchar(3)", f"CREATE TABLE coded (id bigint, code {column})")
    sink, coded = PostgresSink("coded", postgres), [Coded(number, text) for number, text in enumerate(kept)]
    write(sink, coded)
    for text in cut:
        with pytest.raises(SinkError, match=r"field 'code' has longer texts than its column holds, which is (char|s)"):
            write(sink, [Coded(9, text)], execution=text)
    assert sorted(everything(PostgresSource("coded", Coded, postgres))) == coded
