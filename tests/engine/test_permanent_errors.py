"""Errors that another attempt would meet again, in both modes.

They are terminal by their type, and name what has to be corrected.
"""

import sys
from datetime import timedelta
from types import ModuleType

import pytest
from deltalake import DeltaTable

from dagster_unified.api import Pipeline
from dagster_unified.connectors import CsvSource, DeltaSink, FileSink, StructuredSource
from dagster_unified.engine.commit import _named
from dagster_unified.errors import MalformedInputError, MissingRequirementError, PipelineError, SinkError
from tests.support import Sale


@pytest.fixture(params=["BATCH", "STREAMING"])
def run(request, run_on_spark, run_streaming):
    return run_on_spark if request.param == "BATCH" else run_streaming


@pytest.mark.a_day(1)
@pytest.mark.parametrize(
    ("header", "columns"), [("shop,amout", "shop, amout"), ("shop,amount,note", "shop, amount, note")]
)
def test_a_header_that_does_not_name_the_records_fields(run, tmp_path, header, columns):
    (tmp_path / "some sales.csv").write_text(f"{header}\na,1,\n")
    pipeline = Pipeline("p")
    pipeline.from_source(CsvSource(str(tmp_path / "some sales.csv"), Sale, name="sales")).print()
    said = (
        rf"p: source 'sales': the header of /.*/some sales\.csv has the columns {columns}, and Sale\(.*\) needs shop,"
        r" amount, in this order; correct"
    )
    with pytest.raises(MalformedInputError, match=said) as raised:
        run(pipeline)
    assert not raised.value.retryable


@pytest.mark.a_day(1)
def test_an_expression_that_spark_does_not_accept(run):
    pipeline = Pipeline("p")
    pipeline.from_collection([Sale("a", 1)]).where("not_a_function(amount) > 0").name("large").print()
    with pytest.raises(
        PipelineError, match=r"p: operator 'large': Spark does not accept .*not_a_function.*; correct the names"
    ) as raised:
        run(pipeline)
    assert not raised.value.retryable


@pytest.fixture
def elsewhere():
    """A module that this process has and that its workers cannot import."""
    module = ModuleType("elsewhere")
    exec("def priced(amount: int) -> int:\n    return amount", vars(module))
    sys.modules["elsewhere"] = module
    yield module
    del sys.modules["elsewhere"]


@pytest.mark.a_day(1)
def test_a_module_that_workers_do_not_have(run, elsewhere):
    pipeline = Pipeline("p")
    pipeline.from_collection([1]).map(elsewhere.priced).print()
    said = r"^p: host \S+ has no elsewhere: install what the driver has for the workers' interpreter"
    with pytest.raises(MissingRequirementError, match=said) as raised:
        run(pipeline)
    assert not raised.value.retryable


def test_a_job_whose_workers_lack_a_module_is_not_started_again(spark, tmp_path, elsewhere, caplog):
    pipeline = Pipeline("p")
    pipeline.from_collection([1]).map(elsewhere.priced).print()
    options = {"execution.runtime-mode": "STREAMING", "execution.checkpointing.dir": str(tmp_path)}
    with pytest.raises(MissingRequirementError, match="has no elsewhere"):
        pipeline.execute(options, spark=spark).result(timedelta(minutes=2))
    assert "attempt" not in caplog.text


class Unloadable:
    def __call__(self, amount):
        return amount

    def __reduce__(self):
        return int, ("a price",)


@pytest.mark.a_day(1)
def test_a_function_that_workers_cannot_load(run):
    pipeline = Pipeline("p")
    pipeline.from_collection([1]).map(Unloadable(), output_type=int).print()
    said = r"^p: host \S+ cannot load what it was sent: ValueError: invalid literal .*; create connections"
    with pytest.raises(PipelineError, match=said) as raised:
        run(pipeline)
    assert not raised.value.retryable


@pytest.mark.a_day(1)
def test_a_data_source_that_spark_does_not_have(run):
    pipeline = Pipeline("p")
    pipeline.from_source(StructuredSource("no.such", Sale, name="sales", bounded=True)).print()
    said = r"^p: .*'\w+': Spark has no data source 'no.such'; correct the name, or give the session its package"
    with pytest.raises(MissingRequirementError, match=said) as raised:
        run(pipeline)
    assert not raised.value.retryable


@pytest.mark.a_day(1)
@pytest.mark.parametrize("sink", [DeltaSink, FileSink])
def test_a_path_that_cannot_be_written_to(run, tmp_path, sink):
    (tmp_path / "file").write_text("")
    pipeline = Pipeline("p")
    pipeline.from_collection([Sale("a", 1)]).sink_to(sink(str(tmp_path / "file" / "table"), name="out"))
    with pytest.raises(
        SinkError,
        match=r"p: sink 'out' \(.* at /.*/file/table.*\) cannot be written to: \w[^:]*: [^;]*/file\S*; give it a path",
    ) as raised:
        run(pipeline)
    assert not raised.value.retryable


@pytest.mark.a_day(1)
@pytest.mark.parametrize("sink", [DeltaSink, FileSink])
def test_a_file_in_the_place_of_a_sinks_folder_stays(run, tmp_path, sink):
    (tmp_path / "totals").write_text("of somebody")
    pipeline = Pipeline("p")
    pipeline.from_collection([Sale("a", 1)]).sink_to(sink(str(tmp_path / "totals"), name="out"))
    with pytest.raises(SinkError, match=r"p: sink 'out': /.*/totals is a file, and the sink writes a folder") as raised:
        run(pipeline)
    assert not raised.value.retryable
    assert (tmp_path / "totals").read_text() == "of somebody"


@pytest.mark.a_day(1)
def test_a_delta_table_in_the_place_of_a_sinks_folder_of_files_stays(run, tmp_path):
    for sink in (DeltaSink, FileSink):
        pipeline = Pipeline("p")
        pipeline.from_collection([Sale("a", 1)]).sink_to(sink(str(tmp_path / "totals"), name="out"))
        if sink is DeltaSink:
            run(pipeline)
            continue
        with pytest.raises(SinkError, match=r"p: sink 'out': /.*/totals is a Delta table, and the sink replaces what"):
            run(pipeline)
    assert DeltaTable(str(tmp_path / "totals")).to_pyarrow_table().num_rows == 1


def test_a_disk_that_takes_no_files_is_told_of_the_sink_that_stages_beside_its_folder():
    pipeline = Pipeline("p")
    pipeline.from_collection([Sale("a", 1)]).sink_to(FileSink("/disk/tables", name="out"))
    (node,) = pipeline.graph().sinks
    said = "Job aborted: java.io.IOException: Mkdirs failed to create file:/disk/.tables.160/_temporary/0"
    with pytest.raises(SinkError, match=r"p: sink 'out' .* cannot be written to: "), _named(node, "p"):
        raise RuntimeError(said)
    with pytest.raises(RuntimeError), _named(node, "p"):
        raise RuntimeError(said.replace("/disk/", "/other/"))
