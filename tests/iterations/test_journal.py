"""What is committed of an iteration, and what happens where a part of it is gone: with the real files, and no Spark."""

import os

import pyarrow as pa
import pytest
from upath import UPath

from dagster_unified.connectors.paths import remove_tree
from dagster_unified.engine.iterations.files import Block, MappedFiles, PagedStates, RoundFile
from dagster_unified.engine.iterations.journal import Epoch, Input, Journal, StoredState
from dagster_unified.engine.iterations.places import Place, forget_copies
from dagster_unified.errors import IntermediateLostError, LeaseLostError
from dagster_unified.operators.rounds.sending import Sent

BATCH = pa.RecordBatch.from_pydict({"value": [1, 2, 3]})


def write(folder, name, pages=()):
    """A file of records and pages, with what a task reports of it."""
    with RoundFile(str(folder), name) as file:
        (parcel,) = file.send([Sent(0, 0, BATCH)])
        for page, data in pages:
            file.put(data)
    return file.name, parcel


def begun(folder):
    journal = Journal(str(folder))
    if journal.input is None:
        _, once = write(folder, "input-0")
        _, replayed = write(folder, "input-1")
        journal.begin(Input(2, [once], [replayed], "{}"))
    return journal


def commit(journal, number, keeps=False):
    name, parcel = write(journal.folder, f"epoch-{number}")
    left = [parcel] if keeps else []
    journal.commit(Epoch(number, 3, 0, [parcel], left, [], "{}", 0.1), [name])
    return name


def files(folder):
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".json")


def test_files_of_the_newest_two_rounds_and_of_outputs_stay(tmp_path):
    journal = begun(tmp_path)
    names = [commit(journal, number, keeps=number == 1) for number in range(6)]
    inputs = [name for name in files(tmp_path) if name.startswith("input")]
    assert [name[:7] for name in inputs] == ["input-1"]  # what comes once is gone after the first rounds
    assert files(tmp_path) == sorted([*inputs, names[1], names[4], names[5]])
    assert [epoch.fed_back == [] for epoch in journal.epochs] == [True] * 5 + [False]


def test_one_goes_on_after_the_last_round_that_stands(tmp_path):
    journal = begun(tmp_path)
    names = [commit(journal, number) for number in range(4)]
    assert Journal(str(tmp_path)).last.number == 3
    (tmp_path / names[3]).write_bytes(b"cut")
    assert Journal(str(tmp_path)).last.number == 2
    assert not (tmp_path / "epoch-0000000003.json").exists()
    (tmp_path / names[2]).unlink()
    found = Journal(str(tmp_path))
    assert (found.last, found.input) == (None, None)  # what came once is gone as well: it begins anew


def test_rounds_behind_a_damaged_manifest_are_deleted(tmp_path):
    journal = begun(tmp_path)
    for number in range(3):
        commit(journal, number)
    (tmp_path / "epoch-0000000001.json").write_text("{")
    assert Journal(str(tmp_path)).epochs == []
    assert not list(tmp_path.glob("epoch-*.json"))


def test_a_file_that_is_gone_or_cut_is_named(tmp_path):
    name, parcel = write(tmp_path, "epoch-1")
    mapped = MappedFiles(str(tmp_path))
    assert mapped.batch_of(parcel, BATCH.schema) == BATCH
    with pytest.raises(IntermediateLostError, match=f"the file '{name}' of an iteration is gone .* or is not whole"):
        mapped.bytes_of(Block(name, 0, 1 << 20))
    with pytest.raises(IntermediateLostError, match="the file 'other' of an iteration"):
        mapped.bytes_of(Block("other", 0, 1))
    with pytest.raises(IntermediateLostError, match="make sure that all workers share the folder"):
        RoundFile(str(tmp_path / "elsewhere"), "epoch-1")


def test_pages_are_found_again_however_many_rounds_wrote_them(tmp_path):
    expected, held, names = {}, None, set()
    for epoch in range(200):
        states = PagedStates(MappedFiles(str(tmp_path)), held)
        for page in {0, epoch % 7, epoch % 31}:
            expected[page] = f"{epoch} {page}".encode() * 50
            states.group(3, page % 4).write_page(page, expected[page])
        with RoundFile(str(tmp_path), f"epoch-{epoch}") as file:
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
    name, parcel = write(bucket, "epoch-1")
    assert UPath(bucket, name).exists()
    for _ in range(2):
        assert MappedFiles(bucket).batch_of(parcel, BATCH.schema) == BATCH
        forget_copies(bucket)


def test_a_machine_that_has_a_copy_does_not_read_the_bucket_again(bucket):
    name, parcel = write(bucket, "epoch-1")
    UPath(bucket, name).unlink()
    assert MappedFiles(bucket).batch_of(parcel, BATCH.schema) == BATCH
    forget_copies(bucket)
    with pytest.raises(IntermediateLostError, match=f"'{name}' .* gone from memory://rounds.*; run the stage again$"):
        MappedFiles(bucket).batch_of(parcel, BATCH.schema)


def test_copies_that_no_round_reads_are_dropped(bucket):
    (_, read), (unread, _) = write(bucket, "epoch-0"), write(bucket, "epoch-0")
    place = Place(bucket)
    for epoch in range(5):
        files = MappedFiles(bucket, epoch)
        files.batch_of(read, BATCH.schema)
        place.drop_copies(epoch)
    assert os.listdir(place.here) == [read.block.file]
    assert UPath(bucket, unread).exists()


def test_rounds_in_a_bucket_are_gone_on_after_and_committed_by_one_process(bucket):
    journal = begun(bucket)
    names = [commit(journal, number, keeps=number == 1) for number in range(4)]
    other, same = Journal(bucket), Journal(bucket)
    assert (other.last.number, same.last.number) == (3, 3)
    files = {name for name in Place(bucket).sizes() if name.startswith("epoch") and not name.endswith(".json")}
    assert files == set(names[1:])
    name = commit(other, 4)
    with pytest.raises(LeaseLostError, match=r"epoch 4 of the iteration .* was committed by another process"):
        commit(same, 4)
    UPath(bucket, name).unlink()
    assert Journal(bucket).last.number == 3
    commit(Journal(bucket), 4)
