"""What a plan says of the savepoints that a run starts from and leaves."""

import pytest

from dagster_unified.api import Pipeline
from dagster_unified.api import functions as F
from dagster_unified.errors import UnsupportedError
from dagster_unified.graph.options import Configuration
from dagster_unified.graph.plan import plan
from tests.support import MODES


def totals():
    pipeline = Pipeline("shops")
    pipeline.from_collection([("a", 1)], tuple[str, int]).key_by("f0").agg(
        F.sum("f1").alias("f1"), output_type=tuple[str, int]
    ).print()
    return pipeline


@MODES
@pytest.mark.parametrize("option", ["execution.savepoint.path", "execution.state-recovery.path"])
def test_an_aggregate_whose_state_spark_keeps_and_a_savepoint_are_refused_together(mode, option):
    with pytest.raises(UnsupportedError, match=r"shops: a savepoint cannot hold the state of '.*', which Catalyst"):
        totals().plan({"execution.runtime-mode": mode, option: "/data/savepoint", "state.native-aggregates": "SPARK"})


@pytest.mark.parametrize("kept", ["AUTOMATIC", "SPARK"])
def test_partitions_that_leave_a_savepoint_hand_on_aggregates_in_the_portable_form_or_are_refused(kept):
    options = {"execution.savepoint.path": "/data/savepoint", "state.native-aggregates": kept}

    def planned():
        return plan(
            totals().graph(), Configuration.of({"execution.runtime-mode": "BATCH", **options}), carry_state=True
        )

    if kept == "SPARK":
        with pytest.raises(
            UnsupportedError, match=r"savepoint cannot hold the state of '.*', which Catalyst aggregates"
        ):
            planned()
    else:
        assert not any(node.aggregates_natively for node in planned().graph.nodes)


def test_the_keyed_stages_of_a_run_that_leaves_a_savepoint_hand_on_their_state():
    pipeline = Pipeline("shops")
    pipeline.from_collection([("a", 1)], tuple[str, int]).key_by("f0").reduce(lambda a, b: a).print()
    left = pipeline.plan({"execution.savepoint.path": "/data/savepoint"})
    assert [bool(region.carried) for region in left.regions] == [False, True]
    assert not any(region.carried for region in pipeline.plan().regions)
    assert left.regions[1].fingerprint != pipeline.plan().regions[1].fingerprint
