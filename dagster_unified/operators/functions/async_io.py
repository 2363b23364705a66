"""Asynchronous calls as an author writes them: the function, and when a call is repeated (Flink: *Async I/O*)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic

from dagster_unified.operators.functions.base import Function
from dagster_unified.operators.functions.type_variables import In, Out
from dagster_unified.operators.time import checked_span
from dagster_unified.values import check_count


class AsyncFunction(Function, ABC, Generic[In, Out]):
    """One record in, any number out, once an asynchronous call has answered (Flink: *Async I/O*).

    In both modes the calls of a batch of records wait together.

    Examples:
        >>> import asyncio
        >>> class Named(AsyncFunction[int, str]):
        ...     async def async_invoke(self, value: int) -> list[str]:
        ...         await asyncio.sleep(0)
        ...         return [f"record {value}"]
        >>> sorted(collect(AsyncDataStream.unordered_wait(numbers, Named(), timedelta(seconds=10))))
        ['record 1', 'record 2', 'record 3']
    """

    @abstractmethod
    async def async_invoke(self, value: In) -> Iterable[Out]:
        """The results of `value`. Other records' calls run while this one awaits."""

    def timeout(self, value: In) -> Iterable[Out]:
        """The results of a record whose call takes too long; unless overridden, it fails the run."""
        raise TimeoutError("no answer in time; give a longer timeout, or override timeout(value)")


def every_exception(error: Exception) -> bool:
    """Every exception of a call is worth another attempt."""
    return True


def no_result(results: list[Any]) -> bool:
    """No result of a call is worth another attempt."""
    return False


@dataclass(frozen=True)
class AsyncRetryStrategy:
    """How often a call is repeated, and after which pause, in both modes (FLIP-232).

    A call is repeated where `exception_predicate(error)` or `result_predicate(results)` is true, until there were
    `max_attempts` calls; then its error fails the run, and its results are taken as they are. The timeout is for all
    attempts together.

    Examples:
        >>> class Flaky(AsyncFunction[int, str]):
        ...     def open(self, runtime_context: RuntimeContext) -> None:
        ...         self.calls = 0
        ...     async def async_invoke(self, value: int) -> list[str]:
        ...         self.calls += 1
        ...         if self.calls == 1:
        ...             raise ConnectionError("the service is away")
        ...         return [f"record {value}"]
        >>> retry = AsyncRetryStrategy.fixed_delay(3, timedelta(milliseconds=1))
        >>> collect(AsyncDataStream.ordered_wait_with_retry(numbers, Flaky(), timedelta(seconds=10), retry))
        ['record 1', 'record 2', 'record 3']
    """

    max_attempts: int
    backoff: timedelta
    result_predicate: Callable[[list[Any]], bool] = no_result
    exception_predicate: Callable[[Exception], bool] = every_exception

    def __post_init__(self) -> None:
        check_count("AsyncRetryStrategy: max_attempts", self.max_attempts)
        checked_span("AsyncRetryStrategy: the backoff", self.backoff, 0)

    @staticmethod
    def fixed_delay(
        max_attempts: int,
        backoff: timedelta,
        result_predicate: Callable[[list[Any]], bool] = no_result,
        exception_predicate: Callable[[Exception], bool] = every_exception,
    ) -> AsyncRetryStrategy:
        """At most `max_attempts` calls, each `backoff` after the one before.

        Raises `PipelineError` for less than one attempt or a negative pause.
        """
        return AsyncRetryStrategy(max_attempts, backoff, result_predicate, exception_predicate)
