"""What goes of what is stored: released first, then the oldest beyond the budget; never what somebody needs."""

from datetime import timedelta

import pytest

from dagster_unified.api import Pipeline
from dagster_unified.engine.batch.intermediates import Address, IntermediateStore, Manifest, StoredFile
from dagster_unified.engine.batch.retention import Budget, stored_intermediates, to_free
from dagster_unified.errors import ConfigurationError
from tests.object_store import client, requests, served

#   source ─ first ─┬─ second ─ print
#                   └─ third ── print
pipeline = Pipeline("p")
first = pipeline.from_collection([1]).map(lambda n: n, output_type=int).name("first")
first.rebalance().map(lambda n: n, output_type=int).name("second").rebalance().print("a")
first.rebalance().map(lambda n: n, output_type=int).name("third").rebalance().print("b")
PLAN = pipeline.plan()


@pytest.fixture
def store(tmp_path):
    return IntermediateStore(str(tmp_path))


def put(store, stage, run, size=10, created=0.0, partition="all"):
    address = Address("p", stage, run, partition)
    data = store.new_attempt(address)
    (data / "1.parquet").write_bytes(b"x" * size)
    manifest = Manifest(
        pipeline="p",
        stage=stage,
        partition=partition,
        run=run,
        fingerprint="f",
        schema="{}",
        streams=[],
        rows=1,
        bytes=size,
        data=data.name,
        files=[StoredFile("1.parquet", size)],
        created=created,
    )
    store.commit(address, manifest)
    return manifest


def freed(store, budget, now=100.0, running=(), needed=lambda one: False):
    found = to_free(stored_intermediates(store, "p"), PLAN, budget, now, lambda run: run in running, needed)
    return [(s.address.run, s.address.stage) for s in found]


AT_ONCE = Budget(max_age=timedelta(0))


def test_what_is_older_than_the_budget_goes(store):
    put(store, "first", "old", created=1)
    put(store, "first", "new", created=95)
    assert freed(store, Budget(max_age=timedelta(seconds=10))) == [("old", "first")]
    assert freed(store, Budget(max_age=None)) == []


def test_the_oldest_go_until_the_rest_fits(store):
    for number, run in enumerate(("one", "two", "three")):
        put(store, "first", run, size=10, created=number)
    assert freed(store, Budget(None, max_bytes=20)) == [("one", "first")]
    assert freed(store, Budget(None, max_bytes=5)) == [("one", "first"), ("two", "first"), ("three", "first")]
    assert freed(store, Budget(None, max_bytes=20), needed=lambda s: s.address.run == "one") == [("two", "first")]


def test_of_a_run_that_is_not_over_only_what_all_its_readers_have_read_goes(store):
    put(store, "first", "run")
    put(store, "second", "run")
    assert freed(store, AT_ONCE, running={"run"}) == []
    put(store, "third", "run")
    assert freed(store, AT_ONCE, running={"run"}) == [("run", "first")]
    put(store, "a", "run")
    assert sorted(freed(store, AT_ONCE, running={"run"})) == [("run", "first"), ("run", "second")]


def test_what_a_needed_run_has_taken_over_from_another_stays(store):
    manifest = put(store, "first", "old")
    store.link(Address("p", "first", "new"), manifest)
    assert store.find(Address("p", "first", "new")) == manifest
    assert freed(store, AT_ONCE, needed=lambda s: s.address.run == "new") == []
    assert sorted(freed(store, AT_ONCE)) == [("new", "first"), ("old", "first")]


def test_what_links_keep_from_going_does_not_count_as_freed(store):
    kept = put(store, "first", "old", size=100, created=1)
    store.link(Address("p", "first", "new"), kept)
    for number, run in enumerate(("one", "two", "three"), 2):
        put(store, "first", run, size=20, created=number)
    assert freed(store, Budget(None, max_bytes=120), needed=lambda s: s.address.run == "new") == [
        ("one", "first"),
        ("two", "first"),
    ]
    assert freed(store, Budget(None, max_bytes=60)) == [("new", "first"), ("old", "first")]


def test_what_a_dead_run_left_of_an_attempt_goes_at_once_and_that_of_a_living_one_stays(store):
    attempt = store.new_attempt(Address("p", "first", "dead"))
    (attempt / "half.parquet").write_bytes(b"x")
    assert freed(store, Budget(None), running={"dead"}) == []
    assert freed(store, Budget(None)) == [("dead", "first")]


def test_removal_leaves_nothing(store):
    put(store, "first", "run")
    (one,) = stored_intermediates(store, "p")
    store.remove(one.address)
    assert list(stored_intermediates(store, "p")) == []


def test_a_budget_that_cannot_be_is_an_error():
    with pytest.raises(ConfigurationError, match="max_age and max_bytes cannot be negative"):
        Budget(max_bytes=-1)


def test_a_bucket_is_not_listed_whole_to_find_what_is_stored(monkeypatch):
    with served("lake") as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        url = environment["AWS_ENDPOINT_URL"]
        store, s3 = IntermediateStore("s3://lake/stored"), client(url)
        for number in range(4):
            put(store, "first", f"run-{number}", created=number)
        asked = []
        for foreign in (0, 1010):  # a page of a listing has 1,000
            for number in range(foreign):
                s3.put_object(Bucket="lake", Key=f"{'stored/q' if number % 2 else 'a'}/{number}/x", Body=b"")
            requests(url)
            assert freed(store, Budget(max_age=timedelta(seconds=98))) == [("run-0", "first"), ("run-1", "first")]
            asked.append([request for request in requests(url) if request.client == "s3fs"])
        assert [request.key for request in asked[0]] == [request.key for request in asked[1]]
        assert all(request.key.startswith("stored/p") for request in asked[1])
        assert len(asked[1]) <= 4 * 4 + 3
