import copy
import pickle
import re
import socket
import threading
import time
import uuid

import pytest
from dagster import EnvVar, asset, materialize

from dagster_unified.connectors.kafka import KafkaConnection, cluster, connection
from dagster_unified.connectors.kafka.committer import Topic
from dagster_unified.connectors.secrets import Environment
from dagster_unified.errors import ConfigurationError, UnavailableError
from dagster_unified.orchestration import KafkaResource
from tests.connectors.kafka.test_reading import Relay

PASSWORD = "pa55word"


def test_it_says_what_topics_a_cluster_has(kafka):
    topic = kafka.create_topic(partitions=3)
    assert len(KafkaConnection(kafka.address).metadata("here", topic).topics[topic].partitions) == 3


def test_where_nobody_listens_it_says_so_within_ten_seconds():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(UnavailableError) as raised:
            KafkaConnection(address).metadata("here")
    assert time.monotonic() - began < 10
    assert str(raised.value) == (
        f"here: Kafka at {address} does not answer (Connect to ipv4#{address} failed: Connection refused);"
        " see that it runs and that this machine reaches it"
    )


@pytest.mark.parametrize("servers", ["", " , "])
def test_no_address_at_all_is_an_error_at_once(servers):
    with pytest.raises(ConfigurationError, match="bootstrap_servers is empty; give the address of a broker"):
        KafkaConnection(servers).metadata("here")


def test_a_client_may_wait_longer_before_it_connects_again_than_by_default():
    KafkaConnection("127.0.0.1:9", {"reconnect.backoff.ms": 2000}).admin()


def test_where_something_else_listens_it_says_so_within_half_a_minute(monkeypatch):
    assert connection.SLOW_PATIENCE + connection.PATIENCE < 30
    monkeypatch.setattr(connection, "SLOW_PATIENCE", 3.0)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        taken = []
        threading.Thread(target=lambda: taken.append(bound.accept()), daemon=True).start()
        began = time.monotonic()
        with pytest.raises(UnavailableError, match="does not answer"):
            KafkaConnection(f"127.0.0.1:{bound.getsockname()[1]}").metadata("here")
    assert time.monotonic() - began < 30


def test_over_tls_a_login_with_a_password_from_the_environment(kafka, monkeypatch):
    monkeypatch.setenv("KAFKA_PASSWORD", kafka.security()["sasl.password"])
    options = {**kafka.security(), "sasl.password": Environment("KAFKA_PASSWORD")}
    topic = kafka.create_topic()
    assert topic in KafkaConnection(kafka.secure_address, options).metadata("here").topics


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"sasl.password": PASSWORD}, "the broker refused the login"),
        ({"sasl.username": "nobody"}, "the broker refused the login"),
        ({"ssl.ca.location": "probe"}, "no connection with TLS"),
        ({"security.protocol": "SASL_PLAINTEXT"}, "does not answer"),
        ({"sasl.mechanism": "PLAIN"}, "the broker refused the login"),
    ],
)
def test_a_wrong_setting_of_security_is_one_sentence_without_the_password(kafka, monkeypatch, changed, said):
    if said == "does not answer":
        monkeypatch.setattr(connection, "SLOW_PATIENCE", 3.0)
    given = KafkaConnection(kafka.secure_address, {**kafka.security(), **changed})
    with pytest.raises((ConfigurationError, UnavailableError)) as raised:
        given.metadata("here")
    assert said in str(raised.value)
    assert PASSWORD not in str(raised.value)
    assert kafka.security()["sasl.password"] not in str(raised.value)


def test_a_secret_is_in_no_text_and_in_no_copy_that_reaches_a_worker(monkeypatch):
    monkeypatch.setenv("KAFKA_PASSWORD", PASSWORD)
    options = {"sasl.password": EnvVar("KAFKA_PASSWORD"), "sasl.username": EnvVar("KAFKA_USER")}
    connection = KafkaConnection(EnvVar("KAFKA_SERVERS"), options)
    assert repr(connection) == "KafkaConnection($KAFKA_SERVERS, options sasl.password, sasl.username)"
    assert connection.describe() == "Kafka at $KAFKA_SERVERS"
    assert pickle.loads(pickle.dumps(connection)) == copy.deepcopy(connection) == connection
    assert PASSWORD.encode() not in pickle.dumps(connection)
    assert b"dagster._" not in pickle.dumps(connection)
    assert PASSWORD not in repr(KafkaConnection("broker:9092", {"sasl.password": PASSWORD}))


def test_a_resource_serves_pipelines_when_they_are_loaded_and_assets_when_they_run(kafka, monkeypatch):
    options = {**kafka.security(), "sasl.password": EnvVar("KAFKA_PASSWORD")}
    resource = KafkaResource(bootstrap_servers=kafka.secure_address, options=options)
    loaded = KafkaConnection.of(resource)
    monkeypatch.setenv("KAFKA_PASSWORD", kafka.security()["sasl.password"])
    topic = kafka.create_topic()

    @asset
    def topics(cluster: KafkaResource) -> list[str]:
        assert kafka.security()["sasl.password"] not in repr(cluster.connection())
        return list(cluster.connection().metadata("topics").topics)

    assert topic in materialize([topics], resources={"cluster": resource}).output_for_node("topics")
    assert topic in loaded.metadata("here").topics


def test_a_variable_that_is_not_set_is_named(monkeypatch):
    monkeypatch.delenv("KAFKA_PASSWORD", raising=False)
    connection = KafkaConnection("broker:9092", {"sasl.password": EnvVar("KAFKA_PASSWORD")})
    with pytest.raises(ConfigurationError) as raised:
        connection.metadata("here")
    assert str(raised.value) == (
        "Kafka at broker:9092: sasl.password: environment variable KAFKA_PASSWORD has no value; set it where the job"
        " and its workers run"
    )


def test_an_option_that_there_is_not_and_one_that_the_library_sets_are_refused():
    with pytest.raises(ConfigurationError, match=r"No such configuration property: .sasl\.pasword"):
        KafkaConnection("broker:9092", {"sasl.pasword": PASSWORD}).metadata("here")
    with pytest.raises(ConfigurationError, match=r"the option group\.id cannot be set"):
        KafkaConnection("broker:9092", {"group.id": "mine"})


def test_it_waits_for_a_broker_that_starts(kafka):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    timer = threading.Timer(1.0, Relay, (int(kafka.address.partition(":")[2]), port))
    timer.start()
    assert KafkaConnection(f"127.0.0.1:{port}").metadata("here").brokers
    timer.join()


def test_it_waits_for_a_broker_that_is_slow_to_answer(kafka, monkeypatch):
    monkeypatch.setattr(connection, "SLOW_PATIENCE", 60.0)
    monkeypatch.setattr(connection, "PATIENCE", 1.0)
    given = KafkaConnection(kafka.address)
    kafka.pause()
    timer = threading.Timer(2.0, kafka.go_on)
    timer.start()
    try:
        assert given.metadata("here").brokers
    finally:
        timer.join()


@pytest.mark.parametrize("who", ["a sink", "a source", "a source of a pattern"])
def test_a_topic_that_has_just_been_made_is_waited_for(kafka, monkeypatch, who):
    name = f"topic-{uuid.uuid4().hex[:12]}"
    for module in (connection, cluster):
        monkeypatch.setattr(module, "SETTLING_PATIENCE", 60.0)
    timer = threading.Timer(1.0, kafka.create_topic, (name, 3))
    timer.start()
    try:
        if who == "a sink":
            assert Topic(KafkaConnection(kafka.address), name, "here").partitions() == 3
        else:
            topics = re.compile(name) if "pattern" in who else (name,)
            found = cluster.Cluster(KafkaConnection(kafka.address), topics, "read_committed", 30.0, "here")
            assert found.newest() == {f"{name}[{partition}]": 0 for partition in range(3)}
    finally:
        timer.join()


def test_a_number_may_come_from_the_environment_too(monkeypatch):
    monkeypatch.setenv("KAFKA_WAIT", "1234")
    connection = KafkaConnection("b:1", {"socket.timeout.ms": EnvVar.int("KAFKA_WAIT")})
    assert connection._options == {"socket.timeout.ms": Environment("KAFKA_WAIT")}
