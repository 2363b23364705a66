"""Connections by the key of a resource: nothing is needed of it before a run, and a run takes what it is given."""

import pickle
from typing import NamedTuple

import pytest
from dagster import EnvVar

from dagster_unified.api import Pipeline
from dagster_unified.connectors import (
    DatabaseSink,
    DatabaseSource,
    KafkaConnection,
    KafkaSink,
    KafkaSource,
    PostgresConnection,
    PostgresSink,
    PostgresSource,
    ResourceKey,
)
from dagster_unified.errors import ConfigurationError, PipelineError
from dagster_unified.graph.explain import as_text
from dagster_unified.graph.options import Configuration
from dagster_unified.graph.plan import plan
from dagster_unified.orchestration import KafkaResource, PostgresResource
from dagster_unified.testing import run_pipeline

SECRET = "do-not-tell"


class Order(NamedTuple):
    id: int
    shop: str


class Shop(NamedTuple):
    name: str
    city: str


class Located(NamedTuple):
    id: int
    city: str | None


SOURCES = {
    "kafka": lambda key: KafkaSource("orders", Order, key, name="orders"),
    "postgres": lambda key: PostgresSource("orders", Order, key),
    "database": lambda key: DatabaseSource("orders", Order, key),
}
SINKS = {
    "kafka": lambda key: KafkaSink("totals", key, name="totals"),
    "postgres": lambda key: PostgresSink("totals", key),
    "database": lambda key: DatabaseSink("totals", key),
}
RESOURCES = {
    "kafka": KafkaResource(bootstrap_servers="broker:9092", options={"sasl.password": SECRET}),
    "postgres": PostgresResource(host="db.example", database="shop", password=SECRET),
    "database": f"duckdb:////data/{SECRET}.duckdb",
}


def copying(system):
    pipeline = Pipeline("shops")
    pipeline.from_source(SOURCES[system](ResourceKey("orders_in"))).sink_to(SINKS[system](ResourceKey("totals_out")))
    return pipeline.graph()


@pytest.mark.parametrize("system", SOURCES)
def test_a_pipeline_is_planned_and_explained_without_its_resources_and_is_the_same_with_any(system):
    planned = plan(
        copying(system), Configuration.of({"execution.runtime-mode": "STREAMING"} if system == "kafka" else {})
    )
    text = as_text(planned)
    assert "at resource 'orders_in'" in text
    assert "at resource 'totals_out'" in text
    connected = planned.connected({"orders_in": RESOURCES[system], "totals_out": RESOURCES[system]})
    assert as_text(connected) == text
    assert [region.fingerprint for region in connected.regions] == [region.fingerprint for region in planned.regions]
    assert SECRET not in text + repr([vars(n.source) for n in connected.graph.readers])


@pytest.mark.parametrize("system", SOURCES)
def test_a_resource_that_is_missing_is_named_with_who_needs_it(system):
    graph = copying(system)
    with pytest.raises(ConfigurationError) as raised:
        graph.connected({"orders_in": RESOURCES[system], "totals": RESOURCES[system]})
    assert str(raised.value).startswith("shops: sink 'totals' (")
    assert (
        "writes by the resource 'totals_out', and there is none; did you mean 'totals'?; add it under Dagster with"
        " Definitions(resources={'totals_out': ...}), and elsewhere with"
    ) in str(raised.value)
    with pytest.raises(ConfigurationError, match=r"shops: source 'orders' .* reads by the resource 'orders_in'"):
        graph.connected({})


def test_a_lookup_connects_by_a_key_as_well():
    pipeline = Pipeline("shops")
    shops = PostgresSource("shops", Shop, ResourceKey("warehouse"))
    orders = pipeline.from_collection([Order(1, "a")])
    orders.lookup_join(shops, {"shop": "name"}, {"city": "city"}, Located).print()
    assert pipeline.graph().resource_keys == {"warehouse"}


@pytest.mark.parametrize("connection", [KafkaConnection, PostgresConnection])
def test_workers_get_the_connection_that_a_resource_gives(connection):
    key = ResourceKey("there")
    resources = {KafkaConnection: RESOURCES["kafka"], PostgresConnection: RESOURCES["postgres"]}
    connected = pickle.loads(pickle.dumps(connection.of(key).connected({"there": resources[connection]})))
    assert repr(connected) in (
        "KafkaConnection(resource 'there')",
        "PostgresConnection(postgresql at resource 'there')",
    )
    assert b"dagster." not in pickle.dumps(connected)
    if connection is PostgresConnection:
        assert connected.parameters()["host"] == "db.example"


def test_a_text_may_be_looked_up_in_the_environment(monkeypatch):
    sink = DatabaseSink("totals", ResourceKey("shop")).connected({"shop": EnvVar("SHOP_URL")})
    assert SECRET.encode() not in pickle.dumps(sink.database)
    monkeypatch.setenv("SHOP_URL", f"duckdb:////data/{SECRET}.duckdb")
    assert str(pickle.loads(pickle.dumps(sink.database)).engine("here").url) == RESOURCES["database"]


def test_a_resource_of_another_kind_is_refused_and_so_is_none():
    key = ResourceKey("there")
    wrong = {"there": RESOURCES["postgres"]}
    with pytest.raises(ConfigurationError, match="resource 'there' gives a PostgresConnection; give a KafkaResource"):
        KafkaConnection.of(key).connected(wrong).metadata("here")
    with pytest.raises(ConfigurationError, match="resource 'there' gives a KafkaConnection; give a PostgresResource"):
        PostgresConnection.of(key).connected({"there": RESOURCES["kafka"]}).connect("here")
    with pytest.raises(ConfigurationError, match="resource 'there' gives a PostgresConnection; give a text, such as a"):
        DatabaseSink("totals", key).connected(wrong).exists()
    with pytest.raises(ConfigurationError, match="resource 'there' is given where a pipeline runs, and nothing runs"):
        PostgresConnection.of(key).connect("here")


def test_a_key_stands_for_all_of_a_connection():
    for connect in (KafkaConnection, PostgresConnection, lambda key: PostgresConnection(password=key)):
        with pytest.raises(PipelineError, match=r"resource 'there' stands for all of a connection; give ResourceKey"):
            connect(ResourceKey("there"))
    with pytest.raises(PipelineError, match="'a b' cannot be the key of a resource"):
        ResourceKey("a b")


def test_the_harness_needs_no_resource():
    pipeline = Pipeline("shops")
    pipeline.from_source(SOURCES["postgres"](ResourceKey("there"))).sink_to(SINKS["kafka"](ResourceKey("cluster")))
    orders = [Order(1, "a")]
    assert run_pipeline(pipeline, "BATCH", {"orders": orders}).sinks["totals"] == orders


def test_a_run_takes_the_resources_that_it_is_given(spark, postgres, tmp_path):
    def copied(resources):
        pipeline = Pipeline("shops")
        source = PostgresSource("orders", Order, ResourceKey("orders_in"))
        pipeline.from_source(source).sink_to(DatabaseSink("totals", ResourceKey("totals_out")))
        pipeline.execute(spark=spark, resources=resources).result()

    with PostgresConnection(postgres).connect("test") as client:
        client.execute("CREATE TABLE orders (id bigint, shop text)")
        client.execute("INSERT INTO orders VALUES (1, 'a')")
        client.execute("CREATE SCHEMA branch CREATE TABLE orders (id bigint, shop text)")
        client.execute("INSERT INTO branch.orders VALUES (2, 'b')")
    branch = PostgresConnection(postgres, options={"options": "-csearch_path=branch"})
    places = {"main": PostgresConnection(postgres), "branch": branch}
    for name, orders_in in places.items():
        copied({"orders_in": orders_in, "totals_out": f"duckdb:///{tmp_path}/{name}.db"})
    held = {name: DatabaseSource("totals", Order, f"duckdb:///{tmp_path}/{name}.db").rows() for name in places}
    assert {name: rows.to_pylist() for name, rows in held.items()} == {
        "main": [{"id": 1, "shop": "a"}],
        "branch": [{"id": 2, "shop": "b"}],
    }
    with pytest.raises(ConfigurationError, match=r"source 'orders' .* reads by the resource 'orders_in'"):
        copied({})
