"""`AsyncDataStream`: asynchronous calls on a stream, as PyFlink writes them."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from dagster_unified.api.building import NOT_GIVEN, main_output
from dagster_unified.errors import PipelineError
from dagster_unified.graph import nodes
from dagster_unified.operators.async_io import AsyncCalls
from dagster_unified.operators.functions.async_io import AsyncFunction, AsyncRetryStrategy
from dagster_unified.operators.functions.type_variables import R, T
from dagster_unified.operators.time import checked_span
from dagster_unified.values import check_count

if TYPE_CHECKING:
    from typing_extensions import TypeForm

    from dagster_unified.api.stream import DataStream


class AsyncDataStream:
    """Calls an `AsyncFunction` for each record, many at once.

    In both modes a record's results carry its event time, a call that fails fails the stage or the epoch, and a retry
    calls again (at-least-once towards the service). `capacity` is per partition.
    """

    @staticmethod
    def ordered_wait(
        data_stream: DataStream[T],
        async_function: AsyncFunction[T, R],
        timeout: timedelta,
        capacity: int = 100,
        output_type: TypeForm[R] = NOT_GIVEN,
    ) -> DataStream[R]:
        """Results in the order of their records.

        Examples:
            >>> class Lookup(AsyncFunction):
            ...     async def async_invoke(self, value: int) -> list[str]:
            ...         return [f"record {value}"]
            >>> collect(AsyncDataStream.ordered_wait(numbers, Lookup(), timedelta(seconds=1)))
            ['record 1', 'record 2', 'record 3']
        """
        return _calls(data_stream, AsyncCalls(async_function, timeout, capacity, ordered=True), output_type)

    @staticmethod
    def ordered_wait_with_retry(
        data_stream: DataStream[T],
        async_function: AsyncFunction[T, R],
        timeout: timedelta,
        async_retry_strategy: AsyncRetryStrategy,
        capacity: int = 100,
        output_type: TypeForm[R] = NOT_GIVEN,
    ) -> DataStream[R]:
        """As `ordered_wait`; a call that fails is repeated as the strategy says, within the timeout."""
        calls = AsyncCalls(async_function, timeout, capacity, ordered=True, retry=async_retry_strategy)
        return _calls(data_stream, calls, output_type)

    @staticmethod
    def unordered_wait(
        data_stream: DataStream[T],
        async_function: AsyncFunction[T, R],
        timeout: timedelta,
        capacity: int = 100,
        output_type: TypeForm[R] = NOT_GIVEN,
    ) -> DataStream[R]:
        """Results as they come: in no order within a batch of records, and never past a watermark."""
        return _calls(data_stream, AsyncCalls(async_function, timeout, capacity, ordered=False), output_type)

    @staticmethod
    def unordered_wait_with_retry(
        data_stream: DataStream[T],
        async_function: AsyncFunction[T, R],
        timeout: timedelta,
        async_retry_strategy: AsyncRetryStrategy,
        capacity: int = 100,
        output_type: TypeForm[R] = NOT_GIVEN,
    ) -> DataStream[R]:
        """As `unordered_wait`; a call that fails is repeated as the strategy says, within the timeout."""
        calls = AsyncCalls(async_function, timeout, capacity, ordered=False, retry=async_retry_strategy)
        return _calls(data_stream, calls, output_type)


def _calls(stream: DataStream[T], calls: AsyncCalls, output_type: TypeForm[R]) -> DataStream[R]:
    function, retry = calls.function, calls.retry
    name = type(function).__name__
    where = stream._where(name)
    if not isinstance(function, AsyncFunction):
        raise PipelineError(f"{where}: expected an AsyncFunction, got {function!r}")
    checked_span(f"{where}: the timeout", calls.timeout, 1)
    if retry is not None and not isinstance(retry, AsyncRetryStrategy):
        raise PipelineError(f"{where}: expected an AsyncRetryStrategy such as fixed_delay(...), got {retry!r}")
    check_count(f"{where}: the capacity", calls.capacity)
    records = stream._output(name, function.async_invoke, output_type, main_output)
    return stream._next(nodes.AsyncNode, name, naming=nodes.Naming.FUNCTION, records=records, function=calls)
