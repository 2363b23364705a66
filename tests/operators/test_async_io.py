"""Asynchronous calls: their order, how many at once, what becomes of slow and failing ones."""

import asyncio
import gc
from collections.abc import Iterable
from datetime import timedelta

import pytest

from dagster_unified.api import (
    AsyncDataStream,
    AsyncFunction,
    AsyncRetryStrategy,
    Pipeline,
    ProcessFunction,
    WatermarkStrategy,
)
from dagster_unified.errors import PipelineError, RecordTypeError, UserFunctionError
from dagster_unified.testing import Shared, run_pipeline
from tests.support import MODES

SECOND = timedelta(seconds=1)


RUNNING, MOST = Shared(0), Shared(0)


class Lookup(AsyncFunction):
    """Answers once all that were asked before and at once have been asked: nothing here waits for time to pass."""

    def open(self, context):
        self.opened = True

    async def async_invoke(self, value: int) -> Iterable[str]:
        assert self.opened
        RUNNING.value += 1
        MOST.value = max(MOST.value, RUNNING.value)
        for _ in range(10 - value):
            await asyncio.sleep(0)
        RUNNING.value -= 1
        return [f"{value}"] * (value % 3)


def looked_up(wait, mode, records=range(10), function=None, **how):
    pipeline = Pipeline("p")
    wait(pipeline.from_collection(list(records)), function or Lookup(), how.pop("timeout", SECOND), **how).print()
    return run_pipeline(pipeline, mode).only()


ANSWERS = [str(n) for n in range(10) for _ in range(n % 3)]


@MODES
def test_ordered_results_come_in_the_order_of_their_records(mode):
    assert looked_up(AsyncDataStream.ordered_wait, mode) == ANSWERS


def test_unordered_results_come_as_they_are_ready():
    found = looked_up(AsyncDataStream.unordered_wait, "BATCH")
    assert sorted(found) == ANSWERS
    assert found != ANSWERS
    assert sorted(looked_up(AsyncDataStream.unordered_wait, "STREAMING")) == ANSWERS


@pytest.mark.parametrize("capacity", [1, 3])
def test_no_more_calls_than_the_capacity_run_at_once(capacity):
    MOST.value = 0
    looked_up(AsyncDataStream.unordered_wait, "BATCH", capacity=capacity)
    assert MOST.value == capacity


class Slow(AsyncFunction):
    async def async_invoke(self, value: int) -> list[str]:
        if value == 2:
            await asyncio.Event().wait()
        return [f"{value}"]


class Patient(Slow):
    def timeout(self, value):
        return [f"no answer for {value}"]


@MODES
def test_a_call_that_takes_too_long_gives_what_timeout_gives_or_fails(mode):
    short = timedelta(milliseconds=20)
    assert looked_up(AsyncDataStream.ordered_wait, mode, [1, 2, 3], Patient(), timeout=short) == [
        "1",
        "no answer for 2",
        "3",
    ]
    with pytest.raises(UserFunctionError, match=r"operator 'Slow': TimeoutError: no answer in time; .* on 2"):
        looked_up(AsyncDataStream.ordered_wait, mode, [1, 2, 3], Slow(), timeout=short)


class Failing(AsyncFunction):
    async def async_invoke(self, value: int) -> list[int]:
        await asyncio.sleep(0)
        return [1 // value]


@MODES
def test_a_call_that_fails_names_its_record(mode):
    with pytest.raises(UserFunctionError, match=r"operator 'Failing': ZeroDivisionError: .* in async_invoke, on 0"):
        looked_up(AsyncDataStream.unordered_wait, mode, [1, 0, 2], Failing())


class Refused(AsyncFunction):
    async def async_invoke(self, value: int) -> list[str]:
        raise TimeoutError("the service refuses")

    def timeout(self, value: int) -> list[str]:
        return ["no answer in time"]


@MODES
def test_an_error_of_the_call_is_no_timeout_of_the_operator(mode):
    with pytest.raises(UserFunctionError, match=r"TimeoutError: the service refuses, at .* in async_invoke, on 1"):
        looked_up(AsyncDataStream.ordered_wait, mode, [1], Refused())


class InFlight(AsyncFunction):
    def __init__(self):
        self.ended = []

    async def async_invoke(self, value: int) -> list[int]:
        try:
            await asyncio.sleep(value)
            return [1 // value]
        finally:
            self.ended.append(value)

    def close(self):
        assert sorted(self.ended) == [0, 8, 9]


def test_calls_under_way_end_before_the_function_is_closed():
    with pytest.raises(UserFunctionError, match="ZeroDivisionError"):
        looked_up(AsyncDataStream.ordered_wait, "BATCH", [8, 0, 9], InFlight(), timeout=timedelta(hours=1))


class Plain(AsyncFunction):
    def async_invoke(self, value: int) -> list[int]:
        return [value]


class One(AsyncFunction):
    async def async_invoke(self, value: int) -> list[int]:
        return value


class Nothing(AsyncFunction):
    async def async_invoke(self, value: int) -> list[int]:
        pass


class Generator(AsyncFunction):
    async def async_invoke(self, value: int) -> list[int]:
        yield value


class Cancelled(AsyncFunction):
    async def async_invoke(self, value: int) -> list[int]:
        await asyncio.sleep(0)
        raise asyncio.CancelledError("the pool is closed")


class LongWaiting(AsyncFunction):
    async def async_invoke(self, value: int) -> list[int]:
        await asyncio.sleep(9 * value)
        return [1 // value]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (Plain(), r"async_invoke returned \[0\], which cannot be awaited; write `async def`, on 0"),
        (One(), "async_invoke returned 0; return a list of records, which may be empty, on 0"),
        (Nothing(), "async_invoke returned None; return a list of records, which may be empty, on 0"),
        (Generator(), "async_invoke has a `yield`, and gives all results at once; return a list of records, on 0"),
        (Cancelled(), r"CancelledError: the pool is closed, at .*test_async_io.*, on [012]"),
        (LongWaiting(), "ZeroDivisionError"),
    ],
)
def test_a_call_that_gives_something_else_says_so_and_nothing_else_is_said(function, message, capfd):
    with pytest.raises(UserFunctionError, match=message):
        looked_up(AsyncDataStream.unordered_wait, "BATCH", [0, 1, 2], function)
    gc.collect()
    assert capfd.readouterr() == ("", "")


class Moment(ProcessFunction):
    def process_element(self, value, ctx) -> Iterable[tuple[str, int]]:
        yield (value, ctx.timestamp())


@MODES
def test_results_have_the_event_time_of_their_record(mode):
    pipeline = Pipeline("p")
    at = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(lambda v: v * 10)
    stream = pipeline.from_collection([1, 3, 4]).assign_timestamps_and_watermarks(at)
    AsyncDataStream.unordered_wait(stream, Lookup(), SECOND).process(Moment()).print()
    assert sorted(run_pipeline(pipeline, mode).only()) == [("1", 10), ("4", 40)]


class Untyped(AsyncFunction):
    async def async_invoke(self, value):
        return [value]


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"capacity": 0}, PipelineError, "the capacity must be a whole number of at least 1"),
        ({"capacity": "5"}, PipelineError, "the capacity must be a whole number of at least 1, not '5'"),
        ({"timeout": 5}, PipelineError, "the timeout is a timedelta, not 5"),
        ({"timeout": timedelta(0)}, PipelineError, "the timeout has to be at least 1 ms"),
        ({"function": Untyped()}, RecordTypeError, "'Untyped' has no output type"),
        ({"function": len}, PipelineError, "expected an AsyncFunction"),
    ],
)
def test_what_cannot_be_is_an_error_when_the_graph_is_built(how, error, message):
    with pytest.raises(error, match=message):
        looked_up(AsyncDataStream.ordered_wait, "BATCH", **how)


class Flaky(AsyncFunction):
    """Raises at the first two calls for a record, has no answer at the third, and then one."""

    def open(self, context):
        self.calls = {}

    async def async_invoke(self, value: int) -> list[str]:
        call = self.calls[value] = self.calls.get(value, 0) + 1
        if call < 3:
            raise ConnectionError("busy")
        return [] if call == 3 else [f"{value} after {call}"]


def empty(results):
    return not results


@pytest.mark.parametrize("wait", [AsyncDataStream.ordered_wait_with_retry, AsyncDataStream.unordered_wait_with_retry])
def test_a_call_is_made_again_until_it_gives_a_result(wait):
    strategy = AsyncRetryStrategy.fixed_delay(4, timedelta(0), result_predicate=empty)
    found = looked_up(wait, "BATCH", [1, 2], Flaky(), async_retry_strategy=strategy)
    assert sorted(found) == ["1 after 4", "2 after 4"]


def test_the_results_of_the_last_attempt_are_taken_and_its_error_fails_the_run():
    wait = AsyncDataStream.ordered_wait_with_retry
    three = AsyncRetryStrategy.fixed_delay(3, timedelta(0), result_predicate=empty)
    assert looked_up(wait, "STREAMING", [1], Flaky(), async_retry_strategy=three) == []
    with pytest.raises(UserFunctionError, match="busy"):
        looked_up(wait, "BATCH", [1], Flaky(), async_retry_strategy=AsyncRetryStrategy.fixed_delay(2, timedelta(0)))


def test_an_error_that_the_strategy_does_not_name_is_not_retried():
    strategy = AsyncRetryStrategy.fixed_delay(5, timedelta(0), exception_predicate=lambda e: isinstance(e, ValueError))
    with pytest.raises(UserFunctionError, match="busy"):
        looked_up(AsyncDataStream.ordered_wait_with_retry, "BATCH", [1], Flaky(), async_retry_strategy=strategy)


def test_a_strategy_without_an_attempt_is_refused():
    with pytest.raises(PipelineError, match="max_attempts must be a whole number of at least 1, not 0"):
        AsyncRetryStrategy.fixed_delay(0, SECOND)
