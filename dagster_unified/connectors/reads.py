"""When a read ends, for sources that keep something open as long as it lasts.

Spark does not say when a DataFrame was read for the last time; whoever runs it does: a stage of BATCH, and in STREAMING
the reader of a micro-batch. Outside of both nobody does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

_reads: ContextVar[ExitStack | None] = ContextVar("reads", default=None)


def at_end_of_read(release: Callable[[], object]) -> None:
    """Have this called when what is planned now has been read, if whoever reads it says so."""
    reads = _reads.get()
    if reads is not None:
        reads.callback(release)


@contextmanager
def planned_in(reads: ExitStack) -> Iterator[None]:
    """What is planned meanwhile has been read when `reads` is closed."""
    token = _reads.set(reads)
    try:
        yield
    finally:
        _reads.reset(token)


@contextmanager
def read_here() -> Iterator[None]:
    """What is planned meanwhile has been read at the end."""
    with ExitStack() as reads, planned_in(reads):
        yield
