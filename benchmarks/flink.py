"""The benchmark's work in PyFlink, in an environment of its own, since its dependencies do not fit ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENVIRONMENT = ROOT / ".venv-flink"

PROGRAM = """
import sys, time
from pyflink.common import Configuration, Duration, Time, Types, WatermarkStrategy
from pyflink.common.watermark_strategy import TimestampAssigner
from pyflink.datastream import AggregateFunction, RuntimeExecutionMode, StreamExecutionEnvironment
from pyflink.datastream.window import TumblingEventTimeWindows
from pyflink.datastream.connectors.number_seq import NumberSequenceSource

mode, n, keys, windows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "windows"
config = Configuration()
config.set_string("python.execution-mode", "thread")
env = StreamExecutionEnvironment.get_execution_environment(config)
env.set_runtime_mode(RuntimeExecutionMode[mode])
env.set_parallelism(2)
ROW = Types.TUPLE([Types.STRING(), Types.LONG(), Types.LONG()])


class Ts(TimestampAssigner):
    def extract_timestamp(self, value, record_timestamp):
        return value[2]


class Sum(AggregateFunction):
    def create_accumulator(self):
        return 0

    def add(self, value, accumulator):
        return accumulator + value[1]

    def get_result(self, accumulator):
        return accumulator

    def merge(self, a, b):
        return a + b


source = NumberSequenceSource(0, n - 1)
numbers = env.from_source(source, WatermarkStrategy.no_watermarks(), "numbers", type_info=Types.LONG())
rows = numbers.map(lambda x: (str(x % keys), x + 1, x if windows else x * 1000), output_type=ROW)
if mode == "BATCH" and not windows:
    rows = rows.filter(lambda r: r[1] % 2 == 0).map(lambda r: (r[0], r[1] * 2, r[2]), output_type=ROW)
if windows:
    watermarks = WatermarkStrategy.for_bounded_out_of_orderness(Duration.of_seconds(1)).with_timestamp_assigner(Ts())
    keyed = rows.assign_timestamps_and_watermarks(watermarks).key_by(lambda r: r[0], key_type=Types.STRING())
    keyed = keyed.window(TumblingEventTimeWindows.of(Time.milliseconds(10000)))
    sums = keyed.aggregate(Sum(), accumulator_type=Types.LONG(), output_type=Types.LONG())
else:
    sums = rows.key_by(lambda r: r[0], key_type=Types.STRING()).reduce(lambda a, b: (a[0], a[1] + b[1], b[2]))
    sums = sums.map(lambda r: r[1], output_type=Types.LONG())
sums.filter(lambda v: v < 0).print()
begun = time.time()
env.execute()
print("rate", n / (time.time() - begun) / 1e6)
"""


def flink_rate(mode: str, records: int, keys: int, windows: bool = False) -> float:
    """Millions of records per second in PyFlink 2.3, thread mode, on two cores."""
    python = ENVIRONMENT / "bin" / "python"
    if not (ENVIRONMENT / "ready").exists():
        sys.stderr.write("installing PyFlink into .venv-flink\n")
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "uv"], check=True)
        subprocess.run(
            [
                str(ENVIRONMENT / "bin" / "uv"),
                "pip",
                "install",
                "--quiet",
                "--python",
                str(python),
                "apache-flink==2.3.0",
                "setuptools<81",
            ],
            check=True,
        )
        (ENVIRONMENT / "ready").touch()
    environment = {**os.environ, "PATH": f"{ENVIRONMENT / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(python), "-c", PROGRAM, mode, str(records), str(keys), "windows" if windows else "reduce"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    found = re.search(r"^rate ([\d.]+)", done.stdout, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"PyFlink gave no rate:\n{done.stderr[-2000:]}")
    return float(found.group(1))
