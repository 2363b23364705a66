"""`map_batches`: Arrow in, Arrow out."""

from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dagster_unified.api import KeyedProcessFunction, OutputTag, Pipeline, ProcessFunction, WatermarkStrategy
from dagster_unified.errors import RecordTypeError, UserFunctionError
from dagster_unified.graph.execution_graph import Link, program
from dagster_unified.graph.nodes import Port
from dagster_unified.graph.options import Configuration
from dagster_unified.graph.plan import plan
from dagster_unified.operators.drivers.batch import run_batch
from dagster_unified.operators.program.step import Output
from dagster_unified.testing import run_pipeline


class Row(NamedTuple):
    key: str
    at: int


class When(KeyedProcessFunction):
    def process_element(self, value: Row, ctx) -> list[tuple[int, int]]:
        return [(value.at, ctx.timestamp())]


def times(function, timestamped=True):
    pipeline = Pipeline("p")
    stream = pipeline.from_collection([Row("a", 1), Row("a", 2), Row("a", 3)])
    if timestamped:
        stream = stream.assign_timestamps_and_watermarks(
            WatermarkStrategy.no_watermarks().with_timestamp_assigner("at")
        )
    stream = stream.map_batches(function, Row).name("vector")
    (stream.key_by("key").process(When()) if timestamped else stream).print()
    return run_pipeline(pipeline, "BATCH").only()


def add_ten(batch):
    return pa.RecordBatch.from_pydict({"key": batch["key"], "at": pc.add(batch["at"], 10)})


def drop_first(batch):
    return batch.slice(1)


def drop_first_and_time(batch):
    return batch.slice(1).select(["key", "at"])


def test_rows_that_stay_as_many_keep_their_event_times():
    assert times(add_ten) == [(11, 1), (12, 2), (13, 3)]


def test_rows_that_change_in_number_need_the_column_of_event_times():
    assert times(drop_first) == [(2, 2), (3, 3)]
    with pytest.raises(
        RecordTypeError,
        match=r"operator 'vector': the function was given 3 rows and returned 2, .* keep the column '__ts'",
    ):
        times(drop_first_and_time)


def test_without_event_times_any_number_of_rows_may_come_back():
    assert times(drop_first_and_time, timestamped=False) == [Row("a", 2), Row("a", 3)]


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        (lambda b: b.to_pylist(), RecordTypeError, "must return a pyarrow.RecordBatch, not list"),
        (lambda b: b.select(["key"]), RecordTypeError, "the returned batch has no column 'at'; it has key"),
        (
            lambda b: pa.RecordBatch.from_pydict({"key": b["key"], "at": ["x"] * 3}),
            RecordTypeError,
            r"column .at. of the returned batch is a string, and Row\(key: string, at: int64\) has a int64",
        ),
        (lambda b: b["nothing"], UserFunctionError, r"KeyError: .*nothing.* on \[\{'key': 'a', 'at': 1"),
        (
            lambda b: pa.RecordBatch.from_pydict({"key": b["key"], "at": pa.nulls(3, pa.int64())}),
            RecordTypeError,
            "field 'at'",
        ),
    ],
)
def test_a_batch_that_is_not_what_was_declared_is_an_error_that_names_the_operator(function, kind, words):
    with pytest.raises(kind, match=f"p: stage 'vector', operator 'vector'.*{words}"):
        times(function, timestamped=False)


def test_behind_a_side_output_it_gets_batches_of_the_side_outputs_type():
    names = OutputTag("names", str)

    class Split(ProcessFunction):
        def process_element(self, value: Row, ctx) -> list[Row]:
            ctx.output(names, value.key)
            return [value]

    pipeline = Pipeline("p")
    rows = pipeline.from_collection([], Row).process(Split())
    rows.print("rows")
    rows.get_side_output(names).map_batches(lambda batch: batch, str).print("names")
    decided = plan(pipeline.graph(), Configuration.of({"execution.runtime-mode": "BATCH"}))
    split, same = (node.id for node in decided.graph.nodes if node.name in ("Split", "map_batches"))
    links = [Link(split), Link(same, 0, names.name)]
    chained = program(decided, "stage", links, [Output(1, decided.layout(Port(same)))])
    batches = [chained.input.records.to_batch([Row("a", 1), Row("b", 2)])]
    (emitted,) = run_batch(chained, batches)
    assert emitted.batch.to_pylist() == [{"value": "a"}, {"value": "b"}]
