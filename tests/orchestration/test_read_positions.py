"""Materializations of BATCH runs say what was read of each source, and the versions that they made."""

import pyarrow as pa
from dagster import DagsterInstance
from deltalake import DeltaTable, write_deltalake

from dagster_unified.api import Pipeline
from dagster_unified.connectors import CsvSource, DeltaSink, DeltaSource
from dagster_unified.orchestration import unified_definitions
from tests.orchestration.support import resources
from tests.support import Sale


def test_a_run_says_versions_and_files(spark, tmp_path):
    for _ in range(3):
        write_deltalake(str(tmp_path / "before"), pa.table({"shop": ["north"], "amount": [1]}), mode="append")
    (tmp_path / "in").mkdir()
    for name in ("one", "two"):
        (tmp_path / "in" / f"{name}.csv").write_text("shop,amount\nsouth,2\n")
    pipeline = Pipeline("sales")
    table = pipeline.from_source(DeltaSource(str(tmp_path / "before"), Sale, name="before"))
    files = pipeline.from_source(CsvSource(str(tmp_path / "in"), Sale, name="incoming"))
    table.union(files).sink_to(DeltaSink(str(tmp_path / "after"), name="after"))
    definitions = unified_definitions(pipeline, resources=resources(tmp_path))
    with DagsterInstance.ephemeral() as instance:
        done = definitions.resolve_job_def("sales_batch").execute_in_process(instance=instance)
        told = [event.materialization.metadata for event in done.get_asset_materialization_events()]
    # an offset is the next to read
    (read,) = [metadata["read"].data for metadata in told if "read" in metadata]
    assert read["incoming"] == {"of": str(tmp_path / "in"), "files": 2}
    assert (read["before"]["of"], list(read["before"]["offsets"].values())) == (
        f"Delta table at {tmp_path}/before",
        [3],
    )
    (version,) = [metadata["version"].value for metadata in told if "version" in metadata]
    assert version == DeltaTable(str(tmp_path / "after")).version()
