"""Resources that sources and sinks name by a key: those of the code location's definitions, whoever gives them."""

import json
from typing import NamedTuple

import pytest
from dagster import (
    AssetIn,
    AssetKey,
    DagsterInstance,
    Definitions,
    EnvVar,
    RunRequest,
    asset,
    build_sensor_context,
)

from dagster_unified.api import Pipeline
from dagster_unified.connectors import (
    DatabaseSink,
    DatabaseSource,
    KafkaOffsetsInitializer,
    KafkaSink,
    KafkaSource,
    PostgresConnection,
    PostgresSource,
    ResourceKey,
)
from dagster_unified.errors import ConfigurationError
from dagster_unified.orchestration import (
    KafkaResource,
    PostgresResource,
    StreamingDeployment,
    unified_definitions,
)
from tests.orchestration.support import resources, ticked


class Order(NamedTuple):
    id: int
    shop: str


def copying():
    """Orders of PostgreSQL, in another database."""
    pipeline = Pipeline("shops")
    source = PostgresSource("orders", Order, ResourceKey("warehouse"))
    pipeline.from_source(source).sink_to(DatabaseSink("orders", ResourceKey("reports"), name="copies"))
    return pipeline


TAKEN = []


@asset(ins={"copies": AssetIn(key_prefix="shops")})
def report(copies: list[Order]) -> None:
    TAKEN.append(copies)


def test_a_branch_deployment_gives_other_resources(spark, postgres, tmp_path, monkeypatch):
    with PostgresConnection(postgres).connect("test") as client:
        client.execute("CREATE TABLE orders (id bigint, shop text)")
        client.execute("INSERT INTO orders VALUES (1, 'a')")
        client.execute("CREATE SCHEMA branch CREATE TABLE orders (id bigint, shop text)")
        client.execute("INSERT INTO branch.orders VALUES (2, 'b')")
    parts = PostgresConnection(postgres)
    server = {"host": parts.host, "port": int(parts.port), "database": parts.database, "user": EnvVar("PG_USER")}
    monkeypatch.setenv("PG_USER", parts.user)
    monkeypatch.setenv("REPORTS", f"duckdb:///{tmp_path}/branch.db")
    given = {
        "main": {"warehouse": PostgresResource(**server), "reports": f"duckdb:///{tmp_path}/main.db"},
        "branch": {
            "warehouse": PostgresResource(**server, options={"options": "-csearch_path=branch"}),
            "reports": EnvVar("REPORTS"),
        },
    }
    for deployment in given:
        definitions = Definitions.merge(
            unified_definitions(copying(), resources=resources(tmp_path / deployment)),
            Definitions(assets=[report], resources=given[deployment]),
        )
        with DagsterInstance.ephemeral() as instance:
            definitions.resolve_implicit_global_asset_job_def().execute_in_process(instance=instance)
    assert [[Order(1, "a")], [Order(2, "b")]] == TAKEN
    rows = {name: DatabaseSource("orders", Order, f"duckdb:///{tmp_path}/{name}.db").rows() for name in given}
    assert {name: table["id"].to_pylist() for name, table in rows.items()} == {"main": [1], "branch": [2]}


def test_definitions_without_the_resource_do_not_load():
    definitions = unified_definitions(copying())
    with pytest.raises(ConfigurationError) as raised:
        Definitions.validate_loadable(definitions)
    assert str(raised.value) == (
        "shops: source 'orders' (table orders at postgresql at resource 'warehouse') reads by the resource 'warehouse',"
        " and there is none; add it under Dagster with Definitions(resources={'warehouse': ...}), and elsewhere with"
        " Pipeline.execute(resources={'warehouse': ...})"
    )
    Definitions.validate_loadable(
        Definitions.merge(
            definitions, Definitions(resources={"warehouse": PostgresResource(), "reports": EnvVar("REPORTS")})
        )
    )


def test_a_stream_its_sensor_and_its_control_job_know_the_cluster_of_the_definitions(spark, kafka, tmp_path):
    topics = [kafka.create_topic(), kafka.create_topic()]
    kafka.write(topics[0], [{"value": json.dumps(Order(n, "a")._asdict()).encode()} for n in range(3)])
    pipeline = Pipeline("shops")
    source = KafkaSource(
        topics[0], Order, ResourceKey("cluster"), name="orders", bounded=KafkaOffsetsInitializer.latest()
    )
    pipeline.from_source(source).sink_to(KafkaSink(topics[1], ResourceKey("cluster"), name="copies"))
    options = {"execution.checkpointing.dir": str(tmp_path / "checkpoints"), "execution.runtime-mode": "STREAMING"}
    password = kafka.security()["sasl.password"]
    secure = KafkaResource(bootstrap_servers=kafka.secure_address, options=kafka.security())
    definitions = Definitions.merge(
        unified_definitions(StreamingDeployment(pipeline, options=options), resources=resources(tmp_path)),
        Definitions(resources={"cluster": secure}),
    )
    with DagsterInstance.ephemeral() as instance:
        context = build_sensor_context(instance, repository_def=definitions.get_repository_def())
        assert isinstance(ticked(definitions.resolve_sensor_def("shops_streaming_sensor"), context), RunRequest)
        definitions.resolve_job_def("shops_streaming").execute_in_process(instance=instance)
        control = {"ops": {"shops_action": {"config": {"action": "suspend"}}}}
        assert definitions.resolve_job_def("shops_control").execute_in_process(control, instance=instance).success
        assert instance.get_latest_materialization_event(AssetKey(["shops", "copies"])) is not None
    assert sorted(json.loads(value)["id"] for value in kafka.values(topics[1])) == [0, 1, 2]
    kept = [file for file in (tmp_path / "checkpoints").rglob("*") if file.is_file()]
    assert kept
    assert not [file for file in kept if password.encode() in file.read_bytes()]
