"""Connectors by name."""

import importlib

import pytest

from dagster_unified.cli import app
from dagster_unified.connectors import CsvSource, DeltaSink, DeltaSource, find_sink, find_source
from dagster_unified.connectors.finding import SINKS, SOURCES, installed
from dagster_unified.errors import ConfigurationError


def test_connectors_are_found_by_name():
    assert find_source("csv") is CsvSource
    assert find_source("delta") is DeltaSource
    assert find_sink("delta") is DeltaSink


def test_every_connector_of_the_library_can_be_loaded():
    for group, find in ((SOURCES, find_source), (SINKS, find_sink)):
        assert all(find(entry.name) for entry in installed(group))


def test_a_name_that_is_not_there_names_those_that_are():
    with pytest.raises(ConfigurationError, match="there is no sink called 'delat'; did you mean 'delta'"):
        find_sink("delat")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with connectors."""
    (tmp_path / "acme.py").write_text(
        "from dagster_unified.connectors import PrintSink\nclass Queue(PrintSink): ...\nnothing = 1\n"
    )
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[dagster_unified.sinks]\nqueue = acme:Queue\nodd = acme:nothing\ngone = acme_gone:Sink\ndelta = acme:Queue\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()


def test_a_package_brings_connectors_of_its_own(package, capsys):
    assert find_sink("queue").__name__ == "Queue"
    app(["connectors"], result_action="return_value")
    listed = capsys.readouterr().out
    assert "acme.Queue" in listed
    assert "csv" in listed


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("odd", r"the entry point 'odd' \(acme:nothing\) is not a sink"),
        ("gone", r"the sink 'gone' \(acme_gone:Sink\) cannot be loaded: No module named 'acme_gone'"),
        ("delta", "several packages have a sink called 'delta'"),
    ],
)
def test_an_entry_point_that_does_not_lead_to_a_sink_is_an_error(package, name, problem):
    with pytest.raises(ConfigurationError, match=problem):
        find_sink(name)
