"""Delta tables in a store that breaks off what it says, and loses answers."""

from contextlib import closing

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from dagster_unified.connectors import DeltaSink
from dagster_unified.connectors.delta.committer import data_folder, staged_files, upsert_folder
from dagster_unified.connectors.protocol.commits import WriteIdentity
from dagster_unified.engine.commit import SinkCommits, WriteContext
from dagster_unified.storage.paths import remove_tree
from tests.object_store import CUT, LOST, Fault, disturb, served

TABLE = "s3://lake/table"


class Staged(DeltaSink):
    """Its rows are staged by this process, whose Spark session knows no buckets."""

    def stage(self, frame, attempts, ship):
        (attempt,) = attempts
        folder = self.path / (upsert_folder(attempt) if self.mode == "upsert" else data_folder(attempt))
        pq.write_table(frame.toArrow(), f"{folder.path}/0.parquet", filesystem=folder.fs)
        return [staged_files(self.path, folder)]


@pytest.fixture(scope="module")
def store():
    with served("lake") as environment:
        yield environment


def test_what_was_staged_and_is_gone_is_no_lost_answer(store, spark, monkeypatch):
    for name, value in store.items():
        monkeypatch.setenv(name, value)
    sink = Staged(f"{TABLE}/gone", mode="upsert", key="number")
    stage = sink.stage

    def staged(frame, attempts, ship):
        found = stage(frame, attempts, ship)
        for attempt in attempts:
            remove_tree(sink.path / upsert_folder(attempt))
        return found

    sink.stage = staged
    context = WriteContext(WriteIdentity("p", "sink", "job", epoch=0), "stage")
    with closing(SinkCommits(sink)) as commits, pytest.raises(FileNotFoundError):
        commits.write(spark.createDataFrame([(0,)], "number int"), [context])


@pytest.mark.parametrize(
    ("mode", "fault"),
    [("append", Fault(CUT, client="delta")), ("upsert", Fault(LOST, method="PUT", key="_delta_log"))],
)
def test_each_epoch_is_in_the_table_once(mode, fault, store, spark, monkeypatch):
    for name, value in store.items():
        monkeypatch.setenv(name, value)
    path = f"{TABLE}/{mode}/{fault.kind}"
    sink = Staged(path, mode=mode, key="number" if mode == "upsert" else ())
    disturb(store["AWS_ENDPOINT_URL"], fault)
    try:
        with closing(SinkCommits(sink)) as commits:
            for epoch in range(2):
                context = WriteContext(WriteIdentity("p", "sink", "job", epoch=epoch), "stage")
                frame = spark.createDataFrame([(epoch,)], "number int")
                commits.write(frame, [context])
                assert commits.write(frame, [context])[0].repeated
        table = DeltaTable(path)
    finally:
        disturb(store["AWS_ENDPOINT_URL"])
    assert sorted(table.to_pyarrow_table()["number"].to_pylist()) == [0, 1]
    # deltalake creates a table anew, with the same columns, whose creation it has not heard of
    assert sum(entry["operation"] != "CREATE TABLE" for entry in table.history()) == 2
