"""A consumer that was kept, behind a relay that forgets connections without telling their ends, as routers do."""

import socket
import threading
from contextlib import suppress

import pytest

from dagster_unified.connectors.kafka import KafkaConnection, reading
from dagster_unified.connectors.kafka.reading import OffsetRange, messages
from tests.ports import free_port
from tests.servers.kafka import Broker


class Relay:
    """Carries bytes between a port of its own and another, until it forgets the connections that it has."""

    def __init__(self, to, port=0):
        self._to, self._kept = to, []
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def forget(self):
        for connection in self._kept:
            connection.clear()

    def _accept(self):
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(("127.0.0.1", self._to))
            remembered = threading.Event()
            remembered.set()
            self._kept.append(remembered)
            for ends in ((client, server), (server, client)):
                threading.Thread(target=_pump, args=(*ends, remembered), daemon=True).start()


def _pump(source, target, remembered):
    with suppress(OSError):  # an end that is gone
        while data := source.recv(65536):
            if remembered.is_set():
                target.sendall(data)


@pytest.fixture
def relayed(tmp_path):
    """A broker that is reached through a relay only, and the relay."""
    port = free_port()
    relay = Relay(port)
    broker = Broker(tmp_path, port, **{"advertised.listeners": f"PLAINTEXT://127.0.0.1:{relay.port}"}).start()
    yield broker, relay
    broker.kill()


def test_a_consumer_whose_connection_is_dead_is_replaced(relayed, monkeypatch):
    broker, relay = relayed
    topics = [broker.create_topic(partitions=1) for _ in range(2)]
    connection = KafkaConnection(broker.address)

    def read(topic, start, end):
        batches = messages(connection, "read_committed", OffsetRange(topic, 0, start, end), "here")
        return [message.value() for batch in batches for message in batch]

    for topic in topics:
        broker.write(topic, [{"value": value} for value in (b"a", b"b", b"c")])
    assert read(topics[0], 0, 2) == [b"a", b"b"]
    relay.forget()
    monkeypatch.setattr(reading, "IDLE_PATIENCE", 1.0)
    assert read(topics[0], 1, 3) == [b"b", b"c"]
    relay.forget()
    assert read(topics[1], 0, 3) == [b"a", b"b", b"c"]
