"""Messages on their way from Spark's workers to the driver, which publishes them in one transaction.

A few travel within their committable; more are written to files in the staging folder of their attempt. Knows the sink
protocol; no client.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from uuid import uuid4

import msgspec
import pyarrow as pa

from dagster_unified.connectors.kafka.messages import MessageEncoder, Messages
from dagster_unified.connectors.paths import put, storage_path
from dagster_unified.connectors.protocol.commits import Committable, WriteAttempt, Writer, staged_content

_CHUNK = 8 << 20
"""Bytes of messages that a worker holds before it writes them to a file, and the driver when it reads them."""

_INLINE = 256 << 10
"""Bytes of a task's messages that travel within their committable."""


class StagedMessages(Committable, frozen=True, kw_only=True):
    """Messages of one task, in their order: in here, or in a file."""

    content: bytes = b""
    file: str = ""


class StagingWriter(Writer[StagedMessages]):
    """Encodes the records of one task, and stages them."""

    def __init__(self, encoder: MessageEncoder, attempt: WriteAttempt, upserts: bool) -> None:
        self._encoder, self._folder, self._upserts = encoder, attempt.staging, upserts
        self._held: list[Messages] = []
        self._bytes = 0
        self._staged: list[StagedMessages] = []

    def write(self, batch: pa.RecordBatch) -> None:
        messages = self._encoder.encode(batch)
        if self._upserts:
            messages = messages.last_of_each_key()
        self._held.append(messages)
        self._bytes += messages.size()
        if self._bytes > _CHUNK:
            self._stage()

    def prepare_commit(self) -> Sequence[StagedMessages]:
        if any(map(len, self._held)):
            self._stage(inline=not self._staged and self._bytes <= _INLINE)
        return self._staged

    def _stage(self, inline: bool = False) -> None:
        messages = [joined(self._held).last_of_each_key()] if self._upserts else self._held
        rows, content = sum(map(len, messages)), msgspec.msgpack.encode(messages)
        file = ""
        if not inline and self._folder is not None:
            path = storage_path(self._folder, "staging folder") / f"{uuid4().hex}.messages"
            put(path, content)
            file, content = str(path), b""
        self._staged.append(StagedMessages(rows=rows, bytes=self._bytes, content=content, file=file))
        self._held, self._bytes = [], 0


def staged_messages(committables: Sequence[StagedMessages]) -> Iterator[Messages]:
    """What was staged, in the order of each task. Raises `UnavailableError` where another job has removed it."""
    decoder = msgspec.msgpack.Decoder(list[Messages])
    for committable in committables:
        content = staged_content(committable.file, "staged messages") if committable.file else committable.content
        yield from decoder.decode(content)


def joined(parts: Sequence[Messages]) -> Messages:
    """Messages one after another; each part has the same columns."""
    if len(parts) == 1:
        return parts[0]

    def column(name: str) -> list[object] | None:
        columns = [getattr(part, name) for part in parts]
        return None if columns[0] is None else [item for of_part in columns for item in of_part]

    return Messages(*(column(name) for name in Messages.__struct_fields__))  # type: ignore[arg-type]
