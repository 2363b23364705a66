"""Spark's state client writes behind, and a write that failed is not lost on the way."""

import socket
from threading import Event, Thread

import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.serializers import read_int, write_int
from pyspark.sql.streaming.proto import StateMessage_pb2 as messages
from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle
from pyspark.sql.streaming.stateful_processor_api_client import StatefulProcessorApiClient
from pyspark.sql.types import BinaryType, IntegerType, StructType

from dagster_unified.spark_internals import state_client
from dagster_unified.spark_internals.state_client import WriteBehindClient

DATA = StructType().add("data", BinaryType())


class Server(Thread):
    """Answers requests in order, as Spark's does: to writes that are in `fails` with an error, after which it ends."""

    def __init__(self, fails=()):
        super().__init__(daemon=True)
        self.fails, self.held, self.key, self.requests, self.failed = fails, {}, None, [], False
        self.may_answer = Event()
        self.may_answer.set()
        self.listening = socket.create_server(("localhost", 0))
        self.start()

    def run(self):
        connection, _ = self.listening.accept()
        with connection, connection.makefile("rwb") as file:
            while not self.failed:
                try:
                    assert read_int(file) == 0
                except EOFError:
                    return
                request = messages.StateRequest.FromString(file.read(read_int(file)))
                self.may_answer.wait()
                answer = self.answer(request).SerializeToString()
                write_int(len(answer), file)
                file.write(answer)
                file.flush()

    def answer(self, request):
        if request.HasField("implicitGroupingKeyRequest"):
            self.key = request.implicitGroupingKeyRequest.setImplicitKey.key
            self.requests.append("key")
        elif request.HasField("stateVariableRequest"):
            call = request.stateVariableRequest.valueStateCall
            if call.HasField("valueStateUpdate"):
                self.requests.append("update")
                if len(self.requests) in self.fails:
                    self.failed = True
                    return messages.StateResponse(statusCode=1, errorMessage="no space left")
                self.held[self.key] = call.valueStateUpdate.value
            elif call.HasField("get"):
                self.requests.append("get")
                return messages.StateResponse(value=self.held.get(self.key, b""))
        return messages.StateResponse()


@pytest.fixture
def connected():
    def connect(fails=()):
        server = Server(fails)
        _, port = server.listening.getsockname()
        handle = StatefulProcessorHandle(StatefulProcessorApiClient(port, StructType().add("group", IntegerType())))
        client = WriteBehindClient.of(handle)
        return server, client, handle.getValueState("index", DATA)

    return connect


def test_what_is_written_is_read_back_group_by_group(connected):
    _, client, state = connected()
    for group in range(3):
        client.set_implicit_key((group,))
        assert state.get() is None
        with client.writing():
            state.update((bytes([group]),))
    for group in range(3):
        client.set_implicit_key((group,))
        assert [bytes(value) for value in state.get()] == [bytes([group])]


def test_a_write_waits_for_no_answer(connected):
    server, client, state = connected()
    server.may_answer.clear()
    client.set_implicit_key((1,))
    with client.writing():
        state.update((b"one",))
    server.may_answer.set()
    assert bytes(state.get()[0]) == b"one"
    assert server.requests == ["key", "update", "get"]


def test_a_write_that_failed_is_an_error_of_the_next_request_that_is_waited_for(connected):
    _, client, state = connected(fails={2})
    client.set_implicit_key((1,))
    with client.writing():
        state.update((b"one",))
    client.set_implicit_key((2,))
    with pytest.raises(PySparkRuntimeError, match="could not write the state of a key group: no space left"):
        client.remove_implicit_key()


def test_answers_are_looked_at_before_they_are_too_many(connected, monkeypatch):
    monkeypatch.setattr(state_client, "_UNANSWERED", 4)
    server, client, state = connected(fails={2})

    def write(times):
        with client.writing():
            for _ in range(times):
                state.update((b"one",))

    client.set_implicit_key((1,))
    write(times=3)
    with pytest.raises(PySparkRuntimeError, match="no space left"):
        write(times=1)
    assert len(server.requests) <= 4


@pytest.mark.parametrize("size", [100, 20_000, 200_000])
def test_a_write_that_failed_is_an_error_though_spark_hangs_up_while_more_is_written(connected, size):
    _, client, state = connected(fails={2})
    client.set_implicit_key((1,))

    def write():
        for _ in range(20):
            with client.writing():
                state.update((bytes(size),))
        state.get()

    with pytest.raises(PySparkRuntimeError, match=r"no space left|has ended the connection"):
        write()
