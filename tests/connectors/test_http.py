"""Records that are sent by HTTP: what is answered with 200 is in the log, and nothing else is."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from datetime import datetime, timedelta, timezone
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import NamedTuple

import pytest
from deltalake import DeltaTable

from dagster_unified.connectors import HttpSource, http, written_ahead
from dagster_unified.connectors.secrets import Environment
from dagster_unified.connectors.written_ahead import _Log, _Receiver
from dagster_unified.errors import PipelineError, StageError
from tests.connectors.test_written_ahead import wait_for_versions
from tests.ports import free_port


class Order(NamedTuple):
    number: int
    at: datetime | None
    note: str | None = None


def order(number):
    return {"number": number, "at": "2024-01-01T00:00:00Z"}


def post(port, body, path="/orders", headers=(), method="POST"):
    """Send a request on a connection of its own; the status and the answer."""
    text = body if isinstance(body, (bytes, str)) else json.dumps(body)
    with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request(method, path, text, dict(headers))
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"null")


@contextmanager
def receiving(folder, **options):
    """A receiver at work: the port it listens on, and its log."""
    port = free_port()
    source = HttpSource(port, Order, "/orders", name="orders", **options)
    receiver = _Receiver(source, Path(folder) / "log")
    receiver.start()
    deadline = time.monotonic() + 30
    while True:
        with socket.socket() as tried:
            if not tried.connect_ex(("127.0.0.1", port)):
                break
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        yield port, _Log(source, str(Path(folder) / "log")), receiver
    finally:
        receiver.end()
        assert not receiver.is_alive()


def numbers(log):
    found = [batch for split in log.splits(log.oldest(), log.newest()) for batch in log.read_split(split)]
    return [number for batch in found for number in batch["number"].to_pylist()]


def test_what_is_answered_with_200_is_in_the_log(tmp_path):
    with receiving(tmp_path) as (port, log, _):
        assert post(port, order(1)) == (200, {"received": 1})
        assert numbers(log) == [1]
        assert post(port, [order(2), order(3)]) == (200, {"received": 2})
        assert numbers(log) == [1, 2, 3]
        lines = "\n".join(json.dumps(order(number)) for number in (4, 5)) + "\n"
        assert post(port, lines, headers={"Content-Type": "application/x-ndjson"}) == (200, {"received": 2})
        assert post(port, []) == (200, {"received": 0})
        assert post(port, {"number": 6, "at": None}, path="/orders?from=till") == (200, {"received": 1})
        assert numbers(log) == [1, 2, 3, 4, 5, 6]
        batch = next(log.read_split(log.splits(log.oldest(), log.newest())[0]))
    assert log.records.from_batch(batch)[0] == Order(1, datetime(2024, 1, 1, tzinfo=timezone.utc))


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('{"number": "one", "at": null}', "Expected `int`, got `str` - at `$.number`"),
        ('[{"number": 1, "at": null}, {"at": null}]', "missing required field `number` - at `$[1]`"),
        ('{"number": 1, "at": "yesterday"}', "at `$.at`"),
        ('{"number": 1, "at": "2024-01-01T00:00:00.1234567Z"}', "is finer than microseconds"),
        ('{"number": 9223372036854775808, "at": null}', "number"),
        ("not JSON", "JSON is malformed"),
        ("", "truncated"),
        (b'{"number": 1, "at": null, "note": "\xff"}', "a text in it is no UTF-8"),
        ('{"number": 1, "other": ' + "[" * 100_000, "recursion"),
    ],
)
def test_a_request_with_a_record_that_does_not_fit_is_refused_whole(tmp_path, body, problem):
    with receiving(tmp_path) as (port, log, _):
        status, answer = post(port, body)
        assert (status, problem in answer["error"]) == (400, True), answer
        assert post(port, order(7))[0] == 200
        assert numbers(log) == [7]


def test_only_who_knows_the_token_sends(tmp_path, monkeypatch):
    monkeypatch.setenv("ORDERS_TOKEN", "a secret")
    with receiving(tmp_path, token=Environment("ORDERS_TOKEN")) as (port, log, _):
        for given in ({}, {"Authorization": "Bearer another"}, {"Authorization": "Bearer "}):
            status, answer = post(port, order(1), headers=given)
            assert (status, "Authorization" in answer["error"]) == (401, True)
        assert post(port, order(2), headers={"Authorization": "Bearer a secret"})[0] == 200
        assert numbers(log) == [2]


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ({"path": "/other"}, 404),
        ({"method": "GET"}, 405),
        ({"method": "PUT"}, 405),
        ({"headers": {"Content-Encoding": "gzip"}}, 415),
        ({"body": [order(n) for n in range(100)]}, 413),
        ({"headers": {"Transfer-Encoding": "chunked"}, "body": ""}, 411),
    ],
)
def test_a_request_of_another_kind_is_told_what_is_wrong(tmp_path, request_, status):
    with receiving(tmp_path, max_bytes=1_000) as (port, log, _):
        found, answer = post(port, **{"body": order(1), **request_})
        assert found == status
        assert answer["error"]
        assert post(port, order(2))[0] == 200
        assert numbers(log) == [2]


def test_a_sender_that_goes_in_mid_request_sends_nothing(tmp_path):
    with receiving(tmp_path) as (port, log, _):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b'POST /orders HTTP/1.1\r\nContent-Length: 500\r\n\r\n[{"number": 1, "at": null},')
        assert post(port, order(2))[0] == 200
        assert numbers(log) == [2]


def test_many_senders_at_once(tmp_path):
    answers = []

    def send(first):
        with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            for number in range(first, first + 20):  # one connection, kept
                connection.request("POST", "/orders", json.dumps(order(number)))
                response = connection.getresponse()
                response.read()
                answers.append((number, response.status))

    with receiving(tmp_path) as (port, log, _):
        senders = [threading.Thread(target=send, args=(20 * n,)) for n in range(100)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join(60)
        assert sorted(answers) == [(number, 200) for number in range(2_000)]
        assert sorted(numbers(log)) == list(range(2_000))


def test_a_request_is_in_the_log_whole_or_not_at_all_when_the_job_stops(tmp_path):
    answers, stopped = {}, threading.Event()

    def send(first):
        while not stopped.is_set():
            try:
                status, _ = post(port, [order(first + n) for n in range(10)])
            except (OSError, HTTPException):  # nobody listens any more
                return
            answers[first] = status
            first += 10

    for round_ in range(5):
        with receiving(tmp_path, flush_every=timedelta(milliseconds=1)) as (port, log, receiver):
            senders = [
                threading.Thread(target=send, args=(1_000_000 * round_ + 100_000 * n,), daemon=True) for n in range(8)
            ]
            for sender in senders:
                sender.start()
            time.sleep(0.2)
            receiver.end()
            stopped.set()
            for sender in senders:
                sender.join(60)
                assert not sender.is_alive()
            stopped.clear()
    logged = sorted(numbers(log))
    assert logged == sorted(first + n for first, status in answers.items() if status == 200 for n in range(10))
    assert set(answers.values()) <= {200, 503}
    assert len(logged) > 100


def test_when_the_log_cannot_be_written_nobody_is_told_that_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(http, "_GRACE", 0.1)
    with receiving(tmp_path) as (port, log, _):
        assert post(port, order(1))[0] == 200

        def full(file):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(written_ahead, "_flush", full)
        status, answer = post(port, order(2))
        assert (status, answer) == (503, {"error": "nothing was received; send it again"})
        with pytest.raises(StageError, match=r"what is sent to http://127\.0\.0\.1.* has failed: .*No space left"):
            log.newest()


def test_a_port_that_is_taken_fails_the_job_with_a_sentence(tmp_path):
    with receiving(tmp_path) as (port, _, _):
        source = HttpSource(port, Order, name="orders")
        receiver = _Receiver(source, tmp_path / "another")
        receiver.start()
        receiver.join(30)
        with pytest.raises(StageError, match=rf"it cannot listen on 127\.0\.0\.1:{port} \(Address already in use\)"):
            _Log(source, str(tmp_path / "another")).newest()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"port": 0}, "expected a port from 1 to 65535, got 0"),
        ({"path": "orders"}, "expected a path such as /orders, got 'orders'"),
        ({"path": "/a?b"}, "expected a path such as /orders"),
        ({"host": "0.0.0.0"}, "anyone there could send records; give a token"),
    ],
)
def test_what_cannot_be_is_refused(options, problem):
    with pytest.raises(PipelineError, match=f"source 'orders': .*{problem}"):
        HttpSource(**{"port": 8090, "record": Order, "name": "orders", **options})


@pytest.mark.spark
@pytest.mark.rotates("kills")
def test_every_record_that_was_acknowledged_is_processed_once_though_the_job_is_killed(tmp_path):
    port, sent, ended = free_port(), {}, threading.Event()

    def send():
        number = 0
        while not ended.is_set():
            number += 1  # never again: a request without an answer may be in the log
            try:
                sent[number] = post(port, number, "/numbers")[0]
            except (OSError, HTTPException):
                sent[number] = None
                time.sleep(0.05)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    command = [sys.executable, "-m", "tests.connectors.received", str(tmp_path), str(port), "http"]
    for epochs in (2, 2, 3):
        job = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
        try:
            wait_for_versions(job, tmp_path / "numbers", epochs)
            if epochs == 3:
                ended.set()
                sender.join(60)
                acknowledged = {number for number, status in sent.items() if status == 200}
                deadline = time.monotonic() + 120
                while not acknowledged <= set(found := written(tmp_path)):
                    assert time.monotonic() < deadline
                    time.sleep(0.5)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    assert len(acknowledged) > 20
    assert len(found) == len(set(found))
    assert set(found) - acknowledged <= {number for number, status in sent.items() if status is None}


def written(folder):
    return DeltaTable(str(folder / "numbers")).to_pyarrow_table().column(0).to_pylist()
