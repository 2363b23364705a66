"""What is committed of an iteration, and what happens where a part of it is gone: with the real files, and no Spark."""

import os

import msgspec
import pyarrow as pa
import pytest
from upath import UPath

from dagster_unified.engine.iterations.epoch_log import BEFORE, FORMAT, Begun, Epoch, EpochLog, Input, StoredState
from dagster_unified.engine.iterations.files import (
    Block,
    EpochFile,
    IterationFolder,
    MappedFiles,
    PagedStates,
    forget_copies,
)
from dagster_unified.errors import IntermediateLostError, LeaseLostError, StateError
from dagster_unified.operators.iteration import Message
from dagster_unified.storage.paths import remove_tree

BATCH = pa.RecordBatch.from_pydict({"value": [1, 2, 3]})


def write(folder, name, pages=()):
    """A file of records and pages, with what a task reports of it."""
    with EpochFile(str(folder), name) as file:
        (message,) = file.send([Message(0, 0, BATCH)])
        for page, data in pages:
            file.put(data)
    return file.name, message


def in_batch(folder):
    """A log whose input can be taken in once more."""
    return EpochLog(str(folder), "p: iteration 'loop'", can_run_again=True)


def begun(folder):
    log = in_batch(folder)
    if not log.inputs:
        _, once = write(folder, "input-0")
        _, replayed = write(folder, "input-1")
        log.take(0, Input([once], [replayed]))
    return log


def commit(log, number, keeps=False):
    name, message = write(log.folder, f"epoch-{number}")
    left = [message] if keeps else []
    ended = Epoch(number=number, feedback=3, criteria=0, fed_back=[message], outputs=left, states=[], seconds=0.1)
    log.commit(ended, [name])
    return name


def files(folder):
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".json")


def test_files_of_the_newest_two_rounds_and_of_outputs_stay(tmp_path):
    log = begun(tmp_path)
    names = [commit(log, number, keeps=number == 1) for number in range(6)]
    inputs = [name for name in files(tmp_path) if name.startswith("input")]
    assert [name[:7] for name in inputs] == ["input-1"]  # what comes once is gone after the first rounds
    assert files(tmp_path) == sorted([*inputs, names[1], names[4], names[5]])
    assert [epoch.fed_back == [] for epoch in log.epochs] == [True] * 5 + [False]


def test_one_goes_on_after_the_last_round_that_stands(tmp_path):
    log = begun(tmp_path)
    names = [commit(log, number) for number in range(4)]
    assert in_batch(tmp_path).last.number == 3
    (tmp_path / names[3]).write_bytes(b"cut")
    assert in_batch(tmp_path).last.number == 2
    assert not (tmp_path / "epoch-0000000003.json").exists()
    (tmp_path / names[2]).unlink()
    found = in_batch(tmp_path)
    assert (found.last, found.inputs) == (None, {})  # what came once is gone as well: it begins anew


def test_rounds_behind_a_damaged_manifest_are_deleted(tmp_path):
    log = begun(tmp_path)
    for number in range(3):
        commit(log, number)
    (tmp_path / "epoch-0000000001.json").write_text("{")
    assert in_batch(tmp_path).epochs == []
    assert not list(tmp_path.glob("epoch-*.json"))


def test_a_file_that_is_gone_or_cut_is_named(tmp_path):
    name, message = write(tmp_path, "epoch-1")
    mapped = MappedFiles(str(tmp_path))
    assert mapped.batch_of(message, BATCH.schema) == BATCH
    with pytest.raises(IntermediateLostError, match=f"the file '{name}' of an iteration is gone .* or is not whole"):
        mapped.bytes_of(Block(name, 0, 1 << 20))
    with pytest.raises(IntermediateLostError, match="the file 'other' of an iteration"):
        mapped.bytes_of(Block("other", 0, 1))
    with pytest.raises(IntermediateLostError, match="make sure that all workers share the folder"):
        EpochFile(str(tmp_path / "elsewhere"), "epoch-1")


def test_pages_are_found_again_however_many_rounds_wrote_them(tmp_path):
    expected, held, names = {}, None, set()
    for epoch in range(200):
        states = PagedStates(MappedFiles(str(tmp_path)), held)
        for page in {0, epoch % 7, epoch % 31}:
            expected[page] = f"{epoch} {page}".encode() * 50
            states.group(3, page % 4).write_page(page, expected[page])
        with EpochFile(str(tmp_path), f"epoch-{epoch}") as file:
            held, needed = states.save(file)
        names.add(file.name)
        for name in names - {*needed, held.file}:
            (tmp_path / name).unlink()
        names &= {*needed, held.file}
    states = PagedStates(MappedFiles(str(tmp_path)), held)
    assert {page: states.group(3, page % 4).read_page(page) for page in expected} == expected
    assert states.groups(3) == [0, 1, 2, 3]
    assert len(names) <= 65
    assert StoredState(0, 0, held, sorted(names)).index == held


@pytest.fixture
def bucket():
    yield "memory://rounds"
    remove_tree(UPath("memory://rounds"))
    forget_copies("memory://rounds")


def test_files_in_a_bucket_are_read_by_a_machine_that_has_no_copy(bucket):
    name, message = write(bucket, "epoch-1")
    assert UPath(bucket, name).exists()
    for _ in range(2):
        assert MappedFiles(bucket).batch_of(message, BATCH.schema) == BATCH
        forget_copies(bucket)


def test_a_machine_that_has_a_copy_does_not_read_the_bucket_again(bucket):
    name, message = write(bucket, "epoch-1")
    UPath(bucket, name).unlink()
    assert MappedFiles(bucket).batch_of(message, BATCH.schema) == BATCH
    forget_copies(bucket)
    with pytest.raises(IntermediateLostError, match=f"'{name}' .* gone from memory://rounds.*; run the stage again$"):
        MappedFiles(bucket).batch_of(message, BATCH.schema)


def test_copies_that_no_round_reads_are_dropped(bucket):
    (_, read), (unread, _) = write(bucket, "epoch-0"), write(bucket, "epoch-0")
    place = IterationFolder(bucket)
    for epoch in range(5):
        files = MappedFiles(bucket, epoch)
        files.batch_of(read, BATCH.schema)
        place.drop_copies(epoch)
    assert os.listdir(place.here) == [read.block.file]
    assert UPath(bucket, unread).exists()


def test_rounds_in_a_bucket_are_gone_on_after_and_committed_by_one_process(bucket):
    log = begun(bucket)
    names = [commit(log, number, keeps=number == 1) for number in range(4)]
    other, same = in_batch(bucket), in_batch(bucket)
    assert (other.last.number, same.last.number) == (3, 3)
    files = {
        name for name in IterationFolder(bucket).sizes() if name.startswith("epoch") and not name.endswith(".json")
    }
    assert files == set(names[1:])
    name = commit(other, 4)
    with pytest.raises(LeaseLostError, match=r"epoch 4 of the iteration .* was committed by another process"):
        commit(same, 4)
    UPath(bucket, name).unlink()
    assert in_batch(bucket).last.number == 3
    commit(in_batch(bucket), 4)


def streamed(folder, bounded=False):
    log = EpochLog(str(folder), "p: iteration 'loop'")
    log.begin(Begun(2, bounded, [["step"]], ["n: int64"], format=FORMAT))
    return log


def epoch(micro_batch, number, **fields):
    return msgspec.structs.replace(Epoch.before(number, [], 2, []), micro_batch=micro_batch, **fields)


def test_a_job_that_was_killed_before_its_first_epoch_takes_its_input_again(tmp_path):
    log = streamed(tmp_path)
    log.start(epoch(BEFORE, 7), [])
    log.take(0, Input([], []))
    restarted = streamed(tmp_path)
    assert (restarted.has(0), restarted.last.number) == (True, 7)
    restarted.start(epoch(BEFORE, 7), [])  # no epoch was committed, so it starts from the savepoint again
    assert (restarted.has(0), streamed(tmp_path).has(0)) == (False, False)


def test_an_epoch_that_cannot_be_read_is_an_error_where_it_cannot_run_again(tmp_path):
    log = streamed(tmp_path)
    for number in range(2):
        log.commit(epoch(number, number), [])
    newest = max(tmp_path.glob("epoch-*.json"))
    newest.write_bytes(newest.read_bytes()[:10])
    with pytest.raises(StateError, match="iteration 'loop': what is committed of one of its epochs cannot be read"):
        streamed(tmp_path)


def test_input_of_a_stream_that_is_gone_is_an_error(tmp_path):
    log = streamed(tmp_path, bounded=True)
    name, message = write(tmp_path, "once-0")
    log.take(0, Input([message], []))
    assert streamed(tmp_path, bounded=True).inputs == log.inputs
    (tmp_path / name).unlink()
    with pytest.raises(StateError, match="iteration 'loop': files of its input are gone"):
        streamed(tmp_path, bounded=True)


def test_epochs_of_the_newest_micro_batch_and_the_one_before_them_stay(tmp_path):
    log = streamed(tmp_path)
    log.take(0, Input([], []))
    for micro_batch, number in [(0, 0), (0, 1), (1, 2), (1, 3), (1, 4)]:
        log.commit(epoch(micro_batch, number), [])
    for found in (log, streamed(tmp_path)):
        assert [one.number for one in found.epochs] == [1, 2, 3, 4]
        assert not found.has(0) or found.of(0)
        assert found.inputs == {}


def test_a_log_of_another_format_is_an_error(tmp_path):
    (tmp_path / "begun.json").write_text('{"parallelism":2,"bounded":false,"operators":[],"slots":[]}')
    streamed(tmp_path)  # it had no state
    (tmp_path / "begun.json").write_text('{"parallelism":2,"bounded":false,"operators":[],"slots":[]}')
    (tmp_path / "round-0000000001.json").write_text("{}")
    with pytest.raises(
        StateError, match=f"is of format 1, and this version reads {FORMAT}; stop the job with a savepoint"
    ):
        streamed(tmp_path)


def test_the_end_of_an_iteration_knows_of_how_many_subtasks_its_state_is(tmp_path):
    log = streamed(tmp_path)
    log.commit(epoch(0, 0), [])
    assert log.left().parallelism == 2
    log.end([], 4)
    assert streamed(tmp_path).left().parallelism == 4
