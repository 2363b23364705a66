"""Ports for the servers of tests."""

import itertools
import os
import random
import socket
from contextlib import suppress

_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PORTS = itertools.count(12_000 + 2_500 * (_WORKER % 8) + random.SystemRandom().randrange(2_000))


def free_port() -> int:
    """A port of the loopback interface that nobody listens on.

    It is one that the system gives to nobody by itself, and other test processes look for theirs elsewhere, so that it
    is still free when a server has come as far as listening on it, or listens on it again.
    """
    for port in _PORTS:
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")
