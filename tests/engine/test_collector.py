"""Which collector the JVM of a session has: a process of its own for each, since a test session has its JVM already."""

import os
import subprocess
import sys

import pytest

PARALLEL, SERIAL = "PS Scavenge", "Copy"

BEANS = """
from dagster_unified.engine import session
spark = session.start("local[1]")
beans = spark._jvm.java.lang.management.ManagementFactory.getGarbageCollectorMXBeans()
print("collectors:", ",".join(bean.getName() for bean in beans))
"""


@pytest.mark.rotates("processes")
@pytest.mark.spark
@pytest.mark.parametrize(
    ("options", "collector"), [({}, PARALLEL), ({"JAVA_TOOL_OPTIONS": "-XX:+UseSerialGC"}, SERIAL)]
)
def test_a_collector_that_the_environment_chooses_stays(options, collector):
    clean = {name: value for name, value in os.environ.items() if name != "SPARK_SUBMIT_OPTS"}
    run = subprocess.run([sys.executable, "-c", BEANS], env={**clean, **options}, capture_output=True, text=True)
    (found,) = [line for line in run.stdout.splitlines() if line.startswith("collectors: ")]
    assert collector in found.removeprefix("collectors: ").split(",")
