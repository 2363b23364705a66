"""Files that a sink puts in their place: two runs at the same moment, and a disk that has no room for them."""

from threading import Barrier, Thread
from typing import NamedTuple

import pyarrow.parquet as pq
import pytest

from dagster_unified.api import Pipeline
from dagster_unified.connectors import FileSink
from dagster_unified.connectors.files.sink import StagedFolder, _FileCommitter, _staged
from dagster_unified.connectors.protocol.commits import WHOLE, Commit, WriteAttempt, WriteIdentity
from dagster_unified.engine.commit import _commit
from dagster_unified.errors import UnifiedError
from dagster_unified.storage.paths import storage_path
from tests.depth import chance
from tests.small_disk import NEEDS_ROOT, small_disk


class Entry(NamedTuple):
    number: int
    text: str


@NEEDS_ROOT
def test_a_full_disk_leaves_the_table_as_it_was_and_another_attempt_may_find_room(run_on_spark, tmp_path):
    random = chance("full disk")

    def entries(count):
        pipeline = Pipeline("entries")
        rows = [Entry(number, random.randbytes(500).hex()) for number in range(count)]
        pipeline.from_collection(rows).sink_to(FileSink(f"{tmp_path}/small/table", name="table"))
        return pipeline

    def numbers():
        return sorted(pq.read_table(tmp_path / "small" / "table")["number"].to_pylist())

    with small_disk(tmp_path / "small", megabytes=2) as resize:
        run_on_spark(entries(3))
        with pytest.raises(UnifiedError, match=r"entries: .*No space left on device") as failed:
            run_on_spark(entries(5_000))
        assert failed.value.retryable
        assert numbers() == [0, 1, 2]
        resize(64)
        run_on_spark(entries(5_000))
        assert numbers() == list(range(5_000))
        names = {file.name for file in (tmp_path / "small").iterdir()}
        assert names == {"table"}


@pytest.mark.parametrize("partitions", [(WHOLE, WHOLE), ("a", "a"), ("a", "b")])
def test_of_two_runs_that_commit_at_once_each_is_there_whole_and_nothing_is_left(tmp_path, partitions):
    table, failed = storage_path(f"{tmp_path}/table", "file sink"), []
    for number in range(60):
        both = Barrier(2, timeout=30)

        def write(run, partition, both=both):
            attempt = WriteAttempt(WriteIdentity("p", "files", run, partition), run, "stage")
            folder = _staged(table, attempt)
            folder.mkdir(parents=True, exist_ok=True)
            for file in range(3):
                (folder / f"part-{file}.csv").write_text(run)
            commits = {0: Commit(attempt, [StagedFolder(bytes=1)])}
            both.wait()
            try:
                _commit(_FileCommitter(table, "csv"), commits, check=lambda: None, give_up=lambda: None)
            except Exception as error:
                failed.append(error)

        if number % 10 == 0 and WHOLE not in partitions:  # what a run without partitions has left
            table.mkdir(parents=True, exist_ok=True)
            for file in range(3):
                (table / f"part-{file}.csv").write_text("whole")
        writers = [Thread(target=write, args=(f"{number}-{n}", one)) for n, one in enumerate(partitions)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        assert failed == []
        for partition in set(partitions):
            place = table if partition == WHOLE else table / f"partition={partition}"
            written = [file.read_text() for file in sorted(place.glob("*.csv"))]
            assert len(written) == 3
            assert len(set(written)) == 1
            assert written[0].startswith(f"{number}-")
    names = {file.name for folder in (table, table.parent) for file in folder.iterdir()}
    assert not any(name.startswith(".") for name in names)


@pytest.mark.parametrize("kind", ["folder", "nothing yet", "partition"])
def test_a_link_stays_one_and_the_files_are_where_it_leads_to(tmp_path, kind):
    real, link = tmp_path / "disk" / "table", tmp_path / "table"
    real.parent.mkdir()
    if kind != "nothing yet":
        real.mkdir()
    if kind == "partition":
        link.mkdir()
    (link / "partition=a" if kind == "partition" else link).symlink_to(real)
    partition = "a" if kind == "partition" else WHOLE
    for run in ("first", "second"):
        table = storage_path(str(link), "file sink")
        attempt = WriteAttempt(WriteIdentity("p", "files", run, partition), run, "stage")
        staged = _staged(table, attempt)
        staged.mkdir(parents=True)
        (staged / "part-0.csv").write_text(run)
        commits = {0: Commit(attempt, [StagedFolder(bytes=1)])}
        _commit(_FileCommitter(table, "csv"), commits, check=lambda: None, give_up=lambda: None)
        assert (link / "partition=a" if kind == "partition" else link).is_symlink()
        assert (real / "part-0.csv").read_text() == run
    assert {path.name for path in real.parent.iterdir()} == {"table"}


def test_a_stream_keeps_a_link(run_streaming, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "table").symlink_to(tmp_path / "disk" / "table")
    pipeline = Pipeline("entries")
    pipeline.from_collection([Entry(1, "a")]).sink_to(FileSink(f"{tmp_path}/table", name="table"))
    run_streaming(pipeline)
    assert (tmp_path / "table").is_symlink()
    assert pq.read_table(tmp_path / "disk" / "table")["number"].to_pylist() == [1]
