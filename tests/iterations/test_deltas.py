"""Delta iterations in the harness, against plain Python."""

import math
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.api import Pipeline, ReduceFunction, iterations
from dagster_unified.connectors import RateSource
from dagster_unified.errors import PipelineError, RecordTypeError, UnifiedError, UserFunctionError
from dagster_unified.testing import run_pipeline
from tests.depth import rotated
from tests.iterations.deltas import Nearest, NearestOfMany, Place, Visit, by_dijkstra, distances
from tests.iterations.programs import WAYS
from tests.iterations.support import Body


def found(pipeline, stream, **options):
    stream.map(lambda place: (place.name, place.distance), tuple[int, int | None]).print("out")
    return sorted(run_pipeline(pipeline, "BATCH", options=options, seed=3).sinks["out"])


@pytest.mark.parametrize("parallelism", [1, 3])
def test_it_ends_when_the_workset_is_empty_and_returns_the_solution_set(parallelism):
    assert found(*distances(WAYS, [1]), **{"parallelism.default": parallelism}) == [
        (1, 0), (2, 4), (3, 5), (4, 6), (5, None)
    ]  # fmt: skip


WAY = st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(1, 9))


class Shorter(ReduceFunction[Visit]):
    def reduce(self, value1: Visit, value2: Visit) -> Visit:
        return min(value1, value2)


LEAST = {"distance": "min"}


@pytest.mark.parametrize(
    ("body", "combine"),
    rotated(
        [(Nearest(), None), (Nearest(), LEAST), (Nearest(), min), (Nearest(), Shorter()), (NearestOfMany(), LEAST)], 2
    ),
)
@given(ways=st.lists(WAY, max_size=20), starts=st.lists(st.integers(0, 9), max_size=3))
def test_random_graphs_have_the_distances_that_plain_python_finds(body, combine, ways, starts):
    assert found(*distances(ways, starts, body=body, combine=combine)) == by_dijkstra(ways, starts)


def test_a_combiner_leaves_one_record_for_each_key_and_subtask():
    class Most(Nearest):
        def update(self, solution, workset):
            assert len(workset) <= 2
            return super().update(solution, workset)

    ways = [(0, n, 1) for n in range(1, 40)] + [(n, 100, n) for n in range(1, 40)]
    options = {"parallelism.default": 2}
    assert found(*distances(ways, [0], body=Most(), combine={"distance": "min"}), **options)[-1] == (100, 2)
    with pytest.raises(UserFunctionError, match="AssertionError"):
        found(*distances(ways, [0], body=Most()), **options)


class Counting(Nearest):
    """Also tells how often it was called, by a metric."""

    def open(self, runtime_context):
        self.context = runtime_context

    def update(self, solution, workset):
        self.context.count("called")
        return super().update(solution, workset)


def test_only_keys_that_were_sent_something_are_touched():
    ways = [(n, n + 1, 1) for n in range(5)] + [(n, n, 1) for n in range(100, 200)]
    pipeline, stream = distances(ways, [0], body=Counting())
    stream.print("out")
    assert run_pipeline(pipeline, "BATCH").metrics.counters["called"] == 6


def test_it_ends_after_so_many_rounds():
    assert found(*distances(WAYS, [1], max_rounds=2)) == [(1, 0), (2, 4), (3, 9), (5, None)]
    assert found(*distances(WAYS, [], max_rounds=2)) == [(1, None), (2, None), (3, None), (5, None)]


class Longest(iterations.DeltaFunction[str, int]):
    """Of records that are plain values, keyed by functions."""

    def update(self, solution: str | None, workset: Sequence[int]) -> tuple[str, list[int]]:
        return (solution or str(workset[0])) + "!" * len(workset), [n // 10 for n in workset if n >= 10]


def test_plain_values_may_be_keyed_by_functions():
    def first(text: str) -> tuple[str, int]:
        return text[0], 0

    def digit(n: int) -> tuple[str, int]:
        return str(n)[0], 0

    pipeline = Pipeline("plain")
    texts = pipeline.from_collection(["1", "2"], str, name="texts").key_by(first)
    numbers = pipeline.from_collection([123, 13, 31], int, name="numbers").key_by(digit)
    stream = iterations.iterate_delta(texts, numbers, Longest())
    stream.print("out")
    assert sorted(run_pipeline(pipeline, "BATCH", seed=3).only()) == ["1!!!!!", "2", "31!!"]


class Signed(NamedTuple):
    name: str
    amount: float
    nested: list[float]


class Negated(iterations.DeltaFunction[Signed, str]):
    def update(self, solution, workset):
        assert solution is not None
        return Signed(solution.name, -solution.amount, [-value for value in solution.nested]), ()


def test_a_change_of_only_the_sign_of_a_zero_is_kept():
    def itself(name: str) -> str:
        return name

    pipeline = Pipeline("signs")
    zeros = pipeline.from_collection([Signed("a", 0.0, [0.0])], Signed, name="zeros").key_by("name")
    names = pipeline.from_collection(["a"], str, name="names").key_by(itself)
    iterations.iterate_delta(zeros, names, Negated()).print("out")
    (signed,) = run_pipeline(pipeline, "BATCH", seed=3).only()
    assert [math.copysign(1, value) for value in (signed.amount, *signed.nested)] == [-1, -1]


class Wrong(Nearest):
    def __init__(self, change):
        self.change = change

    def update(self, solution, workset):
        return self.change, []


def reading(pipeline, records=(), key="name", kind=Place):
    return pipeline.from_collection(list(records), kind).key_by(key)


class Named(NamedTuple):
    name: str


class Numbers(iterations.DeltaFunction[int, Visit]):
    def update(self, solution, workset):
        return None, []


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p: (p.from_collection([Place(1, 0, [])]), reading(p, kind=Visit), Nearest()), "not keyed; call key_by"),
        (lambda p: (reading(p), reading(p, kind=Place), Nearest()), "annotated with Visit for the workset"),
        (lambda p: (reading(p), reading(p, kind=Named), Nearest()), "different types .int64 and string"),
        (lambda p: (reading(p), reading(p, kind=Visit), Numbers()), "annotated with int for the solution set"),
        (lambda p: (reading(p), reading(p, kind=Visit), Nearest), "or a BatchDeltaFunction, such as MyFunction"),
        (
            lambda p: (reading(p), reading(p, kind=Visit), Nearest(), 0),
            "max_rounds must be a whole number of at least 1, not 0",
        ),
        (
            lambda p: (reading(p), reading(p, kind=Visit), Nearest(), None, PER_ROUND),
            "a solution set lives over all epochs",
        ),
        (lambda p: combining(p, {}), "combine does not say what becomes of 'distance'; give min, max, sum, or a func"),
        (lambda p: combining(p, {"distance": "min", "name": "max"}), "has 'name', which is no column beside the key"),
        (lambda p: combining(p, {"distance": "least"}), "combine knows min, max, sum, and not 'least'"),
        (lambda p: combining(p, min, NearestOfMany()), "batches are combined by columns; give combine= as a mapping"),
        (lambda p: (reading(p), counted(p), NearestOfMany()), "a BatchDeltaFunction finds rows by columns"),
        (lambda p: combining(p, 7), "expected a function or a function object, got 7"),
        (lambda p: ([], reading(p, kind=Visit), Nearest()), "a delta iteration needs two keyed streams"),
    ],
)
def test_what_cannot_run_is_refused(build, message):
    with pytest.raises(UnifiedError, match=message):
        iterations.iterate_delta(*build(Pipeline("refused")))


PER_ROUND = iterations.IterationConfig(operator_life_cycle="PER_ROUND")


def combining(pipeline, how, body=None):
    config = iterations.IterationConfig()
    return reading(pipeline), reading(pipeline, kind=Visit), body or Nearest(), None, config, how


def counted(pipeline):
    return reading(pipeline, kind=Visit, key=lambda visit: visit.name).key_by(lambda visit: 1, key_type=int)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p: p.from_collection([1]), "reduces the records of each key; call key_by on the stream before"),
        (lambda p: p.from_collection([Visit(1, 2)]).key_by(str, key_type=str), "keyed by a function, and columns are"),
        (lambda p: p.from_collection([Place(1, 2, [])]).key_by("name"), "cannot be computed on these columns"),
    ],
)
def test_what_cannot_be_combined_is_refused(build, message):
    with pytest.raises(PipelineError, match=message):
        iterations.combine(build(Pipeline("refused")), {"distance": "min", "ways": "min"})


@pytest.mark.parametrize("python", [bool, str, timedelta])
def test_what_is_no_number_is_not_added_up(python):
    class Seen(NamedTuple):
        name: str
        value: python

    stream = Pipeline("refused").from_collection([], Seen).key_by("name")
    with pytest.raises(PipelineError, match="combine adds up numbers, and 'value' is"):
        iterations.combine(stream, {"value": "sum"})


def test_an_unbounded_stream_is_refused():
    pipeline = Pipeline("refused")
    ticks = pipeline.from_source(RateSource(1)).map(lambda row: Visit(0, 0), Visit).key_by("name")
    with pytest.raises(PipelineError, match="is unbounded, and a bounded iteration waits"):
        iterations.iterate_delta(reading(pipeline), ticks, Nearest())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Place(2, 0, []), "operator 'Wrong': the function changed the record of key 2 when it was called for key 1"),
        (Place(1, "far", []), "operator 'Wrong': field 'distance'"),
    ],
)
def test_a_wrong_change_names_the_operator(change, message):
    with pytest.raises(RecordTypeError, match=message):
        found(*distances(WAYS, [1], body=Wrong(change)))


@pytest.mark.parametrize("returned", [None, Place(1, 2, []), Visit(1, 2)])
def test_an_update_that_returns_only_the_change_is_told_so(returned):
    class Forgets(iterations.DeltaFunction[Place, Visit]):
        def update(self, solution, workset):
            return returned

    with pytest.raises(RecordTypeError, match=r"operator 'Forgets': update returns the change or None, and the next"):
        found(*distances(WAYS, [1], body=Forgets()))


class Given(iterations.BatchDeltaFunction):
    """Changes what it is given to change."""

    def __init__(self, **columns):
        self.columns = columns

    def update_batch(self, solution, workset):
        return pa.RecordBatch.from_pydict(self.columns), None


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"distance": [1]}, "the changes have no column 'name', which is of the key"),
        ({"name": [1], "far": [1]}, "the changes have a column 'far', and a Place"),
        ({"name": [1], "distance": ["far"]}, "column 'distance' of the returned batch is a string"),
        ({"name": [1, 1]}, r"the function changed key \{'name': 1\} more than once; give combine="),
        ({"name": [2]}, r"the record of key \{'name': 2\}, which was sent nothing"),
    ],
)
def test_wrong_changes_of_batches_name_the_operator(columns, message):
    with pytest.raises(UnifiedError, match="operator 'Given': .*" + message):
        found(*distances(WAYS, [1], body=Given(**columns)))


def test_a_new_key_needs_all_columns():
    with pytest.raises(RecordTypeError, match=r"adds key \{'name': 9\} to the solution set, and has no column 'dist"):
        found(*distances(WAYS, [9], body=Given(name=[9])))


def test_columns_that_a_change_leaves_out_stay_as_they_are():
    assert found(*distances([(1, 2, 3), (2, 3, 4)], [1], body=Given(name=[1], distance=[7]))) == [(1, 7), (2, None)]


def test_batches_may_be_keyed_by_several_fields():
    class Cell(NamedTuple):
        row: int
        column: str
        value: int

    class Sum(iterations.BatchDeltaFunction):
        def update_batch(self, solution, workset):
            total = pc.add(solution["value"].fill_null(0), workset["value"])
            smaller = pc.divide(workset["value"], 2)
            following = workset.set_column(2, "value", smaller).filter(pc.greater(smaller, 0))
            return workset.set_column(2, "value", total), following

    pipeline = Pipeline("cells")
    cells = pipeline.from_collection([Cell(1, "a", 1), Cell(1, "b", 2)], name="cells").key_by("row", "column")
    more = pipeline.from_collection([Cell(1, "a", 4), Cell(1, "a", 4), Cell(2, "a", 1)], name="more")
    more = more.key_by("row", "column")
    iterations.iterate_delta(cells, more, Sum(), combine={"value": "sum"}).print("out")
    expected = [Cell(1, "a", 16), Cell(1, "b", 2), Cell(2, "a", 1)]
    assert sorted(run_pipeline(pipeline, "BATCH", seed=3).only()) == expected


@pytest.mark.parametrize("body", [Nearest(), NearestOfMany()])
def test_two_initial_records_of_one_key_are_an_error(body):
    pipeline = Pipeline("twice")
    places = reading(pipeline, [Place(1, 0, []), Place(1, 2, [])])
    stream = iterations.iterate_delta(places, reading(pipeline, kind=Visit), body)
    with pytest.raises(PipelineError, match=r"key .*1.*; reduce its records to one before"):
        found(pipeline, stream)


def test_an_error_of_the_function_says_where_it_was():
    class Failing(Nearest):
        def update(self, solution, workset):
            raise ValueError("no way")

    with pytest.raises(UserFunctionError, match=r"operator 'Failing': ValueError: no way.*key 1"):
        found(*distances(WAYS, [1], body=Failing()))


def test_explain_shows_the_join():
    pipeline, stream = distances(WAYS, [1], max_rounds=3)
    stream.print("out")
    text = pipeline.explain({"execution.runtime-mode": "BATCH"})
    for line in (
        "iteration 'Nearest': 1 variable, 1 data stream, ALL_ROUND, until its criteria are met",
        "delta 'Nearest' reads 'variable 0' through HASH by key0 and 'data 0' through HASH by key0",
    ):
        assert line in text
    mark = pipeline.plan({"execution.runtime-mode": "BATCH"}).regions[0].fingerprint
    again, stream = distances(WAYS, [1], max_rounds=3)
    stream.print("out")
    assert again.plan({"execution.runtime-mode": "BATCH"}).regions[0].fingerprint == mark


@pytest.mark.parametrize("body", [Nearest(), NearestOfMany()])
def test_streaming_gives_the_same(body):
    pipeline, stream = distances(WAYS, [1], body=body, combine=LEAST)
    stream.map(lambda place: (place.name, place.distance), tuple[int, int | None]).print("out")
    assert sorted(run_pipeline(pipeline, "STREAMING", micro_batch=2).sinks["out"]) == by_dijkstra(WAYS, [1])


class Amount(NamedTuple):
    key: int
    v: int
    v_sum: int = 0


def summed(amounts, how):
    """What a round's amounts of a key are combined to."""
    pipeline = Pipeline("summed")
    given = pipeline.from_collection(amounts, Amount, name="amounts").key_by("key")

    def build(variables, data):
        combined = iterations.combine(variables[0], how)
        return iterations.IterationBodyResult([combined.filter(lambda a: False).key_by("key")], [combined])

    config = iterations.IterationConfig(parallelism=1)
    (out,) = iterations.iterate_bounded_streams_until_termination([given], [], Body(build), config)
    out.print("out")
    return sorted(run_pipeline(pipeline, "BATCH").sinks["out"])


def test_a_sum_that_its_column_does_not_hold_is_an_error_and_not_another_number():
    sums = {"v": "sum", "v_sum": "max"}
    assert summed([Amount(1, 2**61)] * 3 + [Amount(2, -1, 5)], sums) == [Amount(1, 3 * 2**61), Amount(2, -1, 5)]
    for amounts in ([Amount(1, 2**62)] * 4, [Amount(1, -(2**63))] * 2):
        with pytest.raises(RecordTypeError, match="combine: a sum of column 'v' is larger than its type") as raised:
            summed(amounts, sums)
        assert str(raised.value).count("operator 'combine'") == 1


def test_a_combiner_keeps_the_key():
    with pytest.raises((RecordTypeError, UserFunctionError), match="combine has made a record of key 6 of two of key"):
        summed([Amount(5, 1), Amount(5, 2)], lambda a, b: Amount(6, a.v + b.v))
    with pytest.raises((RecordTypeError, UserFunctionError), match="combine has made None of two records of key 5"):
        summed([Amount(5, 1), Amount(5, 2)], lambda a, b: None)


@pytest.mark.parametrize("returned", [[], "none", (None,), pa.RecordBatch.from_pydict({"a": [1], "b": [2]})])
def test_what_is_not_two_batches_names_the_operator(returned):
    class Wrong(NearestOfMany):
        def update_batch(self, solution, workset):
            return returned

    with pytest.raises(RecordTypeError, match=r"operator 'Wrong': update_batch returns changes and the next workset"):
        found(*distances(WAYS, [1], body=Wrong()))


def test_floats_are_no_keys_of_batches_and_none_is_no_solution():
    class Share(NamedTuple):
        key: float
        v: int

    pipeline = Pipeline("floats")
    shares = pipeline.from_collection([Share(0.0, 1)], Share, name="shares").key_by("key")
    with pytest.raises(PipelineError, match="finds rows by values that are the same to the bit"):
        iterations.iterate_delta(shares, shares, NearestOfMany())
    maybe = pipeline.from_collection([1], int | None, name="maybe").key_by(lambda n: 0, key_type=int)
    with pytest.raises(PipelineError, match="a record of the solution set may be None"):
        iterations.iterate_delta(maybe, maybe, Nearest())


class Measured(NamedTuple):
    at: float | None
    value: int


class Greatest(iterations.DeltaFunction[Measured, Measured]):
    def update(self, solution, workset):
        return max((one for one in (solution, *workset) if one is not None), key=lambda one: one.value), []


@pytest.mark.parametrize("side", ["solution set", "workset"])
@pytest.mark.parametrize(("at", "what"), [(None, "is None"), (math.nan, "is nan, which equals nothing,")])
def test_what_is_no_key_is_said_of_the_authors_field(side, at, what):
    pipeline = Pipeline("measured")
    values = {"solution set": [Measured(1.0, 1)], "workset": [Measured(1.0, 2)]}
    values[side].append(Measured(at, 3))
    first, more = (pipeline.from_collection(v, Measured, name=n).key_by("at") for n, v in values.items())
    iterations.iterate_delta(first, more, Greatest()).print("out")
    message = f"^measured: .* iteration 'Greatest': {side}: the key 'at' {what} for .*'value': 3.*; filter such records"
    with pytest.raises(RecordTypeError, match=message):
        run_pipeline(pipeline, "BATCH")


class At(NamedTuple):
    row: int
    column: str | None


class Cell(NamedTuple):
    at: At
    since: datetime
    seen: list[At]
    amount: int


DAY = datetime(2026, 1, 1, tzinfo=timezone.utc)


class Amounts(iterations.DeltaFunction[Cell, Cell]):
    """Adds up amounts, and hands what is left of each on to the cell below."""

    def update(self, solution, workset):
        first = solution or workset[0]._replace(seen=[], amount=0)
        below = [cell._replace(at=cell.at._replace(row=cell.at.row + 1), amount=cell.amount - 1) for cell in workset]
        amount = first.amount + sum(cell.amount for cell in workset)
        return Cell(first.at, first.since, [*first.seen, first.at], amount), [cell for cell in below if cell.amount]


@pytest.mark.parametrize("key", ["at", lambda cell: (cell.at.row, cell.at.column)], ids=["field", "computed"])
@pytest.mark.parametrize("parallelism", [1, 3])
def test_keys_and_fields_may_be_records(key, parallelism):
    pipeline = Pipeline("nested")
    key_type = {} if key == "at" else {"key_type": tuple[int, str | None]}
    a, b = At(0, "a"), At(1, None)
    cells = pipeline.from_collection([Cell(a, DAY, [], 1), Cell(b, DAY, [], 2)], Cell, name="cells").key_by(
        key, **key_type
    )
    more = [Cell(a, DAY, [], 2), Cell(a, DAY, [], 1), Cell(b, DAY, [], 1), Cell(At(4, "d"), DAY, [], 1)]
    work = pipeline.from_collection(more, Cell, name="work").key_by(key, **key_type)
    iterations.iterate_delta(cells, work, Amounts()).print("out")
    below, other = At(1, "a"), At(4, "d")
    found = run_pipeline(pipeline, "BATCH", options={"parallelism.default": parallelism}).only()
    assert sorted(found, key=repr) == [
        Cell(a, DAY, [a], 4), Cell(below, DAY, [below], 1), Cell(b, DAY, [b], 3), Cell(other, DAY, [other], 1)
    ]  # fmt: skip
