"""How a function takes part in checkpoints: it hears of those that are complete.

Names and methods are Flink's. Knows no engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any


class CheckpointListener(ABC):
    """A function that hears of committed epochs; any function class may have it as a second base.

    In STREAMING `notify_checkpoint_complete` is called once an epoch is committed, with all that its sinks wrote, and
    before the function gets a record of a later one. Each instance of the function hears of the latest committed epoch
    after `open`. It is best effort, as in Flink: the function hears nothing of the last epoch before a job stops, and
    of an epoch twice where the job was restarted after it. What it knows of an epoch has to be in its state, since the
    instance that is called need not be the one that processed the epoch's records. In BATCH there are no checkpoints,
    and it is never called (FLIP-140). Flink: `CheckpointListener`.

    Examples:
        >>> class Published(MapFunction[int, int], CheckpointListener):
        ...     def open(self, runtime_context: RuntimeContext) -> None:
        ...         self.published = -1
        ...     def notify_checkpoint_complete(self, epoch: int) -> None:
        ...         self.published = epoch
        ...     def map(self, value: int) -> int:
        ...         return self.published
        >>> collect(numbers.map(Published()))
        [-1, -1, -1]
    """

    @abstractmethod
    def notify_checkpoint_complete(self, epoch: int) -> None:
        """Called after an epoch was committed; `epoch` is its number. An exception fails the job."""


def listeners(function: Any) -> Iterator[CheckpointListener]:
    """A function of the author's, and those in one of the library's, that hear of committed epochs."""
    if isinstance(function, CheckpointListener):
        yield function
    for part in getattr(function, "wrapped_functions", ()):
        yield from listeners(part)
