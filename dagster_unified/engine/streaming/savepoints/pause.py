"""Holds the queries of a job: where each is between two epochs, until all are; and where one is too far ahead.

Knows no query.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from threading import Event, Lock


class Brake:
    """Holds back each query behind the last epoch that it may end, until it is let go."""

    def __init__(self, last: Mapping[str, int]) -> None:
        self._last = last
        self._let_go = Event()

    def wait(self, query: str, epoch: int) -> None:
        """Wait where a query is about to end an epoch that is too far."""
        if epoch > self._last[query]:
            self._let_go.wait()

    def let_go(self) -> None:
        """Let all queries go on from now on."""
        self._let_go.set()


class Pause:
    """Calls `action` once when all of the queries are held, with the epoch before for each; None before its first.

    Nothing is written then: what one query hands on to another is between the same two epochs at both.
    """

    def __init__(self, queries: Collection[str], action: Callable[[Mapping[str, int | None]], None]) -> None:
        self._queries = frozenset(queries)
        self._action = action
        self._epochs: dict[str, int | None] = {}
        self._held: list[Callable[[], None]] = []
        self._is_over = False
        self._lock = Lock()

    def hold(self, query: str, epoch: int | None, go_on: Callable[[], None]) -> None:
        """Note that a query is held behind an epoch, until `go_on` is called."""
        with self._lock:
            if self._is_over:
                go_on()
                return
            self._held.append(go_on)
            self._epochs[query] = epoch
            if self._epochs.keys() >= self._queries:
                try:
                    self._action(self._epochs)
                finally:
                    self._let_go()

    def give_up(self) -> None:
        """Let all queries go on; ends what is being done first."""
        with self._lock:
            if not self._is_over:
                self._let_go()

    def _let_go(self) -> None:
        self._is_over = True
        for go_on in self._held:
            go_on()
