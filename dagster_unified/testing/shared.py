"""What a test and the functions that the harness runs have in common, though functions are copies, as on Spark."""

from __future__ import annotations

import os
import weakref
from typing import Any, Generic, TypeVar

from dagster_unified.errors import UnsupportedError

T = TypeVar("T")

_living: weakref.WeakValueDictionary[int, InTheTest] = weakref.WeakValueDictionary()


class InTheTest:
    """An object that is not copied with the functions that refer to it, in the process of the test."""

    def __reduce__(self) -> Any:
        _living[id(self)] = self
        return _found, (id(self), os.getpid())


def _found(identity: int, process: int) -> InTheTest:
    if os.getpid() != process or identity not in _living:
        raise UnsupportedError(
            "a function refers to an object of a test (Shared, ManualClock), which is in the test's process only: the"
            " harness runs functions there and Spark does not; emit what the test has to see"
        )
    return _living[identity]


class Shared(InTheTest, Generic[T]):
    """Holds a value that a test and the functions of a pipeline share while the harness runs them: a test double.

    The harness runs copies of functions, as Spark's workers do: what they append to a list of the test's, the test does
    not see. It sees what they do to the value of a `Shared`. On Spark the function is refused.

    Examples:
        >>> calls = Shared([])
        >>> class Called(MapFunction[int, int]):
        ...     def map(self, value: int) -> int:
        ...         calls.value.append(value)
        ...         return value
        >>> collect(numbers.map(Called())), calls.value
        ([1, 2, 3], [1, 2, 3])
    """

    def __init__(self, value: T) -> None:
        self.value = value
