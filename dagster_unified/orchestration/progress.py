"""Who else listens to a run in this process: the terminal of `dagster-unified run`, a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dagster_unified.engine.events import Event, Observer

_listeners: list[Observer] = []


def report(event: Event) -> None:
    """Passes an event on to all listeners."""
    for listener in _listeners:
        listener(event)


@contextmanager
def listening(observer: Observer) -> Iterator[None]:
    """Lets `observer` hear what happens in this process meanwhile."""
    _listeners.append(observer)
    try:
        yield
    finally:
        _listeners.remove(observer)
