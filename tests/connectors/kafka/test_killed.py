"""Whole jobs that are killed at random moments and started again, with a broker that restarts under them."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_unified.records import record_type
from tests.connectors.kafka.killed_job import Row
from tests.depth import NIGHTLY, chance

FILES, ROWS = (60, 50) if NIGHTLY else (5, 50)
KILLS = 25 if NIGHTLY else 2
PATIENCE = 600


def start(mode, folder, broker, topic, log):
    command = [sys.executable, "-m", "tests.connectors.kafka.killed_job", mode, str(folder), broker.address, topic]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
    process.stdout.readline()
    return process


@pytest.mark.spark
@pytest.mark.rotates("kills")
@pytest.mark.parametrize("mode", ["BATCH", "STREAMING"])
def test_a_job_that_is_killed_again_and_again_loses_nothing_and_writes_nothing_twice(kafka, tmp_path, mode):
    random = chance(f"kafka {mode}")
    topic = kafka.create_topic(partitions=2)
    kafka.create_topic(f"{topic}-totals", partitions=2)
    kind = record_type(Row, "test")
    (tmp_path / "in").mkdir()
    rows = [Row(f"key-{number % 7}", number) for number in range(FILES * ROWS)]
    for number in range(FILES):
        batch = kind.to_batch(rows[number * ROWS : (number + 1) * ROWS])
        pq.write_table(pa.Table.from_batches([batch]), tmp_path / "in" / f"{number:03d}.parquet")
    kills = 0
    with (tmp_path / "log").open("a") as log:
        while True:
            process = start(mode, tmp_path, kafka, topic, log)
            if kills < KILLS:
                try:
                    process.wait(random.uniform(0, 5 if mode == "BATCH" else 12))
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    kills += 1
                    if random.random() < 0.2:
                        kafka.kill()
                        kafka.start()
                process.wait(PATIENCE)
            ended = process.wait(PATIENCE)
            if ended == 0:
                break
            assert ended == -signal.SIGKILL, (tmp_path / "log").read_text()[-4000:]
    found = Counter((row["key"], row["number"]) for row in map(json.loads, kafka.values(topic)))
    assert found == Counter(map(tuple, rows))
    totals = {}
    for message in kafka.read(f"{topic}-totals"):
        totals[message.key().decode()] = json.loads(message.value())["number"]
    expected = Counter()
    for row in rows:
        expected[row.key] += row.number
    assert totals == expected
