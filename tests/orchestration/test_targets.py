"""Sinks of one code location that would take away each other's rows are an error when it loads.

Nothing has run by then.
"""

import pytest
from dagster import DagsterInstance, DagsterInvalidDefinitionError, Definitions, SkipReason, build_sensor_context

from dagster_unified.api import Pipeline
from dagster_unified.connectors import DeltaSink, PrintSink, RateSource
from dagster_unified.errors import ConfigurationError, PipelineError
from dagster_unified.orchestration import StreamingDeployment, unified_definitions
from tests.orchestration.support import ticked


def pipeline(name, path, unbounded=False, **options):
    made = Pipeline(name)
    stream = made.from_source(RateSource()) if unbounded else made.from_collection([1])
    stream.sink_to(DeltaSink(str(path), **options))
    return made


def test_two_pipelines_that_are_defined_together_may_not_overwrite_one_table(tmp_path):
    with pytest.raises(PipelineError, match=r"sink 'a' of one \(.*\) and sink 'a' of two \(.*\) write to one place"):
        unified_definitions(pipeline("one", tmp_path / "a"), pipeline("two", tmp_path / "a"))
    unified_definitions(pipeline("one", tmp_path / "a", mode="append"), pipeline("two", tmp_path / "a", mode="append"))


def test_nor_two_whose_definitions_are_merged(tmp_path):
    merged = Definitions.merge(
        unified_definitions(pipeline("one", tmp_path / "a")),
        unified_definitions(pipeline("two", f"file://{tmp_path}/a/")),
    )
    with pytest.raises(DagsterInvalidDefinitionError) as raised:
        Definitions.validate_loadable(merged)
    assert isinstance(raised.value.__cause__, PipelineError)
    assert "sink 'a' of two" in str(raised.value.__cause__)


def test_the_sensor_of_a_stream_does_not_start_what_would_overwrite_another_table(tmp_path):
    merged = Definitions.merge(
        *[unified_definitions(pipeline(name, tmp_path / "a", unbounded=True)) for name in ("one", "two")]
    )
    with DagsterInstance.ephemeral() as instance:
        context = build_sensor_context(instance, repository_def=merged.get_repository_def())
        answer = ticked(merged.resolve_sensor_def("one_streaming_sensor"), context)
    assert isinstance(answer, SkipReason)
    assert "sink 'a' of two" in answer.skip_message


def test_definitions_that_can_be_merged_load(tmp_path):
    Definitions.validate_loadable(
        Definitions.merge(*[unified_definitions(pipeline(name, tmp_path / name)) for name in ("one", "two")])
    )


def summed(*sinks, sources=("in",)):
    pipeline = Pipeline("shops")
    first, *more = [pipeline.from_collection([1], int, source) for source in sources]
    total = first.union(*more).key_by(lambda number: number, key_type=int).sum()
    for name in sinks:
        total.sink_to(PrintSink(name=name))
    return pipeline


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda: summed("by shop", "by_shop"),
            "sink 'by shop' of shops and sink 'by_shop' of shops would both be the asset",
        ),
        (lambda: StreamingDeployment(summed("by shop", "by_shop")), "would both be the asset shops/by_shop; give one"),
        (lambda: StreamingDeployment(summed("savepoint")), "sink 'savepoint' of shops and savepoints of shops would"),
        (
            lambda: summed("out", sources=("in put", "in_put")),
            "source 'in put' of shops and source 'in_put' of shops would both",
        ),
    ],
)
def test_names_that_would_be_one_asset_are_refused(build, words):
    with pytest.raises(ConfigurationError, match=words):
        unified_definitions(build())
