"""A server on this machine that speaks S3, what it is asked, and how a process and its Spark session reach it."""

import json
import logging
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from threading import Lock
from typing import NamedTuple
from urllib.parse import parse_qs

import boto3
import s3fs
from moto.server import ThreadedMotoServer

from dagster_unified.storage.object_store import Store

HADOOP, AWS = "3.5.0", "2.35.4"
"""The versions that Spark 4.3 was built with.

See `pyspark/jars/hadoop-client-api-3.5.0.jar`, and what its hadoop-aws asks for.
"""

MODULES = ("s3", "sts", "s3-transfer-manager", "apache-client", "netty-nio-client")
"""What hadoop-aws needs of `software.amazon.awssdk:bundle`, which has 600 MB."""

IVY = """<ivysettings>
<settings defaultResolver="central"/>
<resolvers><ibiblio name="central" m2compatible="true"/></resolvers>
</ivysettings>"""


CONDITIONS = ("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH")


IGNORES_CONDITIONS, LOSES_ANSWERS = "ignores conditions", "loses answers"
"""Faults of a server: it writes what it should refuse, as older stores do; it writes, and says that it is busy."""

BUSY = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
REFUSED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
FAILED = b"<Error><Code>InternalError</Code><Message>We encountered an internal error. Try again.</Message></Error>"


REQUESTS, FAULTS = "/-/requests", "/-/faults"
"""Where the server says what it was asked since somebody looked there the last time, and is told its faults."""

SLOW_DOWN, LATE, CUT, LOST, DENIED, HALF_DONE = "slow down", "late", "cut", "lost", "denied", "half done"
HELD = "held"
"""Faults of an answer.

The store says that it is busy; it takes its time; an upload or an answer ends in its midst; it does as it was told, and
the connection ends before it says so; it refuses, so that nobody asks again; it says that all is well (200), and then
that it is not, as S3 may at the end of an upload in parts; it does nothing until it has other faults.
"""

PART, COMPLETE, ABORT = "PUT part", "POST complete", "DELETE upload"
"""Methods of a request for an upload in parts."""

SAID = {
    SLOW_DOWN: ("503 Slow Down", BUSY),
    DENIED: ("403 Forbidden", REFUSED),
    HALF_DONE: ("200 OK", FAILED),
}
"""What the store says where it does nothing."""

SECONDS_LATE = 0.2


class Fault(NamedTuple):
    """What becomes of every so-manieth request that fits, of those that are new; one that comes again is answered.

    Where it is `lasting`, that one has the fault as well.
    """

    kind: str
    every: int = 1
    method: str = ""
    key: str = ""
    client: str = ""
    lasting: bool = False


class Request(NamedTuple):
    """A request of a client, as `method` and `key`; of a listing, the key is its prefix.

    A part of an upload has its number in the method.
    """

    method: str
    key: str
    client: str

    @classmethod
    def of(cls, environ) -> "Request":
        _, _, key = environ["PATH_INFO"].lstrip("/").partition("/")
        query, method = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True), environ["REQUEST_METHOD"]
        if method == "GET" and not key:
            method, key = "LIST", query.get("prefix", [""])[0]
        elif "partNumber" in query:
            method = f"{PART} {query['partNumber'][0]}"
        elif "uploadId" in query:
            method = {"POST": COMPLETE, "DELETE": ABORT}.get(method, method)
        agent = environ.get("HTTP_USER_AGENT", "")
        clients = {"Hadoop": "s3a", "Boto3": "boto3", "otocore": "s3fs", "object_store": "delta"}
        return cls(method, key, next((name for word, name in clients.items() if word in agent), agent))


def requests(url: str) -> list[Request]:
    """What the server at `url` was asked since the last call."""
    with urllib.request.urlopen(f"{url}{REQUESTS}", timeout=60) as answer:
        return [Request(*told) for told in json.load(answer)]


def disturb(url: str, *faults: Fault) -> None:
    """Give the server at `url` these faults from now on, instead of others."""
    urllib.request.urlopen(f"{url}{FAULTS}", json.dumps(faults).encode(), timeout=60).close()


class Conditions:
    """Makes moto compare and write in one, as S3 does, or have a fault.

    Where it loses answers, every fifth request fails, and every other conditional write after it has happened.
    """

    def __init__(self, app, fault: str) -> None:
        self._app, self._fault, self._writing = app, fault, Lock()
        self._counting = Lock()
        self._requests, self._writes = count(1), count()
        self._asked: list[Request] = []
        self._faults: list[tuple[Fault, Iterator[int]]] = []
        self._disturbed: set[Request] = set()

    def __call__(self, environ, start_response):
        if environ["PATH_INFO"] == REQUESTS:
            told, self._asked = self._asked, []
            start_response("200 OK", [("Content-Type", "application/json")])
            return [json.dumps(told).encode()]
        if environ["PATH_INFO"] == FAULTS:
            given = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
            self._faults, self._disturbed = [(Fault(*one), count(1)) for one in given], set()
            start_response("200 OK", [("Content-Length", "0")])
            return []
        request = Request.of(environ)
        self._asked.append(request)
        kind = self._fault_of(request)
        if kind in SAID:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            return _say(start_response, *SAID[kind])
        if kind == LATE:
            time.sleep(SECONDS_LATE)
        elif kind == HELD:
            faults = self._faults
            while faults is self._faults:
                time.sleep(0.05)
        elif kind is not None:
            return self._ended(environ, start_response, kind)
        return self._answered(environ, start_response)

    def _fault_of(self, request: Request) -> str | None:
        with self._counting:
            is_new = request not in self._disturbed
            self._disturbed.add(request)
            for fault, fitting in self._faults if is_new else [one for one in self._faults if one[0].lasting]:
                fits = fault.method in request.method and fault.key in request.key and fault.client in request.client
                if fits and next(fitting) % fault.every == 0:
                    return fault.kind
        return None

    def _ended(self, environ, start_response, kind):
        """End the connection in the midst of an upload or an answer, or before the answer."""
        length = int(environ.get("CONTENT_LENGTH") or 0)
        in_chunks = environ.get("HTTP_TRANSFER_ENCODING") == "chunked"
        if kind == CUT and (length or in_chunks):
            environ["wsgi.input"].read(length // 2 or 1)
        elif kind == CUT:
            answer = b"".join(self._answered(environ, start_response))
            yield answer[: len(answer) // 2]
        else:
            self._answered(environ, lambda *_: None)
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionResetError("the connection ends")

    def _answered(self, environ, start_response):
        conditional = environ["REQUEST_METHOD"] == "PUT" and any(name in environ for name in CONDITIONS)
        if conditional and self._fault == IGNORES_CONDITIONS:
            environ = {name: value for name, value in environ.items() if name not in CONDITIONS}
        every, requests = (2, self._writes) if conditional else (5, self._requests)
        busy = self._fault == LOSES_ANSWERS and next(requests) % every == 0
        if busy and not conditional:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            return _say(start_response, *SAID[SLOW_DOWN])
        with self._writing if conditional else nullcontext():
            answer = self._app(environ, start_response if not busy else lambda *_: None)
        return _say(start_response, *SAID[SLOW_DOWN]) if busy else answer


def _say(start_response, status, content):
    start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(content)))])
    return [content]


@contextmanager
def served(bucket: str, fault: str = "") -> Iterator[dict[str, str]]:
    """The environment in which `s3://<bucket>` is there, of a server in a process of its own."""
    s3fs.S3FileSystem.clear_instance_cache()  # or clients of this process would look for another server
    command = [sys.executable, "-m", "tests.object_store", bucket, fault]
    root = Path(__file__).parents[1]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        url = server.stdout.readline().strip()
        assert url, "the S3 server has not started"
        environment = {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": url,
            "AWS_ALLOW_HTTP": "true",
        }
        try:
            yield environment
        finally:
            server.kill()
    s3fs.S3FileSystem.clear_instance_cache()


def client(url: str):
    return boto3.client(
        "s3", endpoint_url=url, aws_access_key_id="key", aws_secret_access_key="secret", region_name="us-east-1"
    )


def s3a(folder: Path, url: str | None = None) -> dict[str, str]:
    """The settings of a Spark session that has Hadoop's connector; `folder` is for a file that they name.

    With `url` they say where the server is, as an `ObjectStore` does where there is one.
    """
    (folder / "ivy.xml").write_text(IVY)
    packages = [f"software.amazon.awssdk:{module}:{AWS}" for module in MODULES]
    return {
        "spark.jars.packages": ",".join([f"org.apache.hadoop:hadoop-aws:{HADOOP}", *packages]),
        "spark.jars.excludes": "software.amazon.awssdk:bundle,org.wildfly.openssl:wildfly-openssl",
        "spark.jars.ivySettings": str(folder / "ivy.xml"),
        # its asynchronous client cannot talk to moto's server
        "spark.hadoop.fs.s3a.optimized.copy.from.local.enabled": "false",
        **(Store(url, "us-east-1").settings() if url is not None else {}),
    }


if __name__ == "__main__":
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    moto._server.app = Conditions(moto._server.app, sys.argv[2])
    address = "http://{}:{}".format(*moto.get_host_and_port())
    client(address).create_bucket(Bucket=sys.argv[1])
    print(address, flush=True)
    sys.stdin.read()  # until the one who started it has ended
