"""A fingerprint is the same in every process, whatever that process has done: a stream is restarted when it differs."""

import json
import os
import subprocess
import sys

import pytest

from tests.graph.test_fingerprint import ROOT

PROGRAM = """
import json, sys
from tests.graph import reachable
from dagster_unified.graph.fingerprint import fingerprint
if sys.argv[1] == "worked":
    reachable.work()
found = {name: fingerprint(function) for name, function in reachable.FUNCTIONS.items()}
again = {name: fingerprint(function) for name, function in reachable.FUNCTIONS.items()}
print(json.dumps([found, again]))
"""


@pytest.fixture(scope="module")
def taken():
    """The fingerprints of three fresh processes, each taken twice."""

    def begin(seed, what):
        command = [sys.executable, "-c", PROGRAM, what]
        return subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True
        )

    started = [begin("1", "fresh"), begin("77", "fresh"), begin("5", "worked")]
    outputs = [process.communicate()[0] for process in started]
    return [found for output in outputs for found in json.loads(output)]


def names():
    from tests.graph.reachable import FUNCTIONS

    return list(FUNCTIONS)


@pytest.mark.parametrize("name", names())
def test_every_process_finds_the_same_fingerprint_of(name, taken):
    assert len({found[name] for found in taken}) == 1
