"""A Spark job for each order, in a thread of its own: where tasks cannot stay, and subtasks do not wait for each other.

Knows jobs and bytes; neither epochs nor commits.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING
from uuid import uuid4

from dagster_unified.engine.interrupts import JobTag

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SeparateJobs:
    """Jobs that run at once; `carry_out(number, order)` runs one and returns its answer."""

    def __init__(self, spark: SparkSession, carry_out: Callable[[int, bytes], bytes]) -> None:
        self._spark, self._carry_out = spark, carry_out
        self._tag = JobTag(spark, f"rounds-{uuid4().hex}")
        self._ended: SimpleQueue[tuple[int, bytes | BaseException]] = SimpleQueue()
        self._threads: dict[int, Thread] = {}

    def give(self, number: int, order: bytes) -> None:
        """Has an order carried out."""
        from pyspark import InheritableThread

        self._threads[number] = InheritableThread(
            target=self._run, session=self._spark, args=(number, order), name=f"rounds-{number}", daemon=True
        )
        self._threads[number].start()

    def _run(self, number: int, order: bytes) -> None:
        try:
            self._tag.add()
            self._ended.put((number, self._carry_out(number, order)))
        except BaseException as error:
            self._ended.put((number, error))

    def answered(self) -> tuple[int, bytes]:
        """Waits for the next order that is carried out: its number, and the answer. Raises what its job fails with."""
        number, answer = self._ended.get()
        if isinstance(answer, BaseException):
            raise answer
        return number, answer

    def close(self, failed: bool = False) -> None:
        """Waits for the jobs that still run; they are cancelled where something has `failed`."""
        for thread in self._threads.values():
            if failed:
                self._tag.cancel_until_over(thread)
            thread.join()
