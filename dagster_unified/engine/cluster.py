"""Watches the cluster of a classic session: which executors it has lost, and whether its master is there.

Spark runs the tasks of a lost executor again, and goes on without a master, so that nothing else says it. Executors are
asked of Spark's own records, which it keeps whether it serves its pages or not. Knows Spark's JVM; not what runs there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event
from typing import TYPE_CHECKING, Any

from dagster_unified.engine.events import ExecutorLost, MasterAway, MasterBack, Observer
from dagster_unified.engine.interrupts import meanwhile
from dagster_unified.engine.session import master_away
from dagster_unified.storage.object_store import is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EVERY = 1.0
"""Seconds between two looks at the executors: one call of the JVM, however many there are."""

MASTER_EVERY = 5.0
"""Seconds between two looks at the master, which is away where it is so twice in a row."""

_ASKED_FOR = "Executor killed by driver"
"""Why Spark removes an executor that dynamic allocation needs no more."""

_UNTOLD = 5
"""Polls to wait for a reason before a lost executor is reported without one."""


@contextmanager
def watching(spark: SparkSession, observe: Observer) -> Iterator[None]:
    """Report, in a thread until the end of the context, what the cluster loses.

    Nothing happens in a session on one machine, nor in one of Spark Connect, whose server alone knows its executors.
    """
    if is_connect(spark) or (spark.sparkContext.master or "").startswith("local"):
        yield
        return
    watch = _Watch(spark, observe)

    def look(done: Event) -> None:
        while not done.wait(EVERY):
            watch.look()
        watch.look(last=True)

    with meanwhile(look, "watching the cluster"):
        yield


class _Watch:
    """The state of the cluster at the last look."""

    def __init__(self, spark: SparkSession, observe: Observer) -> None:
        self._spark, self._observe = spark, observe
        self._executors_there: set[str] = set()
        with suppress(Exception):  # whoever runs on it says that the session has ended
            self._executors_there = self._executors()
        self._untold: dict[str, int] = {}
        """Executors that are gone, and for how many looks Spark's records have said nothing of them."""

        self._away = 0
        self._asked = time.monotonic()

    def look(self, last: bool = False) -> None:
        """Report what was lost since the last look; the `last` look also reports losses without a known reason."""
        with suppress(Exception):
            self._look_for_executors(last)
        master = self._spark.sparkContext.master or ""
        if master.startswith("spark://") and time.monotonic() - self._asked >= MASTER_EVERY:
            self._look_for_master(master)
            self._asked = time.monotonic()

    def _look_for_executors(self, last: bool) -> None:
        now = self._executors()
        self._untold |= dict.fromkeys(self._executors_there - now, 0)
        self._executors_there = now
        if not self._untold:
            return
        removed = self._removed(set(self._untold))
        for address, looks in list(self._untold.items()):
            if address not in removed and looks < _UNTOLD and not last:
                self._untold[address] += 1
                continue
            del self._untold[address]
            executor, reason = removed.get(address, ("", ""))
            if not reason.startswith(_ASKED_FOR):
                host = address.rpartition(":")[0]
                self._observe(ExecutorLost(executor, host, reason, len(now) - 1))  # without the driver

    def _look_for_master(self, master: str) -> None:
        reason = master_away(master)
        if reason is None:
            if self._away > 1:
                self._observe(MasterBack(master))
            self._away = 0
            return
        self._away += 1
        if self._away == 2:
            self._observe(MasterAway(master, reason))

    def _executors(self) -> set[str]:
        """Return the addresses of the present executors, and the driver's."""
        return set(str(self._scala().getExecutorMemoryStatus().keys().mkString(",")).split(","))

    def _removed(self, addresses: set[str]) -> dict[str, tuple[str, str]]:
        """Return the number of each lost executor at one of the addresses, and the first sentence of its reason."""
        removed = {}
        known = self._scala().statusStore().executorList(False)
        for number in range(known.size()):
            executor = known.apply(number)
            if executor.hostPort() in addresses and not executor.isActive():
                reason = executor.removeReason()
                text = str(reason.get()) if reason.isDefined() else ""
                removed[str(executor.hostPort())] = (str(executor.id()), text.split(". ")[0].strip().rstrip("."))
        return removed

    def _scala(self) -> Any:
        java_context: Any = self._spark.sparkContext._jsc
        return java_context.sc()
