"""The malformed rows that a source sets aside, as an asset and on the command line."""

import pytest
from dagster import AssetKey, DagsterInstance, StaticPartitionsDefinition
from dagster_pyspark import PySparkResource

from dagster_unified.api import Pipeline
from dagster_unified.cli import main
from dagster_unified.connectors import CsvSource, FileSink
from dagster_unified.orchestration import (
    BatchDeployment,
    IntermediatesResource,
    StreamingDeployment,
    unified_definitions,
)
from tests.orchestration.support import resources
from tests.support import Sale

PIPELINE = """
from tests.orchestration.test_malformed import sales
pipeline = sales({folder!r})
"""


def sales(folder, on_malformed="divert"):
    pipeline = Pipeline("sales")
    source = CsvSource(f"{folder}/in/{{key}}.csv", Sale, name="files", on_malformed=on_malformed)
    pipeline.from_source(source).map(lambda s: s, Sale).sink_to(FileSink(f"{folder}/out"))
    return pipeline


DEFINITIONS = """
from tests.orchestration.test_malformed import deployed
defs = deployed({folder!r})
"""


def deployed(folder):
    pipeline = sales(folder)
    deployment = StreamingDeployment(pipeline, options={"execution.checkpointing.dir": f"{folder}/checkpoints"})
    return unified_definitions(
        pipeline, deployment, resources={"intermediates": IntermediatesResource(path=f"{folder}/store")}
    )


KEY = AssetKey(["sales", "files_malformed"])


def test_they_are_an_asset_that_depends_on_its_source():
    graph = unified_definitions(sales("/in")).resolve_asset_graph()
    assert graph.get(KEY).parent_keys == {AssetKey(["sales", "files_source"])}
    assert not unified_definitions(sales("/in", "drop")).resolve_asset_graph().has(KEY)


def test_a_run_materializes_the_asset_with_its_rows_which_the_command_line_shows(spark, tmp_path, monkeypatch, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/north.csv").write_text("shop,amount\nnorth,1\nnorth,[many]\n")
    (tmp_path / "in/south.csv").write_text("shop,amount\nsouth,1\n")
    partitions = StaticPartitionsDefinition(["north", "south"])
    job = unified_definitions(
        BatchDeployment(sales(str(tmp_path)), partitions=partitions), resources=resources(tmp_path)
    ).resolve_job_def("sales_batch")
    told = {}
    with DagsterInstance.ephemeral() as instance:
        for key in ("north", "south"):
            events = job.execute_in_process(instance=instance, partition_key=key).get_asset_materialization_events()
            (told[key],) = [e.materialization for e in events if e.materialization.asset_key == KEY]
    assert {key: (m.partition, m.metadata["dagster/row_count"].value) for key, m in told.items()} == {
        "north": ("north", 1),
        "south": ("south", 0),
    }
    (row,) = told["north"].metadata["latest rows"].records
    assert (row.data["partition"], row.data["line"], row.data["content"]) == ("north", 3, "north,[many]")
    (tmp_path / "shop_sales.py").write_text(PIPELINE.format(folder=str(tmp_path)))
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "malformed",
                str(tmp_path / "shop_sales.py"),
                "--storage",
                str(tmp_path / "store"),
                "-D",
                f"execution.checkpointing.dir={tmp_path}/checkpoints",
            ]
        )
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert f"files, BATCH: 1 malformed rows at {tmp_path}/store/sales/~malformed/files" in printed
    assert "files, STREAMING: 0 malformed rows" in printed
    assert all(text in printed for text in ("north.csv", " 3 ", "north,[many]", "field 'amount' is"))
    (tmp_path / "shop_definitions.py").write_text(DEFINITIONS.format(folder=str(tmp_path)))
    with pytest.raises(SystemExit):
        main(["malformed", str(tmp_path / "shop_definitions.py")])
    of_definitions = capsys.readouterr().out
    assert f"files, BATCH: 1 malformed rows at {tmp_path}/store/sales/~malformed/files" in of_definitions
    assert f"files, STREAMING: 0 malformed rows at {tmp_path}/checkpoints/sales/malformed/files" in of_definitions


def test_a_stream_in_the_session_of_pyspark_observes_the_asset_with_its_rows(spark, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/1.csv").write_text("shop,amount\nnorth,1\nnorth,[many]\n")
    pipeline = Pipeline("sales")
    source = CsvSource(f"{tmp_path}/in", Sale, name="files", on_malformed="divert")
    pipeline.from_source(source).map(lambda s: s, Sale).sink_to(FileSink(f"{tmp_path}/out"))
    deployment = StreamingDeployment(pipeline, options={"execution.checkpointing.dir": str(tmp_path / "checkpoints")})
    definitions = unified_definitions(pipeline, deployment, resources={"spark": PySparkResource(spark_config={})})
    with DagsterInstance.ephemeral() as instance:
        assert definitions.resolve_job_def("sales_streaming").execute_in_process(instance=instance).success
        (observed,) = instance.fetch_observations(KEY, limit=9).records
    assert observed.asset_observation.metadata["dagster/row_count"].value == 1
    (row,) = observed.asset_observation.metadata["latest rows"].records
    assert (row.data["file"], row.data["line"], row.data["content"]) == (f"{tmp_path}/in/1.csv", 3, "north,[many]")


def test_a_pipeline_that_sets_nothing_aside_says_so(tmp_path, capsys):
    (tmp_path / "shop_none.py").write_text(
        PIPELINE.format(folder=str(tmp_path)).replace("sales('", "sales(on_malformed='drop', folder='")
    )
    with pytest.raises(SystemExit) as ended:
        main(["malformed", str(tmp_path / "shop_none.py")])
    assert ended.value.code == 2
    assert (
        "no source of sales sets malformed rows aside; read it with on_malformed='divert'"
        in capsys.readouterr().err.replace("\n", " ")
    )
