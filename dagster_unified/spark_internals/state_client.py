"""Lets Spark's state client write behind: what needs no answer is sent with the next request that does.

For each key group a task asks Spark's JVM three times: to choose the group, for its index, and to write it. Each time
the worker waits for an answer, which takes longer than what is asked for. Only a value that is read is worth waiting
for, and Spark's server answers in order. So requests that only write go out together with the next one that reads, and
their answers are looked at then. A task ends with a request that is waited for, so that no failed write goes unseen.

Spark 4.3's client (`StatefulProcessorApiClient`) is not public; nothing else here knows its inside.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyspark.errors import PySparkRuntimeError
from pyspark.sql.streaming.stateful_processor_api_client import StatefulProcessorApiClient

_UNANSWERED = 256
"""Requests at most whose answers wait, so that neither side fills the other's buffer."""

_VERSION = 0
"""That of the protocol."""

_DONE = (0, "", b"")
"""The answer to a request that only writes, as long as none is known."""


class WriteBehindClient(StatefulProcessorApiClient):
    """A client of Spark's that can leave answers for later. Other clients become one by `of`."""

    _unanswered: int
    _defers: bool

    @classmethod
    def of(cls, handle: Any) -> WriteBehindClient:
        """Return the client of a processor's handle, which every state of the handle uses too."""
        client = handle._statefulProcessorApiClient
        client.__class__ = cls
        client._unanswered, client._defers = 0, False
        write_behind: WriteBehindClient = client
        return write_behind

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Only write in this context: each request seems to succeed, and the next read raises what went wrong."""
        self._defers = True
        try:
            yield
        finally:
            self._defers = False

    def set_implicit_key(self, key: Any) -> None:
        with self.writing():
            super().set_implicit_key(key)

    def _send_proto_message(self, message: bytes) -> None:
        try:
            try:
                self._send(message)
            except OSError:
                self._settle()  # Spark says what went wrong before it hangs up
                raise
        except (OSError, EOFError) as error:
            raise PySparkRuntimeError(
                "Spark has ended the connection to the state of a key group, as it does after a write that failed; the"
                " log of Spark's process says why"
            ) from error

    def _send(self, message: bytes) -> None:
        if not self._defers:
            super()._send_proto_message(message)
            self._settle()  # the server answers in order, so that the next answer is this message's
            return
        if self._unanswered >= _UNANSWERED:
            self.sockfile.flush()
            self._settle()
        self.sockfile.write(struct.pack("!ii", _VERSION, len(message)) + message)

    def _receive_proto_message(self) -> tuple[int, str, bytes]:
        if self._defers:
            self._unanswered += 1
            return _DONE
        return super()._receive_proto_message()

    def _settle(self) -> None:
        while self._unanswered:
            self._unanswered -= 1
            status, message, _ = super()._receive_proto_message()
            if status != 0:
                raise PySparkRuntimeError(f"Spark could not write the state of a key group: {message}")
