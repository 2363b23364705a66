"""Closes what was opened, so that no failure keeps the rest open, and none hides the one before it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from dagster_unified.operators.failures import RAISED, user_failure


@dataclass(frozen=True)
class Closing:
    """An author's function, or what holds one; `where` is how an error names it."""

    where: str
    one: Any

    def close(self, failure: BaseException | None) -> None:
        """Closes it, whatever has failed before."""
        try:
            self.one.close()
        except RAISED as error:
            close = getattr(getattr(self.one, "function", self.one), "close", None)
            raise user_failure(error, self.where, close, "close()") from error


class Closes(Protocol):
    """What is closed, after a failure or without one."""

    def close(self, failure: BaseException | None) -> None: ...


def close_each(ones: Iterable[Closes], failure: BaseException | None) -> None:
    """Closes all of them, also where one fails to; raises what failed first, which may be noted at what failed before.

    Flink: `StreamTask.cleanUp`, whose failures are suppressed ones of what made the task fail.
    """
    first: Exception | None = None
    for one in ones:
        try:
            one.close(failure or first)
        except Exception as error:
            told = failure or first
            if told is None:
                first = error
            else:
                told.add_note(f"after that: {error}")
    if first is not None:
        raise first
