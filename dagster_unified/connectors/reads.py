"""When a read ends, for sources that keep something open until then.

Spark does not say when a DataFrame was read for the last time; its reader does: a stage of BATCH, and in STREAMING the
reader of a micro-batch. Outside of both nobody does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

_reads: ContextVar[ExitStack | None] = ContextVar("reads", default=None)


def at_end_of_read(release: Callable[[], object]) -> None:
    """Call `release` when what is planned now has been read, if its reader says so."""
    reads = _reads.get()
    if reads is not None:
        reads.callback(release)


@contextmanager
def planned_in(reads: ExitStack) -> Iterator[None]:
    """Reads planned inside end when `reads` is closed."""
    token = _reads.set(reads)
    try:
        yield
    finally:
        _reads.reset(token)


@contextmanager
def read_here() -> Iterator[None]:
    """Reads planned inside end with the block."""
    with ExitStack() as reads, planned_in(reads):
        yield
