"""Asynchronous calls: many requests at once from one worker, such as lookups in a service (Flink: *Async I/O*)."""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from dagster_unified.operators.failures import RAISED, user_failure
from dagster_unified.operators.functions.async_io import AsyncFunction, AsyncRetryStrategy
from dagster_unified.operators.program.blocks import Block, Collector, Consumer
from dagster_unified.operators.program.step import BlockStep, StepContext
from dagster_unified.records import shorten


@dataclass(frozen=True)
class AsyncCalls:
    """An `AsyncFunction` and how it is called: at most `capacity` at once, each for `timeout` at most."""

    function: AsyncFunction[Any, Any]
    timeout: timedelta
    capacity: int
    ordered: bool
    retry: AsyncRetryStrategy | None = None

    @property
    def wrapped_functions(self) -> tuple[Any, ...]:
        return (self.function,)

    async def run(
        self,
        records: Sequence[Any],
        emit: Callable[[int, Iterable[Any]], None],
        failed: Callable[[BaseException, Any], Exception],
    ) -> None:
        """Call the function for all records.

        `emit` gets a record's number and its results, in the order of the records or as the results come.
        """
        import asyncio  # takes long to import, and a pipeline is built without it

        waiting = iter(range(len(records)))
        results: list[list[Any] | None] = [None] * len(records)

        async def caller() -> None:
            for number in waiting:
                answer = await self._call(records[number], failed)
                if self.ordered:
                    results[number] = answer
                else:
                    emit(number, answer)

        callers = [asyncio.ensure_future(caller()) for _ in range(min(self.capacity, len(records)))]
        try:
            await asyncio.gather(*callers)
        finally:
            for task in callers:
                task.cancel()
            await asyncio.gather(*callers, return_exceptions=True)
        if self.ordered:
            for number, answer in enumerate(results):
                emit(number, answer or ())

    async def _call(self, record: Any, failed: Callable[[BaseException, Any], Exception]) -> list[Any]:
        import asyncio

        try:
            try:
                async with asyncio.timeout(self.timeout.total_seconds()) as limit:
                    return await self._attempted(record)
            except TimeoutError:
                if not limit.expired():  # it is the author's own
                    raise
                return _records(self.function.timeout(record), "timeout")
        except RAISED as error:
            raise failed(error, record) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # since another call has failed
                raise
            raise failed(error, record) from error

    async def _attempted(self, record: Any) -> list[Any]:
        """The results of the first call that need not be repeated."""
        retry = self.retry
        if retry is None:
            return await self._invoked(record)
        import asyncio

        for _ in range(retry.max_attempts - 1):
            try:
                answer = await self._invoked(record)
            except Exception as error:
                if not retry.exception_predicate(error):
                    raise
            else:
                if not retry.result_predicate(answer):
                    return answer
            await asyncio.sleep(retry.backoff.total_seconds())
        return await self._invoked(record)

    async def _invoked(self, record: Any) -> list[Any]:
        call: Any = self.function.async_invoke(record)
        if isinstance(call, AsyncIterable):
            raise TypeError("async_invoke has a `yield`, and gives all results at once; return a list of records")
        if not isinstance(call, Awaitable):
            raise TypeError(f"async_invoke returned {shorten(call)}, which cannot be awaited; write `async def`")
        return _records(await call, "async_invoke")


def _records(returned: Any, method: str) -> list[Any]:
    if not isinstance(returned, Iterable):
        raise TypeError(f"{method} returned {shorten(returned)}; return a list of records, which may be empty")
    return list(returned)


class AsyncStep(BlockStep):
    """`AsyncDataStream`'s operators: the calls of a block's records wait together."""

    def consumer(self, context: StepContext) -> Consumer:
        import asyncio

        calls: AsyncCalls = self.function
        loop = asyncio.new_event_loop()
        context.closing.append((context.where, loop))
        context.open(calls.function)

        def failed(error: BaseException, record: Any) -> Exception:
            return user_failure(error, context.where, calls.function.async_invoke, record)

        def consume(block: Block) -> None:
            out = Collector(context.copies)
            timestamps = block.timestamps or [None] * block.size
            loop.run_until_complete(
                calls.run(block.records(), lambda number, results: out.emit_all(results, timestamps[number]), failed)
            )
            for tag, emitted in out.blocks():
                context.send(tag, emitted)

        return consume
