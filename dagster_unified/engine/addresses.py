"""Addresses of Spark: checked when they are given, and tried first.

Spark itself would try to connect for minutes.
"""

from __future__ import annotations

import re
import socket
from urllib.parse import urlsplit

from dagster_unified.errors import ConfigurationError, UnreachableError, nearest

PATIENCE = 3.0
"""Seconds that a connection, and then the first answer, may take."""

BUSY_PATIENCE = 60.0
"""Seconds that the first answer may take of a server that is known to run on this machine, which may be busy."""

_MASTERS = ("local", "local[*]", "local-cluster[2,1,1024]", "spark://host:7077", "yarn", "k8s://https://host:443")
_MASTER = re.compile(
    r"local|local\[(\d+|\*)(\s*,\s*\d+)?\]|local-cluster\[\s*\d+\s*,\s*\d+\s*,\s*\d+\s*\]|spark://[^/\s]+:\d+|yarn|k8s://\S+"
)


def checked_master(master: str) -> str:
    """The master of a classic session; raises `ConfigurationError` where Spark knows none like it."""
    if not _MASTER.fullmatch(master):
        raise ConfigurationError(
            f"'{master}' is not a Spark master, such as {', '.join(_MASTERS)}{nearest(master, _MASTERS)}"
        )
    return master


def checked_remote(remote: str) -> str:
    """The address of a Spark Connect server; raises `ConfigurationError` where it is none."""
    try:
        parts = urlsplit(remote)
        named = parts.scheme == "sc" and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # the port
        named = False
    if not named:
        raise ConfigurationError(f"'{remote}' is not the address of a Spark Connect server, such as sc://host:15002")
    return remote


def reach_master(master: str) -> None:
    """Raises `UnreachableError` where no master of a standalone cluster can be connected to."""
    if not checked_master(master).startswith("spark://"):
        return
    reason = master_away(master)
    if reason is not None:
        raise UnreachableError(
            f"no Spark master can be reached at {master}: {reason}; start one there, or give another address"
        )


def master_away(master: str) -> str | None:
    """Why none of the masters of a standalone cluster can be connected to; None where one can."""
    reasons = []
    for place in master.removeprefix("spark://").split(","):
        host, _, port = place.rpartition(":")
        reason = _unreachable(host.strip("[]"), int(port))
        if reason is None:
            return None
        reasons.append(reason)
    return "; ".join(reasons)


def reach_remote(remote: str, patience: float = PATIENCE) -> None:
    """Raises `UnreachableError` where no Spark Connect server answers at an address within `patience` seconds."""
    parts = urlsplit(checked_remote(remote))
    reason = _unreachable(parts.hostname or "", parts.port or 15002) or _silent(remote, patience)
    if reason is not None:
        raise UnreachableError(
            f"no Spark Connect server can be reached at {_shown(remote)}: {reason}; start one there, or give another"
            " address"
        )


def _unreachable(host: str, port: int) -> str | None:
    """Why nothing can be connected to, or None."""
    try:
        socket.create_connection((host, port), timeout=PATIENCE).close()
    except TimeoutError:
        return f"no connection within {PATIENCE:.0f} s"
    except OSError as error:
        return error.strerror or str(error)
    return None


def _silent(remote: str, patience: float) -> str | None:
    """Why what was connected to is no Spark Connect server, or None."""
    import grpc
    from pyspark.sql.connect.client import DefaultChannelBuilder

    channel = DefaultChannelBuilder(remote).toChannel()
    try:
        grpc.channel_ready_future(channel).result(timeout=patience)
    except grpc.FutureTimeoutError:
        return f"what listens there does not answer as one within {patience:.0f} s"
    finally:
        channel.close()
    return None


def _shown(remote: str) -> str:
    """The address without what may be secret."""
    return remote.partition("/;")[0]
