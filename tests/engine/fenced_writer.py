"""A job of a deployment, as far as it writes: it does what it is told, line by line, and says what came of it.

`python -m tests.engine.fenced_writer ROOT NAME`; `test_fencing.py` has two of them write at once, or pauses one.
"""

import os
import signal
import sys
from collections.abc import Callable

from dagster_unified.engine.batch.intermediates import Address, IntermediateStore, Manifest
from dagster_unified.engine.streaming.atomic import AlternatingFiles
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory, Deployed
from dagster_unified.engine.streaming.control import ControlFile
from dagster_unified.engine.streaming.desired import ask
from dagster_unified.engine.streaming.savepoints.copy import save
from dagster_unified.errors import LeaseLostError
from dagster_unified.operators.drivers.key_groups import ControlEvent


class Writer:
    """All that a job, or the step of a run, writes and another one may write as well."""

    def __init__(self, root: str, name: str) -> None:
        self.root, self.name = root, name
        self.address = Address("job", "stage", "run")

    def begin(self, number: str) -> None:
        """Read what there is."""
        self.directory = CheckpointDirectory(f"{self.root}/{number}", "job")
        self.control = ControlFile(str(self.directory.path / "control/main"))
        self.files = AlternatingFiles(self.directory.path / "file", ControlEvent, lambda e: e.number)
        self.files.open()
        self.store = IntermediateStore(f"{self.root}/{number}/intermediates")
        self.attempt = self.store.new_attempt(self.address)
        (self.attempt / "one.parquet").write_bytes(b"rows")

    def own(self, token: int) -> None:
        """Be the one who writes."""
        self.directory.deploy(Deployed(0, "", "job", f"code of {self.name}", 0, 2, 4, "ROCKSDB", {}, {}))
        self.control.claim(token)
        self.directory.settle(False)

    def lease(self) -> None:
        self.held = self.directory.take(self.name, patience=60)

    def file(self) -> None:
        self.files.write(ControlEvent(1, {self.name: 1}))

    def record(self) -> None:
        self.directory.finish()

    def event(self) -> None:
        self.control.write(ControlEvent(1, {self.name: 1}))

    def settled(self) -> None:
        self.directory.settle(True)

    def manifest(self, fingerprint: str = "") -> None:
        rows = self.store.files(self.attempt)
        self.store.commit(
            self.address,
            Manifest(
                pipeline="job", stage="stage", partition=self.address.partition, run="run", schema="", streams=[],
                fingerprint=fingerprint or self.name, rows=1, bytes=4, data=self.attempt.name, files=rows,
            ),
        )  # fmt: skip

    def asked(self) -> None:
        ask(self.directory, stop=1, reason=self.name)

    def savepoint(self, check: Callable[[], None] = lambda: None) -> None:
        save(self.directory, "test", check)


def pause() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def outcome(action: Callable[[], None]) -> str:
    """What came of a write."""
    try:
        action()
    except (LeaseLostError, FileExistsError):
        return "refused"
    return "written"


def late(writer: Writer) -> list[str]:
    """Write all there is after a pause that came right after the last look at the lease."""
    lease = writer.directory.take(writer.name, patience=60)
    writer.own(lease.token)
    commits = writer.directory.path / "spark/main/commits"
    commits.mkdir(parents=True)
    (commits / "0").write_text("v1")
    found = [outcome(lambda: writer.savepoint(pause))]
    return [*found, *map(outcome, (writer.record, writer.event, writer.settled, writer.manifest, lease.check))]


if __name__ == "__main__":
    writer = Writer(*sys.argv[1:])
    print("ready", flush=True)
    for line in sys.stdin:
        told, _, argument = line.strip().partition(" ")
        if told == "begin":
            writer.begin(argument)
            print("begun", flush=True)
        elif told == "late":
            print(*late(writer), flush=True)
        else:
            print(outcome(getattr(writer, told)), flush=True)
