"""Records that other programs send by HTTP: webhooks, scripts, devices.

Whoever sends is told that a request was received when its records are in the source's log, and not before. Knows the
write-ahead log and how JSON becomes records; not Spark.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import socket
import socketserver
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from dagster_unified.connectors.exact_times import json_decoder
from dagster_unified.connectors.kafka.formats import JsonFormat
from dagster_unified.connectors.secrets import Value, deferred, resolved
from dagster_unified.connectors.written_ahead import WrittenAheadSource
from dagster_unified.errors import PipelineError, UnifiedError
from dagster_unified.operators.functions.type_variables import Out
from dagster_unified.operators.time import checked_span
from dagster_unified.records import record_type

if TYPE_CHECKING:
    from typing_extensions import TypeForm

_logger = logging.getLogger(__name__)

_AT_ONCE = 64
"""Requests whose records may wait for the log."""

_PATIENCE = 10.0
"""Seconds that a further request waits for a place among them before it is asked to come again."""

_LOOK = 0.5
"""Seconds after which a request that waits for the log looks whether the job stops."""

_SILENCE = 30
"""Seconds after which a connection is closed on which nothing comes."""

_GRACE = 25.0
"""How long requests wait for the log of a job that stops, in seconds; it is written within 20."""

_LINES = ("application/x-ndjson", "application/jsonl", "application/jsonlines")


class HttpSource(WrittenAheadSource[Out]):
    """Records that are sent to this source by POST, as JSON. Unbounded; only STREAMING reads it.

    The job's driver listens on `host` and `port` while it runs. The body of a request is an object, an array of
    objects, or, with the content type `application/x-ndjson`, an object a line. The answer is 200 when all records of a
    request are on disk, and they are processed exactly once from there on. A record that does not fit its type is
    answered with 400 and the reason, and nothing of its request is received. Who gets no answer, or 503 while the job
    stops, sends again: then a request whose answer was lost on the way is received twice.

    `token` is what a request has to bring in `Authorization: Bearer …`, such as Dagster's `EnvVar`; without one the
    source listens on this machine only. It does not speak TLS: let a proxy do that. A body has at most `max_bytes`.

    Raises `PipelineError` for a port, path or host that cannot be, and for a host beyond this machine without a token.

    Examples:
        >>> class Order(NamedTuple):
        ...     number: int
        ...     amount: float
        >>> orders = pipeline.from_source(HttpSource(8090, Order, path="/orders", name="orders"))
        >>> collect(orders.map(lambda order: order.amount, float), "STREAMING", {"orders": [Order(1, 9.5)]})
        [9.5]
    """

    kind = "http"
    _server: _Server | None = None

    def __init__(
        self,
        port: int,
        record: TypeForm[Out],
        path: str = "/",
        host: str = "127.0.0.1",
        token: Value | None = None,
        max_bytes: int = 10_000_000,
        flush_every: timedelta = timedelta(milliseconds=20),
        name: str = "http",
    ) -> None:
        where = f"source '{name}'"
        if not 0 < port < 65536:
            raise PipelineError(f"{where}: expected a port from 1 to 65535, got {port!r}")
        if not path.startswith("/") or not path.isprintable() or any(character in path for character in " ?#"):
            raise PipelineError(f"{where}: expected a path such as /orders, got {path!r}")
        if token is None and not _is_loopback(host):
            raise PipelineError(
                f"{where}: {host} can be reached from other machines, and anyone there could send records; give a"
                ' token, such as token=EnvVar("ORDERS_TOKEN"), or listen on 127.0.0.1'
            )
        self.port, self.path, self.host, self.max_bytes, self.name = port, path, host, max_bytes, name
        self.token = None if token is None else deferred(token)
        checked_span(f"{where}: flush_every", flush_every, 0)
        self.flush_every = flush_every
        self.records = record_type(record, where)
        JsonFormat().value_type(self.records, self.records.names, where)

    def describe(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"what is sent to http://{host}:{self.port}{self.path}"

    def receive(self) -> Iterator[Out]:
        return chain.from_iterable(self.receive_groups())

    def receive_groups(self) -> Iterator[Sequence[Out]]:
        token = None if self.token is None else resolved(self.token, f"source '{self.name}': token").encode()
        server = self._server = _Server(self, self._decoder(), token)
        return server.groups()

    def on_logged(self, records: int) -> None:
        if self._server is not None:
            self._server.acknowledge(records)

    def stop_receiving(self) -> None:
        if self._server is not None:
            self._server.stop()

    def _decoder(self) -> Callable[[bytes, bool], list[Out]]:
        """What makes the records of a body, which has one a line where that is true."""
        kind = JsonFormat().value_type(self.records, self.records.names, f"source '{self.name}'")
        one, by_line = json_decoder(kind.python), json_decoder(kind.python, lines=True)
        many = json_decoder(list[kind.python])  # type: ignore[name-defined]

        def decode(body: bytes, lines: bool) -> list[Out]:
            if lines:
                found = by_line(body)
            elif body.lstrip()[:1] == b"[":
                found = many(body)
            else:
                found = [one(body)]
            columns = kind.to_batch(found).columns
            return self.records.from_batch(pa.RecordBatch.from_arrays(columns, schema=self.records.schema))

        return decode


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Request:
    """The records of a request, and what became of them."""

    def __init__(self, records: Sequence[Any]) -> None:
        self.records = records
        self.logged = False
        self.decided, self.answered = threading.Event(), threading.Event()

    def decide(self, logged: bool) -> None:
        self.logged = logged
        self.decided.set()


class _Server(ThreadingHTTPServer):
    """Listens while a job receives, and answers when its log has what was sent."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(
        self, source: HttpSource[Any], decode: Callable[[bytes, bool], list[Any]], token: bytes | None
    ) -> None:
        self.source, self.decode, self.token = source, decode, token
        self._waiting: SimpleQueue[_Request | None] = SimpleQueue()
        self._places = threading.BoundedSemaphore(_AT_ONCE)
        self._given: deque[tuple[int, _Request]] = deque()
        """Requests whose records went to the log, each with the number of records that went there by then."""

        self._lock = threading.Lock()
        self._stopped = threading.Event()
        if ":" in source.host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((source.host, source.port), _Handler)
        except OSError as error:
            raise OSError(
                f"it cannot listen on {source.host}:{source.port} ({error.strerror or error}); give a port that is free"
                " and an address of the machine that the driver runs on"
            ) from error
        threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True, name=f"{source.name}, listening").start()

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's looks for the host's name, and may wait for it long

    def groups(self) -> Iterator[Sequence[Any]]:
        """The records of one request after the other, until the job stops."""
        total = 0
        while (request := self._waiting.get()) is not None:
            total += len(request.records)
            self._given.append((total, request))
            yield request.records

    def receive(self, records: Sequence[Any]) -> _Request | None:
        """In a handler's thread: the request when the log has its records; None where they should be sent again."""
        if not self._places.acquire(timeout=_PATIENCE):
            return None
        try:
            request = _Request(records)
            with self._lock:
                if self._stopped.is_set():
                    return None
                self._waiting.put(request)
            while not request.decided.wait(_LOOK):
                if self._stopped.is_set() and not request.decided.wait(_GRACE):
                    return None
            return request if request.logged else None
        finally:
            self._places.release()

    def acknowledge(self, records: int) -> None:
        """The log has so many records."""
        logged = []
        while self._given and self._given[0][0] <= records:
            logged.append(self._given.popleft()[1])
        for request in logged:
            request.decide(logged=True)
        if self._stopped.is_set():  # the process may end at once
            deadline = time.monotonic() + 2
            for request in logged:
                request.answered.wait(max(0.0, deadline - time.monotonic()))

    def stop(self) -> None:
        """Take no further request, and refuse those whose records have not gone to the log."""
        with self._lock:
            if self._stopped.is_set():
                return
            self._stopped.set()
            refused = []
            while not self._waiting.empty():
                refused.append(self._waiting.get())
            self._waiting.put(None)
        for request in refused:
            assert request is not None
            request.decide(logged=False)
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        _logger.info("source '%s': a connection was cut off", self.source.name, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """Answers the requests of a connection."""

    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = _SILENCE
    server_version, sys_version = "dagster-unified", ""

    def do_POST(self) -> None:
        source = self.server.source
        token = self.server.token
        given = self.headers.get("Authorization", "").removeprefix("Bearer ").encode()
        size = self.headers.get("Content-Length", "")
        if self.path.partition("?")[0] != source.path:
            self._refuse(HTTPStatus.NOT_FOUND, f"records are received at {source.path}")
        elif token is not None and not hmac.compare_digest(given, token):
            self._refuse(HTTPStatus.UNAUTHORIZED, "the header Authorization has to be 'Bearer ' and the source's token")
        elif not size.isdecimal():
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "the header Content-Length is missing")
        elif int(size) > source.max_bytes:
            self._refuse(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body has {size} bytes, and the source takes {source.max_bytes}; send it in several requests",
            )
        elif self.headers.get("Content-Encoding", "identity") != "identity":
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body is compressed, which the source does not take")
        else:
            self._take(int(size))

    def do_GET(self) -> None:
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "records are sent by POST", {"Allow": "POST"})

    do_HEAD = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815 - http.server asks for these names

    def _take(self, size: int) -> None:
        body = self.rfile.read(size)
        if len(body) < size:  # the sender has gone
            self.close_connection = True
            return
        lines = self.headers.get_content_type() in _LINES
        try:
            records = self.server.decode(body, lines)
        except UnicodeDecodeError as error:
            self._answer(HTTPStatus.BAD_REQUEST, {"error": f"a text in it is no UTF-8 ({error.reason})"})
            return
        except (msgspec.MsgspecError, UnifiedError, ValueError, RecursionError) as error:
            self._answer(HTTPStatus.BAD_REQUEST, {"error": str(error)})
            return
        if not records:
            self._answer(HTTPStatus.OK, {"received": 0})
            return
        request = self.server.receive(records)
        if request is None:
            again = {"Retry-After": "1", "Connection": "close"}
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, {"error": "nothing was received; send it again"}, again)
            return
        try:
            self._answer(HTTPStatus.OK, {"received": len(records)})
        finally:
            request.answered.set()

    def _refuse(self, status: HTTPStatus, reason: str, headers: Mapping[str, str] | None = None) -> None:
        size = self.headers.get("Content-Length", "")
        # a sender that is cut off in its body does not read the answer
        left = min(int(size) if size.isdecimal() else 0, 2 * self.server.source.max_bytes)
        while left > 0 and (some := self.rfile.read(min(left, 1 << 16))):
            left -= len(some)
        self._answer(status, {"error": reason}, {"Connection": "close", **(headers or {})})

    def _answer(
        self, status: HTTPStatus, answer: Mapping[str, object], headers: Mapping[str, str] | None = None
    ) -> None:
        body = msgspec.json.encode(answer)
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        _logger.debug(format, *args)
