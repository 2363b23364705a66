"""Holds this library to what Apache Flink 2.3 prints while the watermark moves in mid-stream.

Results are compared per key, in order within a key. `flink-2.3-<MODE>-<record|bundle>.jsonl` are what `Oracle.java`
printed (with jars from PyPI, `apache-flink==2.3.0`), with a watermark after every record or every third.
"""

import json
import re

import pyarrow.parquet as pq
import pytest

from dagster_unified.api import Pipeline
from dagster_unified.connectors import FileSink, ParquetSource
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.testing import run_pipeline
from tests.conformance.mid_stream import BUNDLE, PROGRAMS, ROWS, generated, timed
from tests.conformance.programs import Row
from tests.conformance.test_conformance import HERE, Clock, per_key
from tests.support import arrive, streaming

BY_THE_CLOCK = [name for name in PROGRAMS if "processing_time" in name]
IN_STREAMING = [name for name in PROGRAMS if name != "continuous_trigger_on_a_global_window"]
"""There Flink never ends: at the last watermark each timer registers the next one."""

IN_BATCH = [name for name in PROGRAMS if name not in BY_THE_CLOCK and name != "count_window_average"]
ON_SPARK = [name for name in IN_STREAMING if name not in BY_THE_CLOCK]

CASES = [("BATCH", "record", name) for name in IN_BATCH] + [
    ("STREAMING", how, name) for how in ("record", "bundle") for name in IN_STREAMING
]

OURS = {
    # Flink's BATCH drops timers that a timer registers, so that a continuous trigger fires once before the window's
    # end, with the same elements.
    ("BATCH", "continuous_trigger"): [
        "key=a [0,10000) [1, 8, 4, 3, 6]",
        "key=a [10000,20000) [12, 10]",
        "key=a [20000,30000) [13]",
        "key=b [0,10000) [2, 7, 5, 11]",
        "key=b [10000,20000) [9, 14]",
        "key=b [20000,30000) [15]",
    ],
    ("BATCH", "continuous_trigger_on_a_global_window"): [
        "key=a global [1, 8, 4, 3, 6, 12, 10, 13]",
        "key=b global [2, 7, 5, 11, 9, 14, 15]",
    ],
}


def expected(mode, watermarks, program):
    if (mode, program) in OURS:
        return OURS[mode, program]
    lines = (HERE / f"flink-2.3-{mode}-{watermarks}.jsonl").read_text().splitlines()
    return next(entry["emits"] for entry in map(json.loads, lines) if entry["program"] == program)


def comparable(program, emitted):
    """By key, late records apart.

    A joined pair comes when the watermark passes it, and a merged session's elements are in no order.
    """
    if program == "interval_join":
        emitted = sorted(emitted)
    if program == "session_in_mid_stream":
        emitted = [re.sub(r"\[[\d, ]+\]$", lambda found: str(sorted(json.loads(found.group()))), e) for e in emitted]
    late = [e for e in emitted if e.startswith("late ")]
    return per_key([e for e in emitted if e not in late]), per_key(late)


@pytest.mark.parametrize("assigned", [lambda rows, _: timed(rows), generated], ids=["ours", "Flink's generator"])
@pytest.mark.parametrize(("mode", "watermarks", "program"), CASES)
def test_the_harness_emits_what_flink_emits(mode, watermarks, program, assigned):
    count = 1 if watermarks == "record" else BUNDLE
    pipeline = Pipeline("conformance")
    PROGRAMS[program](assigned(pipeline.from_collection(ROWS, Row), count)).print("out")
    # there Flink drops pending timers
    options = {"pipeline.processing-time.end-of-input": "IGNORE"} if mode == "STREAMING" else {}
    result = run_pipeline(pipeline, mode, options=options, clock=Clock(), watermark_interval=count)
    assert comparable(program, result.only()) == comparable(program, expected(mode, watermarks, program))


@pytest.fixture(scope="module")
def streamed(spark, tmp_path_factory):
    """Runs all programs as one job on Spark, a micro-batch for each bundle; gives what each one emitted."""
    folder = tmp_path_factory.mktemp("conformance")
    arrive(folder / "in", *[ROWS[start : start + BUNDLE] for start in range(0, len(ROWS), BUNDLE)], of=Row)
    pipeline = Pipeline("conformance")
    stream = timed(pipeline.from_source(ParquetSource(str(folder / "in"), Row, name="rows", max_files_per_trigger=1)))
    for name in ON_SPARK:
        PROGRAMS[name](stream).sink_to(FileSink(str(folder / name), name=name))
    options = streaming(folder, 2)
    assert StreamingJob(pipeline.plan(options), spark, Start("test")).run() == "finished"
    return lambda name: [
        row["value"] for file in sorted((folder / name).glob("epoch-*")) for row in pq.read_table(file).to_pylist()
    ]


@pytest.mark.a_day(3)
@pytest.mark.parametrize("program", ON_SPARK)
def test_streaming_on_spark_emits_what_flink_emits(streamed, program):
    want = expected("STREAMING", "bundle", program)
    assert comparable(program, streamed(program)) == comparable(program, want)
