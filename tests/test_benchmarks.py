"""What the benchmarks print and keep."""

import io
import json

import pytest
from rich.console import Console

from benchmarks.bars import Bar, Measurement, Options
from benchmarks.results import Family, run

SMALL = Options(records=10, keys=2, rounds=1, one_key_records=10, flink=False, flink_records=1, stream_records=10)


def quick(options):
    return [Bar("quick.ratio", 0.95, 0.9)], [Measurement("quick", 1.5, (1.4, 1.5))]


def slow(options):
    return [Bar("slow.memory", 200.0, 150, at_most=True)], []


def broken(options):
    raise RuntimeError("no more memory")


def test_results_are_printed_and_written_as_each_family_ends(tmp_path):
    path, text = tmp_path / "results" / "latest.json", io.StringIO()
    with pytest.raises(RuntimeError, match="no more memory"):
        run([Family("quick", quick, 1), Family("broken", broken, 2)], SMALL, path, Console(file=text, width=120))
    assert list(json.loads(path.read_text())["families"]) == ["quick"]
    assert "1.4, 1.5" in text.getvalue()


def test_each_familys_last_result_is_kept(tmp_path):
    path, console = tmp_path / "latest.json", Console(file=io.StringIO())
    assert run([Family("quick", quick, 1)], SMALL, path, console)
    assert not run([Family("slow", slow, 1)], SMALL, path, console)
    families = json.loads(path.read_text())["families"]
    assert families["quick"]["measurements"] == [{"name": "quick", "best": 1.5, "rounds": [1.4, 1.5]}]
    assert families["slow"]["bars"] == [{"name": "slow.memory", "value": 200.0, "bar": 150, "holds": False}]
    assert families["slow"]["options"]["records"] == 10


def test_the_first_line_says_how_long_the_families_take(tmp_path):
    path = tmp_path / "latest.json"
    run([Family("quick", quick, 7)], SMALL, path, Console(file=io.StringIO()))
    text = io.StringIO()
    run([Family("quick", quick, 7), Family("slow", slow, 5)], SMALL, path, Console(file=text, width=120))
    assert text.getvalue().splitlines()[0] == "about 5 minutes: quick 0, slow 5 (estimate for the default sizes)"
