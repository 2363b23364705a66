"""Content on its way from Spark's workers to the driver.

A little content travels within its committable; more is in files in the staging folder of its attempt, and the driver
reads one file at a time.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence, Sized
from typing import ClassVar, Generic, TypeVar
from uuid import uuid4

import pyarrow as pa

from dagster_unified.connectors.protocol.commits import Committable, WriteAttempt, Writer
from dagster_unified.errors import UnavailableError
from dagster_unified.storage.paths import put, storage_path

INLINE_BYTES = 256 << 10
"""Bytes of a task that travel within their committable."""


class StagedContent(Committable, frozen=True, kw_only=True):
    """Content of one task: in here, or in a file."""

    content: bytes = b""
    file: str = ""

    def read(self, what: str) -> bytes:
        """The content, which `what` describes. Raises `UnavailableError` where another job has removed its file."""
        if not self.file:
            return self.content
        try:
            content: bytes = storage_path(self.file, what).read_bytes()
        except FileNotFoundError:
            raise UnavailableError(
                f"the {what} {self.file} are gone: another job has taken over and removed them; nothing was committed,"
                " and another attempt stages them again"
            ) from None
        return content


S = TypeVar("S", bound=StagedContent)
P = TypeVar("P", bound=Sized)


class StagingWriter(Writer[S], Generic[P, S]):
    """Stages what one task writes; the length of a part is the number of its rows."""

    committable: type[S]
    suffix: ClassVar[str]
    """The end of the names of the files."""

    chunk_bytes: ClassVar[int]
    """Bytes that a worker holds before it writes them to a file."""

    def __init__(self, attempt: WriteAttempt) -> None:
        self._folder = attempt.staging
        self._parts: list[P] = []
        self._bytes = 0
        self._staged: list[S] = []

    @abstractmethod
    def part(self, batch: pa.RecordBatch) -> tuple[P, int]:
        """The part to stage for a batch, and its bytes."""

    @abstractmethod
    def encode(self, parts: Sequence[P]) -> tuple[bytes, int]:
        """The content of some parts, and the number of its rows."""

    def write(self, batch: pa.RecordBatch) -> None:
        part, size = self.part(batch)
        self._parts.append(part)
        self._bytes += size
        if self._bytes > self.chunk_bytes:
            self._stage()

    def prepare_commit(self) -> Sequence[S]:
        if any(map(len, self._parts)):
            self._stage(inline=not self._staged and self._bytes <= INLINE_BYTES)
        return self._staged

    def _stage(self, inline: bool = False) -> None:
        (content, rows), file = self.encode(self._parts), ""
        if not inline and self._folder is not None:
            path = storage_path(self._folder, "staging folder") / f"{uuid4().hex}.{self.suffix}"
            put(path, content)
            file, content = str(path), b""
        self._staged.append(self.committable(rows=rows, bytes=self._bytes, content=content, file=file))
        self._parts, self._bytes = [], 0
