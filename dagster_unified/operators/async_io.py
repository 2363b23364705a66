"""Calls that are waited for: many requests at once from one worker, such as lookups in a service (Flink: *Async I/O*)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from dagster_unified.operators.functions import Function
from dagster_unified.operators.type_variables import In, Out


class AsyncFunction(Function, ABC, Generic[In, Out]):
    """One record in, any number out, once what was asked for has come."""

    @abstractmethod
    async def async_invoke(self, value: In) -> Iterable[Out]:
        """The records that `value` becomes. Other records' calls run meanwhile, wherever this one awaits."""

    def timeout(self, value: In) -> Iterable[Out]:
        """What a record becomes whose call takes too long; unless overridden, it fails the run."""
        raise TimeoutError("no answer in time; give a longer timeout, or override timeout(value)")


@dataclass(frozen=True)
class AsyncCalls:
    """An `AsyncFunction` and how it is called: at most `capacity` at once, each for `timeout` seconds at most."""

    function: AsyncFunction[Any, Any]
    timeout: float
    capacity: int
    ordered: bool

    @property
    def wrapped_functions(self) -> tuple[Any, ...]:
        """The author's."""
        return (self.function,)

    async def run(self, records: Sequence[Any], emit: Callable[[int, Iterable[Any]], None], failed: Callable[[Exception, Any], Exception]) -> None:
        """Calls the function for all records; `emit` gets a record's number and its results, in their order or as they come."""
        import asyncio  # takes long to import, and a pipeline is built without it

        waiting = iter(range(len(records)))
        results: list[list[Any] | None] = [None] * len(records)

        async def caller() -> None:
            for number in waiting:
                found = await self._call(records[number], failed)
                if self.ordered:
                    results[number] = found
                else:
                    emit(number, found)

        callers = [asyncio.ensure_future(caller()) for _ in range(min(self.capacity, len(records)))]
        try:
            await asyncio.gather(*callers)
        finally:
            for one in callers:
                one.cancel()
        if self.ordered:
            for number, kept in enumerate(results):
                emit(number, kept or ())

    async def _call(self, record: Any, failed: Callable[[Exception, Any], Exception]) -> list[Any]:
        import asyncio

        try:
            try:
                return list(await asyncio.wait_for(self.function.async_invoke(record), self.timeout))
            except TimeoutError:
                return list(self.function.timeout(record))
        except Exception as error:
            raise failed(error, record) from error
