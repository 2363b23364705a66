"""How what new code writes is compared with what the old code has written meanwhile."""

from typing import NamedTuple

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.connectors.protocol.commits import Rewritten
from dagster_unified.engine.comparison import Compared, compare_new_code

SCHEMA = pa.schema([("key", pa.string()), ("value", pa.int64())])


class Row(NamedTuple):
    key: str
    value: int


def table(rows):
    return pa.Table.from_pylist([row._asdict() for row in rows], SCHEMA)


def wrote(rows, moved=()):
    """What an append did, and the rows that it moved from one file to another."""
    return Rewritten(table([*rows, *moved]), table(moved))


def upserted(rows, before=None):
    """What some upserts did to a table with these rows, all of which were in one file."""
    before = before or {}
    after = {**before, **{row.key: row for row in rows}}
    return Rewritten(table(after.values()), table(before.values()))


rows = st.lists(st.builds(Row, st.sampled_from("abc"), st.integers(0, 3)), max_size=12)


@given(rows, rows, rows, st.data())
def test_appended_rows_are_equal_where_the_new_code_is_between_two_epochs_of_the_old(had, later, moved, data):
    ahead = later[: data.draw(st.integers(0, len(later)))]
    new = data.draw(st.permutations([*had, *ahead]))
    compared = compare_new_code(table(new), wrote(had, moved), [wrote([*had, *later], moved)])
    assert (compared.different, compared.is_equal) == (0, True)


@given(rows, rows, st.integers(0, 3))
def test_each_appended_row_that_only_one_of_them_has_counts(had, later, value):
    odd = Row("odd", value)
    old = [wrote([*had, odd]), wrote([*had, odd, *later])]
    assert compare_new_code(table(had), old[0], old[1:]).different == 1
    extra = compare_new_code(table([*had, odd, odd]), old[0], old[1:])
    assert extra.different == 1
    assert extra.first[0].new is not None
    assert extra.first[0].old is None


@given(rows, rows, rows, st.data())
def test_upserted_rows_are_as_the_old_code_had_them_or_has_them_later(before, had, later, data):
    start = {row.key: row for row in before}
    old = [upserted(had, start), upserted([*had, *later], start)]
    reached = {row.key: row for row in had}
    new = {**reached, **{row.key: row for row in later}} if data.draw(st.booleans()) else reached
    compared = compare_new_code(table(new.values()), old[0], old[1:], ["key"])
    assert (compared.different, compared.undecided) == (0, 0)


@given(rows.filter(bool), rows)
def test_an_upserted_row_that_is_another_differs_unless_the_old_code_has_changed_it_since(had, later):
    old = [upserted(had), upserted([*had, *later])]
    new = {row.key: row for row in had}
    key = had[0].key
    new[key] = Row(key, 99)
    compared = compare_new_code(table(new.values()), old[0], old[1:], ["key"])
    at_first, at_last = ({row.key: row for row in some}[key] for some in (had, [*had, *later]))
    assert (compared.different, compared.undecided) == ((1, 0) if at_first == at_last else (0, 1))


@given(rows.filter(bool))
def test_a_row_that_the_new_code_does_not_write_differs(had):
    new = {row.key: row for row in had}
    del new[had[0].key]
    old = upserted(had)
    compared = compare_new_code(table(new.values()), old, [old], ["key"])
    assert compared.different == 1
    assert compared.first[0].new is None


def test_columns_that_only_one_has_are_left_out_and_named():
    new = table([Row("a", 1)]).append_column("share", pa.array([0.5]))
    old = wrote([Row("a", 1)])
    compared = compare_new_code(new, old, [old])
    assert (compared.is_equal, compared.columns) == (True, ("share",))


def test_rows_of_which_none_is_decided_are_not_equal():
    assert not Compared(rows=2, undecided=2).is_equal
    assert Compared(rows=2, undecided=1).is_equal
    assert Compared(rows=0).is_equal
