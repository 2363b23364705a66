"""Transactions whose processes are killed, or stopped and woken up after their successor, at moments of chance.

Without Spark, so that many kills take little time: what computes the rows is not what is tested here.
"""

import json
import multiprocessing
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from dagster_unified.connectors import KafkaSink
from dagster_unified.connectors.protocol.commits import WriteIdentity
from dagster_unified.engine.commit import WriteContext
from dagster_unified.errors import LeaseLostError
from tests.connectors.support import LocalCommits
from tests.depth import NIGHTLY, chance

EPOCHS = 400 if NIGHTLY else 8
ROWS = 50
PATIENCE = 180


class Row(NamedTuple):
    epoch: int
    number: int


def attempt(address, topic, epoch, lease):
    """What a process does: takes the lease, and writes an epoch as the engine does."""
    mine = str(os.getpid())
    Path(lease).write_text(mine)

    def check():
        time.sleep(0.05)
        if Path(lease).read_text() != mine:
            raise LeaseLostError("another process has the lease")

    commits = LocalCommits(KafkaSink(topic, address, key="number"), Row)
    who = WriteIdentity("killed", "sink", f"deployment {topic}", "streaming", epoch)
    tasks = [[Row(epoch, number) for number in range(task, ROWS, 2)] for task in range(2)]
    try:
        commits.write(tasks, [WriteContext(who, "stage", check, staging=f"{lease}-staging")])
    except LeaseLostError:
        os._exit(3)
    os._exit(0)


def reaches(process, signal_number):
    """Send a signal; False where the process has ended before it came."""
    try:
        os.kill(process.pid, signal_number)
    except ProcessLookupError:  # the fork server has collected it, whatever is_alive() said a moment ago
        return False
    return True


@pytest.mark.rotates("brokers")
def test_epochs_are_there_once_whoever_is_killed_and_whoever_wakes_up(kafka, tmp_path):
    random, lease = chance("kafka writers"), str(tmp_path / "lease")
    topic = kafka.create_topic(partitions=3)
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["tests.connectors.kafka.test_killed_writers", "confluent_kafka"])
    faults, span = Counter(), 1.0

    def start(epoch):
        process = processes.Process(target=attempt, args=(kafka.address, topic, epoch, lease), daemon=True)
        process.start()
        return process

    def finish(epoch):
        """Run it until it is through; a broker that restarts may make it fail."""
        for _ in range(5):
            process = start(epoch)
            process.join(PATIENCE)
            if process.exitcode == 0:
                return
        raise AssertionError(f"epoch {epoch} does not come through")

    for epoch in range(EPOCHS):
        begun, process = time.monotonic(), start(epoch)
        fate = random.random()
        if fate < 0.75:
            process.join(random.uniform(0, 1.2 * span))
        if fate < 0.5:
            faults["kills"] += reaches(process, signal.SIGKILL)
        elif fate < 0.7 and reaches(process, signal.SIGSTOP):
            finish(epoch)
            faults["zombies"] += reaches(process, signal.SIGCONT)
        elif fate < 0.75:
            kafka.kill()
            kafka.start()
            faults["restarts"] += 1
        process.join(PATIENCE)
        if process.exitcode == 0 and fate >= 0.75:
            span = 0.8 * span + 0.2 * (time.monotonic() - begun)
        finish(epoch)
    found = Counter((row["epoch"], row["number"]) for row in map(json.loads, kafka.values(topic)))
    assert found == Counter((epoch, number) for epoch in range(EPOCHS) for number in range(ROWS)), faults
    assert not list(tmp_path.rglob("*.messages"))
    print(f"{EPOCHS} epochs, {dict(faults)}, an undisturbed epoch {span:.2f} s")
