"""The checks of rows of CSV and JSON: nothing that stands behind them hides a row or makes them dear."""

import json
from datetime import date
from typing import NamedTuple

import pytest
from dagster import DailyPartitionsDefinition, StaticPartitionsDefinition
from deltalake import DeltaTable

from dagster_unified.api import Pipeline
from dagster_unified.connectors import CsvSource, DeltaSink, JsonSource
from dagster_unified.errors import MalformedInputError
from dagster_unified.orchestration.partitions import slice_of
from tests.support import MODES

COLUMNS = 14
"""So many that what doubles with each column is far beyond what Spark needs otherwise."""

Wide = NamedTuple("Wide", [(f"column{n}", int) for n in range(COLUMNS)])


@pytest.mark.a_day(2)
@pytest.mark.parametrize("on_malformed", ["fail", "drop", "divert"])
@pytest.mark.parametrize("bound", [False, True])
def test_columns_may_be_renamed_behind_the_checks(spark, tmp_path, on_malformed, bound):
    """From a condition Spark infers one for each set of renamed columns that it has."""
    (tmp_path / "wide.csv").write_text(",".join(Wide._fields) + "\n")
    source = CsvSource(str(tmp_path / "wide.csv"), Wide, on_malformed=on_malformed)
    if bound:
        days = StaticPartitionsDefinition(["1", "2"])
        source = source.partitioned_by("column0").bounded_to(slice_of(days, "1"))
    frame = source.with_fixed_range().read_partition(spark)
    fitting = frame.where("__malformed is null") if on_malformed != "fail" else frame
    renamed = fitting.selectExpr(*[f"{name} AS re{name}" for name in Wide._fields])
    plan = renamed.where("recolumn1 > 1")._jdf.queryExecution().optimizedPlan()
    assert plan.constraints().size() < 100


class Sale(NamedTuple):
    name: str
    amount: int


ROWS = {
    "csv": "name,amount\na,1\nb,9\nc,many\nd\n",
    "json": '{"name":"a","amount":1}\n{"name":"b","amount":9}\n{"name":"c","amount":"many"}\n{"name":"d"}\n',
}


@pytest.mark.a_day(2)
@pytest.mark.parametrize("form", ["csv", "json"])
@MODES
def test_a_filter_on_columns_does_not_hide_a_malformed_row(run_in, tmp_path, form, mode):
    (tmp_path / f"sales.{form}").write_text(ROWS[form])
    reads = CsvSource if form == "csv" else JsonSource
    conditions = {"by_amount": "amount > 5", "by_name": "name = 'b'"}

    def run(on_malformed, *names):
        of_run = "_".join([on_malformed, *names])
        pipeline = Pipeline(of_run)
        sales = pipeline.from_source(reads(str(tmp_path / f"sales.{form}"), Sale, on_malformed=on_malformed))
        for name in names:
            sales.where(conditions[name]).sink_to(DeltaSink(str(tmp_path / name), name=name))
        run_in[mode](pipeline, {"execution.checkpointing.dir": f"{tmp_path}/{of_run}"})

    for name in conditions:
        with pytest.raises(MalformedInputError, match=r"sales\.\w+, line [345]"):
            run("fail", name)
    run("drop", *conditions)
    for name in conditions:
        assert DeltaTable(str(tmp_path / name)).to_pyarrow_table().to_pylist() == [{"name": "b", "amount": 9}]


class Visit(NamedTuple):
    number: int
    day: date


@pytest.mark.a_day(1)
@pytest.mark.parametrize("on_malformed", ["fail", "divert"])
def test_a_partition_reads_its_folders_only(spark, tmp_path, on_malformed):
    """Of other folders a run for a partition does not even see that their files are no JSON."""
    for day in range(1, 10):
        folder = tmp_path / "visits" / f"day=2024-01-0{day}"
        folder.mkdir(parents=True)
        (folder / "a.json").write_text(json.dumps({"number": day}) if 4 <= day <= 6 else "no JSON")
    days = DailyPartitionsDefinition("2024-01-01")
    source = JsonSource(str(tmp_path / "visits"), Visit, on_malformed=on_malformed).partitioned_by("day")
    frame = source.bounded_to(slice_of(days, "2024-01-05")).with_fixed_range().read_partition(spark)
    assert [(row.number, row.day) for row in frame.collect()] == [(5, date(2024, 1, 5))]
