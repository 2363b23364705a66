"""The fused chain is the plain composition of its functions, and knows where it failed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.operators.program.fusion import fuse
from dagster_unified.operators.stateless import Assign, Filter, FlatMap, Map

CLAUSES = {
    "map": Map(lambda v: v * 3 - 1),
    "filter": Filter(lambda v: v % 2 == 0),
    "flat_map": FlatMap(lambda v: [v, v + 1][: v % 3]),
    "assign": Assign(lambda v, t: v * 10),
}


def composed(clauses, records, timestamps):
    """What the chain means, one record at a time."""
    rows = list(zip(records, timestamps or [None] * len(records), strict=True))
    for clause in clauses:
        f = clause.function
        if isinstance(clause, Map):
            rows = [(f(v), t) for v, t in rows]
        elif isinstance(clause, Filter):
            rows = [(v, t) for v, t in rows if f(v)]
        elif isinstance(clause, FlatMap):
            rows = [(o, t) for v, t in rows for o in f(v)]
        else:
            rows = [(v, f(v, t)) for v, t in rows]
    return rows


@given(st.lists(st.sampled_from(sorted(CLAUSES)), min_size=1, max_size=6), st.lists(st.integers(0, 50)), st.booleans())
def test_a_fused_chain_is_the_composition_of_its_functions(kinds, records, timestamped):
    clauses = [CLAUSES[k] for k in kinds]
    timestamps = list(range(len(records))) if timestamped else None
    out, times = fuse(clauses, timestamped, lambda clause, seen: None).run(records, timestamps)
    assert list(zip(out, times if times is not None else [None] * len(out), strict=True)) == composed(
        clauses, records, timestamps
    )


def fails_on_three(v):
    if v == 3:
        raise ValueError("three")
    return v


def yields_then_fails(v):
    yield v
    if v == 3:
        raise ValueError("three")


@pytest.mark.parametrize(
    ("clause", "place"),
    [
        (Map(fails_on_three), 1),
        (Filter(lambda v: fails_on_three(v) >= 0), 1),
        (FlatMap(yields_then_fails), 1),
    ],
)
@pytest.mark.parametrize("timestamps", [None, [10, 20, 30]])
def test_a_failure_is_traced_to_its_operator_and_its_record(clause, place, timestamps):
    chain = fuse(
        [Map(lambda v: v + 1), clause, Map(lambda v: v)],
        timestamps is not None,
        lambda clause, seen: None,
    )
    with pytest.raises(ValueError) as caught:
        chain.run([0, 1, 2], timestamps)
    assert chain.locate(caught.value.__traceback__) == (place, 3)
