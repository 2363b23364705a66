"""One Spark session per test process; small data; nothing outside tmp_path."""

import os
import sys
from collections import Counter, defaultdict
from itertools import chain
from pathlib import Path

from tests.class_data import SMALL, options

os.environ.setdefault("SPARK_SUBMIT_OPTS", options())
os.environ.setdefault("SPARK_LAUNCHER_OPTS", SMALL)
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("DAGSTER_DISABLE_TELEMETRY", "yes")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the tests start many processes, and each would compile the library

import pytest
from hypothesis import settings

from dagster_unified.engine import session
from dagster_unified.engine.streaming.job import Start, StreamingJob
from tests.depth import NIGHTLY, SEED, of_the_day
from tests.servers.kafka import Broker
from tests.servers.postgres import postgres, postgres_programs, postgres_server  # noqa: F401
from tests.support import run_stages, streaming

settings.register_profile("ci", max_examples=50, deadline=None)
settings.register_profile("nightly", max_examples=1000, deadline=None)
settings.load_profile("nightly" if NIGHTLY else "ci")

LONGEST_FIRST = (
    "end_to_end",
    "orchestration",
    "cli",
    "docs",
    "jobs",
    "state",
    "engine",
    "iterations",
    "conformance",
    "connectors",
)
"""Folders whose tests start first, so that two workers end at about the same time."""

A_DAY = {"kills": 1, "kits": 1, "clusters": 1, "stories": 1, "brokers": 1, "processes": 4}
"""How many a day of what is marked `rotates`, by the name of its group; at night all of it."""

TODAY = pytest.StashKey[dict[str, tuple[int, int]]]()
"""How many of each group run, and of how many."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    if config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = SEED


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        if "spark" in item.fixturenames:
            item.add_marker(pytest.mark.spark)
    folders = {folder: place for place, folder in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: folders.get(item.path.relative_to(Path(__file__).parent).parts[0], len(folders)))
    yield  # -k and -m take theirs
    config.stash[TODAY] = {}
    for name, count in A_DAY.items():
        group = {item: _rotated(item) for item in items if _group(item) == name}
        todays = of_the_day(sorted(set(group.values())), count)
        config.stash[TODAY][name] = len(todays), len(set(group.values()))
        _deselect(config, items, [item for item, unit in group.items() if unit not in todays])
    tests = defaultdict(list)
    for item in items:
        if item.get_closest_marker("a_day"):
            tests[item.nodeid.partition("[")[0]].append(item)
    others = [item for cases in tests.values() for item in cases if item not in _cases_of_the_day(cases)]
    cases = sum(map(len, tests.values()))
    config.stash[TODAY]["cases"] = cases - len(others), cases
    _deselect(config, items, others)


def _cases_of_the_day(cases):
    """Of one test."""
    todays = of_the_day([case.nodeid for case in cases], cases[0].get_closest_marker("a_day").args[0])
    return [case for case in cases if case.nodeid in todays]


def _deselect(config, items, others):
    items[:] = [item for item in items if item not in others]
    config.hook.pytest_deselected(items=others)


def _group(item):
    """The group in which a test rotates; None where it runs each day."""
    mark = item.get_closest_marker("rotates")
    return mark and mark.args[0]


def _rotated(item):
    """What rotates: the test, or all of its file with `together`."""
    together = item.get_closest_marker("rotates").kwargs.get("together", False)
    return str(item.path.relative_to(Path(__file__).parent)) if together else item.nodeid


def pytest_sessionfinish(session, exitstatus):
    """In CI nothing may be skipped."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["today"] = session.config.stash.get(TODAY, {})
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if (
        os.environ.get("CI")
        and reporter is not None
        and reporter.stats.get("skipped")
        and exitstatus == pytest.ExitCode.OK
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """A worker of pytest-xdist has ended; all of them have collected the same."""
    node.config.stash[TODAY] = getattr(node, "workeroutput", {}).get("today", {})


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        reasons = sorted({str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped})
        failed = " (an error in CI)" if os.environ.get("CI") else ""
        terminalreporter.write_line(f"skipped {len(skipped)}{failed}: {'; '.join(reasons)}")
    seconds = Counter()
    for report in chain(*terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0].split("/")[1]] += report.duration
    if len(seconds) > 1:
        terminalreporter.write_line(
            "seconds by folder: " + ", ".join(f"{folder} {spent:.0f}" for folder, spent in seconds.most_common())
        )
    today = terminalreporter.config.stash.get(TODAY, {})
    if parts := [f"{run} of {of} {name}" for name, (run, of) in today.items() if run < of]:
        terminalreporter.write_line(f"today's part of what rotates: {', '.join(parts)}; make test-all runs all of it")
    terminalreporter.write_line(f"seed {SEED}: UNIFIED_SEED={SEED} runs the same examples again")


INTERPRETED = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
"""Spark does not compile what it runs, which takes longer than to run it on a few rows.

At night it does, and so it does in the sessions that tests start for themselves.
"""


@pytest.fixture(scope="session")
def spark():
    config = {"spark.driver.memory": "2g", "spark.sql.shuffle.partitions": "2", **({} if NIGHTLY else INTERPRETED)}
    running = session.start("local[2]", config=config)
    yield running
    running.stop()


@pytest.fixture(scope="session")
def kafka(tmp_path_factory):
    """A Kafka broker of this test process's own; each test makes topics of its own."""
    broker = Broker(tmp_path_factory.mktemp("kafka")).start()
    yield broker
    broker.kill()


@pytest.fixture
def run_on_spark(spark, tmp_path):
    """Runs a pipeline's stages on Spark and gives the records of each sink, read back from Parquet."""

    def run(pipeline, options=None):
        plan = pipeline.plan({"execution.runtime-mode": "BATCH", **(options or {})})
        return run_stages(plan, spark, tmp_path)

    return run


@pytest.fixture
def run_streaming(spark, tmp_path):
    """Runs a pipeline in STREAMING to the end of its input, in a checkpoint directory of its own."""

    def run(pipeline, options=None, start=None):
        launched = {**streaming(tmp_path, 4), **(options or {})}
        return StreamingJob(pipeline.plan(launched), spark, start or Start("test")).run()

    return run


@pytest.fixture
def run_in(run_on_spark, run_streaming):
    """By mode, what runs a pipeline on Spark."""
    return {"BATCH": run_on_spark, "STREAMING": run_streaming}
