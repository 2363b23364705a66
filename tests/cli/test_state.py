"""`dagster-unified state`: what savepoints hold, on the terminal and as JSON."""

import json
from datetime import datetime, timezone
from functools import partial

import pyarrow as pa
import pytest

from dagster_unified.cli import terminal
from dagster_unified.operators.time import MAX_TIMESTAMP
from dagster_unified.state import EverythingRead, Savepoint

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
LAST = pa.struct([("at", pa.timestamp("us", "UTC")), ("amount", pa.int64())])
STATE = pa.table(
    {
        "shop": ["north", "south"],
        "total": [100, 7],
        "last": pa.array([{"at": AT, "amount": None}, None], LAST),
        "seen": pa.array([[(5, 2), (6, 1)], None], pa.map_(pa.int64(), pa.int64())),
    }
)
CHANGED = pa.table(
    {
        "shop": ["north", "east"],
        "total": [101, 1],
        "last": pa.array([{"at": AT, "amount": None}, None], LAST),
        "seen": pa.array([[(6, 1), (5, 2)], None], pa.map_(pa.int64(), pa.int64())),
    }
)


@pytest.fixture
def cli(cli, tmp_path, monkeypatch):
    """Runs `dagster-unified state` next to the savepoints a and b."""
    new = Savepoint.new("shops").with_position("sales", EverythingRead(4)).with_watermark("totals", AT)
    timers = pa.table({"shop": ["north", "south"], "timestamp": [int(AT.timestamp() * 1000), MAX_TIMESTAMP]})
    new.with_state("totals", STATE, key="shop", timers=timers, name="Totals").write(f"{tmp_path}/a")
    changed = new.with_state("totals", CHANGED, key="shop", timers=timers.slice(0, 1))
    pairs = pa.table({"shop": ["x"], "day": [1], "n": [1]})
    changed.with_state("pairs", pairs, key=["shop", "day"]).write(f"{tmp_path}/b")
    monkeypatch.setenv("COLUMNS", "300")
    terminal.out.cache_clear()  # a console of an earlier test has the width of its terminal
    yield partial(cli, "state")
    terminal.out.cache_clear()


def cells(line):
    return [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")]


def test_ls_lists_operators_with_their_states_and_sources_with_what_was_read(cli, tmp_path):
    code, out, err = cli("ls", "a")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("shops: taken 20")
    assert " UTC (written by a program), by version " in lines[0]
    assert cells(lines[2]) == ["operator", "name", "rows", "bytes", "key", "states", "watermark"]
    size = sum(file.stat().st_size for file in (tmp_path / "a").rglob("*.parquet"))
    first = ["totals", "Totals", "2", f"{size:,}", "shop", "total: int64", "2026-01-02 03:04:05.000"]
    assert cells(lines[4]) == first
    assert cells(lines[5])[5] == "last: struct<at: timestamp[us, tz=UTC], amount: int64>"
    assert "│ sales  │ the first 4 records │" in out


def test_ls_as_json(cli):
    code, out, _ = cli("ls", "a", "--json")
    found = json.loads(out)
    assert (code, found["pipeline"], found["sources"]) == (0, "shops", {"sales": "the first 4 records"})
    (totals,) = found["operators"]
    assert (totals["uid"], totals["rows"], totals["key"]) == ("totals", 2, ["shop"])
    assert totals["states"][0] == {"name": "total", "column": "total", "type": "int64"}
    assert totals["watermark"] == int(AT.timestamp() * 1000)


def test_show_prints_keys_first_and_timers_as_times(cli):
    code, out, err = cli("show", "a", "totals")
    lines = out.splitlines()
    assert (code, err, lines[-1]) == (0, "", "2 of 2 rows")
    assert cells(lines[1]) == ["shop", "total", "last", "seen", "event timers"]
    last = "{at: 2026-01-02 03:04:05+00:00, amount: None}"
    assert cells(lines[3]) == ["north", "100", last, "{5: 2, 6: 1}", "2026-01-02 03:04:05.000"]
    assert cells(lines[4]) == ["south", "7", "", "", str(MAX_TIMESTAMP)]
    assert cli("show", "a", "totals", "--rows", "1")[1].splitlines()[-1] == "1 of 2 rows"


def test_show_prints_all_of_one_key(cli):
    assert cli("show", "a", "totals", "--key", "north")[1].splitlines() == [
        "shop = north",
        "total = 100",
        "last = {at: 2026-01-02 03:04:05+00:00, amount: None}",
        "seen = {5: 2, 6: 1}",
        "event timers = 2026-01-02 03:04:05.000",
    ]
    assert cli("show", "b", "pairs", "--key", "x", "--key", "1")[1].splitlines() == ["shop = x", "day = 1", "n = 1"]


def test_a_key_that_is_a_tuple_is_read_and_asked_for_as_one(cli, tmp_path):
    keys = pa.array([{"_1": "x", "_2": 1}, {"_1": "y", "_2": 2}])
    Savepoint.new("shops").with_state("pairs", pa.table({"key": keys, "n": [3, 4]}), "key").write(f"{tmp_path}/tuples")
    lines = cli("show", "tuples", "pairs")[1].splitlines()
    assert [cells(line) for line in lines[3:5]] == [["(x, 1)", "3"], ["(y, 2)", "4"]]
    assert cli("show", "tuples", "pairs", "--key", "(y, 2)")[1].splitlines() == ["key = (y, 2)", "n = 4"]


def test_show_as_json_prints_a_line_for_each_key(cli):
    first, second = map(json.loads, cli("show", "a", "totals", "--json")[1].splitlines())
    assert first["last"] == {"at": "2026-01-02T03:04:05Z", "amount": None}
    assert second == {
        "shop": "south",
        "total": 7,
        "__event_timers": [{"timestamp": MAX_TIMESTAMP, "generation": 0}],
    }


def test_diff_says_which_keys_are_in_one_only_and_what_changed(cli):
    code, out, err = cli("diff", "a", "b")
    assert (code, err) == (1, "")
    assert out.splitlines() == [
        "totals: 0 keys are the same, 1 changed, 1 only in A, 1 only in B",
        "- shop=south",
        "+ shop=east",
        "~ shop=north: total: 100 -> 101",
        "pairs: 0 keys are the same, 0 changed, 0 only in A, 1 only in B",
        "+ shop=x, day=1",
    ]


def test_diff_of_one_operator_and_as_json(cli):
    assert cli("diff", "a", "b", "--uid", "pairs")[1].splitlines()[1:] == ["+ shop=x, day=1"]
    code, out, _ = cli("diff", "a", "b", "--uid", "totals", "--json")
    (found,) = json.loads(out)
    assert (code, found["only_a"], found["only_b"], found["changed"], found["same"]) == (1, 1, 1, 1, 0)
    assert found["first_changed"] == [{"key": {"shop": "north"}, "before": {"total": 100}, "after": {"total": 101}}]


def test_savepoints_that_are_alike_do_not_differ(cli):
    assert cli("diff", "a", "a") == (0, "totals: 2 keys are the same, 0 changed, 0 only in A, 0 only in B\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ls", "nowhere"), "there is no savepoint in "),
        (("show", "a", "total"), "has no state of 'total': there is state of totals; did you mean 'totals'?"),
        (("show", "a", "totals", "--key", "west"), "'totals' has no state of key west in "),
        (
            ("show", "b", "pairs", "--key", "x"),
            "'pairs' is keyed by shop, day: give --key once for each of them, not 1 times",
        ),
        (("diff", "a", "b", "--uid", "total"), "has no state of 'total'"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(cli, arguments, message):
    code, out, err = cli(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
