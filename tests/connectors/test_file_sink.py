"""Two runs that put their files in one place at the same moment."""

from threading import Barrier, Thread

import pytest

from dagster_unified.connectors.commits import WHOLE, Commit, WriteAttempt, WriteIdentity
from dagster_unified.connectors.file_sink import StagedFolder, _FileCommitter, _staged
from dagster_unified.connectors.paths import storage_path
from dagster_unified.engine.commit import _commit


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
