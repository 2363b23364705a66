"""Runs a stream's new code beside the job of the old one, into tables of its own, and compares what both have written.

    <dir>/<pipeline>/shadow/<code>/begun.json       the savepoint of the old code's job that the new code began with
    <dir>/<pipeline>/shadow/<code>/start/           the savepoint's tables
    <dir>/<pipeline>/shadow/<code>/<pipeline>/      the checkpoint of the new code
    <dir>/<pipeline>/shadow/<code>/tables/<sink>/   what it writes
    <dir>/<pipeline>/shadow/<code>/rounds/{0,1}.json   how its tables compared the last time

The new code goes in rounds. In each it reads as far as the old code had read when the round began, and waits there, so
that the two can be compared. The old code's job knows nothing of it, but for the savepoint that it is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from dagster_unified.connectors.delta.sink import DeltaSink
from dagster_unified.connectors.files.sink import FileSink
from dagster_unified.connectors.protocol.commits import Epochs, Rewritten, SparkSink
from dagster_unified.connectors.protocol.positions import Position, Unread
from dagster_unified.engine.comparison import Compared, compare_new_code
from dagster_unified.engine.events import Observer, ignore_events
from dagster_unified.engine.positions import after, stopping, streamed_positions
from dagster_unified.engine.streaming.atomic import AlternatingFiles, write_atomically
from dagster_unified.engine.streaming.checkpoint import PATIENCE, CheckpointDirectory, Deployed
from dagster_unified.engine.streaming.desired import ask, read_desired
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.engine.streaming.savepoints.copy import discard
from dagster_unified.engine.streaming.savepoints.request import take
from dagster_unified.errors import ConfigurationError, SinkError, StateError, UnsupportedError
from dagster_unified.graph.nodes import Graph, SinkNode
from dagster_unified.graph.options import Configuration, Layer
from dagster_unified.graph.plan import Plan, plan
from dagster_unified.graph.upgrade import deployed_code, deployment_fingerprint
from dagster_unified.operators.time import wall_clock
from dagster_unified.storage.paths import children, is_local, read_whole, remove_tree

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from upath import UPath

FOLDER = "shadow"

MOST_ROWS = 1_000_000
"""Rows of a table that are compared. Once there are more, the new code begins anew, with a later savepoint."""

_FOLLOWS = 5.0
"""Seconds, after its interval, in which the old code takes the epoch that follows from a watermark, if there is one."""

_LOOKS = 3
"""How often tables are compared before a difference counts."""


class Begun(msgspec.Struct, frozen=True):
    """The point at which the new code began: of which deployment, and the last epoch of each query."""

    deployment: str
    timeline: int
    epochs: dict[str, int]


class Round(msgspec.Struct, frozen=True):
    """How the tables compared, by sink, and when: milliseconds since the epoch."""

    number: int
    at: int
    sinks: dict[str, Compared]

    @property
    def is_empty(self) -> bool:
        """Whether neither code has written a row that could be compared."""
        return not any(sink.rows or sink.different for sink in self.sinks.values())

    @property
    def is_equal(self) -> bool:
        """Whether some rows were compared, and none differ."""
        return not self.is_empty and all(sink.is_equal for sink in self.sinks.values())

    def describe(self) -> str:
        """Say how the tables compared."""
        return f"round {self.number}: " + "; ".join(f"{name}: {of.describe()}" for name, of in self.sinks.items())


def last_round(directory: CheckpointDirectory, code: str) -> Round | None:
    """Return how the tables of new code, by its fingerprint, compared the last time; None where they never were."""
    return _rounds(_folder(directory, code)).read()


def accept(directory: CheckpointDirectory, code: str, differences: bool = False) -> Round | None:
    """Let new code, by its fingerprint, take the place of the old code; return how its tables compared.

    Raises `ConfigurationError` where they were not compared yet, or differ, unless `differences` accepts that.
    """
    compared, deployed, name = last_round(directory, code), directory.deployed(), directory.path.name
    if deployed is not None and deployed.fingerprint == code:
        raise ConfigurationError(f"{name}: its job has this code; there is nothing to swap")
    if deployed is None:
        raise ConfigurationError(
            f"{name}: no job was started in {directory.path}, and there is nothing that new code could take the place"
            " of; start the pipeline"
        )
    if not differences and (compared is None or compared.is_empty):
        raise ConfigurationError(
            f"{name}: the new code has written nothing beside the old one yet, so that nobody knows whether their"
            " tables are equal; wait for a round with rows, or swap all the same with --accept-differences"
        )
    if not differences and compared is not None and not compared.is_equal:
        raise ConfigurationError(
            f"{name}: the tables of the new code are not equal to those of the old code. {compared.describe()}. Where"
            " they are meant to differ, swap with --accept-differences"
        )
    ask(directory, accepted=code, reason="swap")
    return compared


class Shadow:
    """New code beside the job of the old one."""

    def __init__(
        self,
        graph: Graph,
        options: Configuration,
        spark: Callable[[], SparkSession],
        owner: str,
        observe: Observer = ignore_events,
    ) -> None:
        """`options` are those with which the new code would be deployed; `owner` is the run or process it runs in."""
        self.plan = plan(graph, options)
        self.code = deployment_fingerprint(deployed_code(self.plan))
        self.directory = CheckpointDirectory(self.plan.execution.streaming.directory, self.plan.name)
        self._graph, self._options, self._spark, self._owner = graph, options, spark, owner
        self._observe = observe
        self._folder = _folder(self.directory, self.code)

    def is_deployed(self) -> bool:
        """Return whether the job has this very code."""
        deployed = self.directory.deployed()
        return deployed is not None and deployed.fingerprint == self.code

    def is_over(self) -> bool:
        """Return whether the new code has been accepted, or is that of the job by now."""
        return self.is_deployed() or read_desired(self.directory).accepted == self.code

    def remove(self) -> None:
        """Remove the tables and the state of the new code."""
        remove_tree(self._folder)

    def round(self, stopped: Callable[[], bool] = lambda: False) -> Round | None:
        """Let the new code read as far as the old code has, and compare their tables.

        Return None where the old code has read nothing yet, or `stopped` says so. Raises `StateError` where no job of
        the old code was ever started, and `UnsupportedError` where a source cannot be read by two jobs.
        """
        old = self._old()
        begun = self._begin(old)
        epochs = self._epochs(old)
        stops = self._stops(old, epochs)
        if stops is None:
            return None
        tables = _Tables.of(self._graph, self._folder, old)
        spark = self._spark()
        job = StreamingJob(self._planned(tables, stops), spark, Start(self._owner), self._observe)
        if job.run(stopped) == "stopped":
            return None
        compared = self._compare(old, begun, epochs, tables)
        last = _rounds(self._folder)
        before = last.open()
        found = Round(1 if before is None else before.number + 1, wall_clock(), compared)
        with suppress(FileExistsError):  # another process compares them at this moment: its round counts
            last.write(found)
        if any(sink.rows > MOST_ROWS for sink in compared.values()):
            self._forget()
        return found

    def _old(self) -> Deployed:
        deployed = self.directory.deployed()
        if deployed is None or not deployed.id or not self.directory.has_epoch():
            raise StateError(
                f"{self.plan.name}: no job was started in {self.directory.path}, and there is nothing that new code"
                " could run beside; start the pipeline first"
            )
        if deployed.finished:
            raise StateError(f"{self.plan.name}: the job in {self.directory.path} has come to the end of its input")
        known = {uid for uids in deployed.sources.values() for uid in uids}
        new = next((node for node in self.plan.graph.sources if node.uid not in known), None)
        if new is not None:
            raise UnsupportedError(
                f"{self.plan.name}: source '{new.name}' is new, and nothing says how far it is to be read beside the"
                " old code; upgrade without a shadow (upgrade_mode='savepoint')"
            )
        return deployed

    def _begin(self, old: Deployed) -> Begun:
        """Return the point at which the new code began; take a savepoint where it has not, or the old code went back.

        The copy of the checkpoint goes: the new code starts from the savepoint's tables.
        """
        begun = _read_begun(self._folder)
        if begun is not None and (begun.deployment, begun.timeline) == (old.id, old.timeline):
            return begun
        self._remove_abandoned()
        self._forget()
        start = str(self._folder / "start")
        taken = take(self.plan, self.directory, self._owner, "for new code beside it", self._spark, start)
        discard(self.directory, taken.savepoint.name)
        if taken.error:
            raise StateError(f"{self.plan.name}: the tables of the savepoint could not be written: {taken.error}")
        begun = Begun(old.id, old.timeline, taken.savepoint.epochs)
        write_atomically(self._folder / "begun.json", msgspec.json.encode(begun))
        return begun

    def _remove_abandoned(self) -> None:
        """Remove what other code has left that ran beside the job, and runs no more."""
        for name in children(self._folder.parent):
            holder = CheckpointDirectory(str(self._folder.parent / name), self.plan.name).holder()
            if name != self.code and not (holder is not None and holder.is_alive(PATIENCE)):
                remove_tree(self._folder.parent / name)

    def _forget(self) -> None:
        """Let the new code begin anew the next time; how its tables compared stays known."""
        for part in ("begun.json", "start", "tables", self.plan.name):
            remove_tree(self._folder / part)

    def _epochs(self, old: Deployed) -> dict[str, int]:
        last = {query: self.directory.last_epoch(query) for query in old.sources}
        return {query: epoch for query, epoch in last.items() if epoch is not None}

    def _stops(self, old: Deployed, epochs: Mapping[str, int]) -> dict[str, Position] | None:
        """Return the position of the old code in each source at some epochs, by uid; None where one was not read."""
        planned = self.plan
        if old.start:
            planned = after(planned, self.directory.positions(), ignore_unclaimed=True)
        stops: dict[str, Position] = {}
        for query, epoch in epochs.items():
            stops |= streamed_positions(planned, self.directory.path / "spark" / query, old.sources[query], epoch)
        wanted = {node.uid for node in planned.graph.sources}
        is_read = all(not isinstance(stops.get(uid, Unread()), Unread) for uid in wanted)
        return {uid: stops[uid] for uid in wanted} if is_read else None

    def _planned(self, tables: _Tables, stops: Mapping[str, Position]) -> Plan:
        """Return the plan of a round: up to the stops, with the new code's state in its own folder."""
        own = {
            "execution.checkpointing.dir": str(self._folder),
            "execution.state-recovery.path": str(self._folder / "start"),
            "execution.savepoint.path": str(self._folder / "unused"),
        }
        planned = plan(stopping(tables.graph, stops), self._options.under(Layer("shadow", own)))
        execution = planned.execution
        savepoint = replace(execution.savepoint, path=None, interval=None)  # its checkpoint is enough to go on from
        streaming = replace(execution.streaming, interval=None)
        return replace(planned, execution=replace(execution, savepoint=savepoint, streaming=streaming))

    def _compare(self, old: Deployed, begun: Begun, epochs: Mapping[str, int], tables: _Tables) -> dict[str, Compared]:
        def written(node: SinkNode, until: Mapping[str, int]) -> Rewritten:
            assert isinstance(node.sink, SparkSink)
            of = Epochs(self.plan.name, node.uid, old.id, old.timeline, begun.epochs, until)
            return node.sink.rewritten(of, self._graph.written_to(node.id))

        compared = {name: Compared(0, not_compared=why) for name, why in tables.not_compared.items()}
        seen: dict[str, list[Rewritten]] = {}
        """What the old code had written by then, and a little later."""

        open_ = dict(tables.moved)
        for _ in range(_LOOKS):
            until = self._followed(epochs)
            for name, (node, moved) in list(open_.items()):
                try:
                    seen[name] = [*(seen.get(name) or [written(node, epochs)]), written(node, until)]
                except (UnsupportedError, SinkError) as error:
                    compared[name] = Compared(0, not_compared=str(error))
                    del open_[name]
                    continue
                records = self._graph.written_to(node.id)
                new = moved.dataset(records).to_table() if moved.exists() else records.schema.empty_table()
                compared[name] = compare_new_code(new, seen[name][0], seen[name][1:], moved.key)
                if compared[name].is_equal:
                    del open_[name]
            if not open_:
                break
        return {node.name: compared[node.name] for node in self._graph.sinks}

    def _followed(self, epochs: Mapping[str, int]) -> dict[str, int]:
        """Return the last epochs of the old code, once each query has had one more, or has had time for it."""
        interval = self.plan.execution.streaming.interval
        deadline = time.monotonic() + _FOLLOWS + (interval.total_seconds() if interval else 0.0)
        while True:
            last = {query: max(self.directory.last_epoch(query) or 0, epoch) for query, epoch in epochs.items()}
            if time.monotonic() >= deadline or all(last[query] > epoch for query, epoch in epochs.items()):
                return last
            time.sleep(0.1)


@dataclass(frozen=True)
class _Tables:
    """The graph of the new code with its sinks in places of their own."""

    graph: Graph
    moved: Mapping[str, tuple[SinkNode, SparkSink[Any, Any]]]
    """The sinks that are compared, by name: as they are, and as they write beside."""

    not_compared: Mapping[str, str]
    """Why the others are not."""

    @classmethod
    def of(cls, graph: Graph, folder: UPath, old: Deployed) -> _Tables:
        nodes, moved, not_compared = list(graph.nodes), {}, {}
        for node in graph.sinks:
            place = str(folder / "tables" / node.uid)
            sink = node.sink.elsewhere(place) if isinstance(node.sink, SparkSink) else None
            if sink is None:
                sink = FileSink(place, node.name) if is_local(folder) else DeltaSink(place, node.name, mode="append")
                not_compared[node.name] = f"{node.sink.describe()} cannot be read back; its rows are in {place}"
            elif node.uid not in old.code:
                not_compared[node.name] = "it is new"
            else:
                moved[node.name] = node, sink
            nodes[node.id] = replace(node, sink=sink)
        return cls(replace(graph, nodes=tuple(nodes)), moved, not_compared)


def _folder(directory: CheckpointDirectory, code: str) -> UPath:
    return directory.path / FOLDER / code


def _rounds(folder: UPath) -> AlternatingFiles[Round]:
    return AlternatingFiles(folder / "rounds", Round, lambda compared: compared.number)


def _read_begun(folder: UPath) -> Begun | None:
    try:
        return msgspec.json.decode(read_whole(folder / "begun.json"), type=Begun)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
