"""An operator that the library does not have: its node says all that planning, the lint and the engines ask of it."""

import zlib
from dataclasses import dataclass

from dagster_unified.api import Pipeline
from dagster_unified.graph.execution_graph import Link, program
from dagster_unified.graph.nodes import Node
from dagster_unified.graph.plan import column_lineage
from dagster_unified.operators.program.step import FusedStep
from dagster_unified.operators.stateless import Filter
from dagster_unified.testing import assert_same_in_both_modes, run_pipeline
from tests.support import MODES, Sale

SALES = [Sale(shop, amount) for shop in ("north", "south") for amount in range(6)]


@dataclass(frozen=True)
class SampleStep(FusedStep):
    every: int = 1

    def clause(self, place):
        return Filter(lambda record: chosen(record, self.every))


def chosen(record, every):
    return zlib.crc32(repr(record).encode()) % every == 0


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleNode(Node):
    """Keeps one record in `every`, the same ones in each run."""

    every: int

    step = SampleStep
    keeps_records = True

    def step_arguments(self):
        return {"every": self.every}

    def describe(self):
        return f"one record in {self.every}"

    def parity(self):
        return [self.note("sample", "keeps a record by its text; round what the modes may compute differently")]


def sampled(every=2):
    pipeline = Pipeline("samples")
    sales = pipeline.from_collection(SALES, name="sales").map(lambda sale: sale, Sale)
    sample = sales._next(SampleNode, "sample", records=sales._records("sample"), every=every)
    sample.key_by("shop").sum("amount").print("totals")
    sample.print("sample")
    return pipeline


def test_explain_shows_it_in_the_stage_and_the_task_of_its_neighbours():
    plan = sampled().plan()
    assert [[plan.graph.node(o).name for o in task.operators] for task in plan.tasks] == [
        ["sales", "map", "sample", "sample"],
        ["sum", "totals"],
    ]
    assert [[plan.graph.node(n).name for n in region.nodes] for region in plan.regions] == [
        ["sales", "map", "sample", "sample"],
        ["sum", "totals"],
    ]
    shown = sampled().explain()
    assert "sample 'sample': one record in 2 → Sale" in shown
    assert "note: 'sample' keeps a record by its text; round what the modes may compute differently [sample]" in shown


def test_the_lint_applies_its_rules_for_all_operators():
    pipeline = Pipeline("samples")
    totals = pipeline.from_collection(SALES).key_by("shop").sum("amount")
    totals._next(SampleNode, "sample", records=totals._records("sample"), every=2).print()
    assert ("counts-updates", "warning") in {(f.rule, f.severity) for f in pipeline.plan().findings}


def test_its_settings_are_part_of_its_stages_fingerprint():
    two, three = (sampled(every).plan().regions[0].fingerprint for every in (2, 3))
    assert (two != three, sampled(2).plan().regions[0].fingerprint == two) == (True, True)


def test_columns_come_through_it_as_its_traits_say():
    pipeline = Pipeline("samples")
    sales = pipeline.from_collection(SALES, name="sales")
    sales._next(SampleNode, "sample", records=sales._records("sample"), every=2).print()
    plan = pipeline.plan()
    (region,) = plan.regions
    assert column_lineage(plan, region, region.sinks[0]) == {
        "shop": frozenset({(0, "shop")}),
        "amount": frozenset({(0, "amount")}),
    }


def test_it_is_translated_to_the_step_that_it_names():
    plan = sampled().plan()
    sample = next(n for n in plan.graph.nodes if isinstance(n, SampleNode))
    (step,) = program(plan, "stage", [Link(sample.id)]).steps
    assert (type(step), step.name, step.output, step.every) == (SampleStep, "sample", None, 2)


@MODES
def test_it_runs(mode):
    expected = [sale for sale in SALES if chosen(sale, 2)]
    assert 0 < len(expected) < len(SALES)
    assert sorted(run_pipeline(sampled(), mode).sinks["sample"]) == expected


def test_both_modes_end_with_the_same_result():
    assert_same_in_both_modes(sampled())
