"""Iterations: loops inside a pipeline (FLIP-176).

A body is built once, from streams that stand for its variables and its data, and returns streams: what is fed back to
the variables for the next epoch, what leaves the loop, and what decides when it ends. Use it as a module:
`from dagster_unified.api import iterations`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import Any, Literal, TypeAlias

import pyarrow as pa

from dagster_unified.api.building import GraphBuilder, Upstream, type_argument
from dagster_unified.api.stream import DataStream, KeyedStream, UntypedStream
from dagster_unified.errors import PipelineError, RecordTypeError, UnsupportedError
from dagster_unified.graph import nodes
from dagster_unified.graph.connectors import Boundedness
from dagster_unified.graph.iterations import check_staleness
from dagster_unified.graph.nodes import (
    ExchangeKind,
    Graph,
    HeadNode,
    IterationNode,
    Key,
    LifeCycle,
    Naming,
    Node,
    Role,
    TailNode,
    output_tag,
)
from dagster_unified.graph.operator_state import check_operator_state
from dagster_unified.operators.arrow_aggregate import CombineColumns, CombineRecords, Kind
from dagster_unified.operators.deltas import SOLUTION, WORK, Sided, Solutions, rows_type
from dagster_unified.operators.functions.base import OutputTag, ReduceFunction
from dagster_unified.operators.functions.iterations import (
    AllReduce,
    BatchDeltaFunction,
    DeltaFunction,
    EpochCollector,
    EpochContext,
    ForwardInputsOfLastRound,
    IterationListener,
    TerminateOnMaxIter,
    TerminateOnMaxIterOrTol,
    hears_of_epochs,
    iteration_listeners,
)
from dagster_unified.operators.functions.type_variables import K, S, T
from dagster_unified.records import RecordType, record_type, type_name
from dagster_unified.values import check_count, is_count

__all__ = [
    "BatchDeltaFunction",
    "DeltaFunction",
    "EpochCollector",
    "EpochContext",
    "IterationBody",
    "IterationBodyResult",
    "IterationConfig",
    "IterationListener",
    "ReplayableDataStreams",
    "TerminateOnMaxIter",
    "TerminateOnMaxIterOrTol",
    "all_reduce",
    "combine",
    "for_each_round",
    "forward_inputs_of_last_round",
    "iterate_bounded_streams_until_termination",
    "iterate_delta",
    "iterate_unbounded_streams",
]


Combiner: TypeAlias = Callable[[T, T], T] | ReduceFunction[T] | Mapping[str, Kind]
"""How records of a key are reduced to one: by a function of two of them, or column by column."""


@dataclass(frozen=True)
class ReplayableDataStreams:
    """The data of an iteration (FLIP-176). In the body the replayed streams come first, in their order.

    Records of `not_replayed` streams come once, in the first epoch. Those of `replayed` streams come again in every
    round: they are partitioned once, and read from where they lie.
    """

    replayed: Sequence[DataStream[Any]] = ()
    not_replayed: Sequence[DataStream[Any]] = ()


@dataclass(frozen=True)
class IterationConfig:
    """How an iteration runs (FLIP-176).

    `operator_life_cycle` is ALL_ROUND, where operators and their state live over all epochs, or PER_ROUND, where each
    epoch has new ones, whose input ends with the epoch. `parallelism` is the number of subtasks of the body; without it
    `parallelism.default` decides, or Spark. `name` is what plans, stages and errors call the iteration, by default the
    class of its body.

    `staleness` is how many epochs a subtask may lead the slowest one (Flink paper, 5.3). With 0 the iteration is
    bulk-synchronous: each epoch waits for all subtasks. With k a subtask takes its own feedback in the next epoch, and
    that of others k epochs later, so it waits only where it would lead by more than k. An epoch is committed when all
    have ended it. Use it for bodies whose result does not depend on when records arrive, with no exchange but the
    feedback. Without criteria the iteration may go on for k epochs more than it needs.
    """

    operator_life_cycle: Literal["ALL_ROUND", "PER_ROUND"] = "ALL_ROUND"
    parallelism: int | None = None
    name: str | None = None
    uid: str | None = None
    staleness: int = 0

    def __post_init__(self) -> None:
        if self.operator_life_cycle not in LifeCycle.__members__:
            known = " or ".join(LifeCycle.__members__)
            raise PipelineError(f"IterationConfig: operator_life_cycle is {known}, not {self.operator_life_cycle!r}")
        if self.parallelism is not None:
            check_count("IterationConfig: parallelism", self.parallelism)
        if not is_count(self.staleness, 0):
            raise PipelineError(
                "IterationConfig: staleness is how many epochs a subtask may be ahead, 0 or more, not"
                f" {self.staleness!r}"
            )
        for what, text in (("name", self.name), ("uid", self.uid)):
            if text is not None and not (isinstance(text, str) and text):
                raise PipelineError(f"IterationConfig: {what} is a text that is not empty, not {text!r}")


@dataclass(frozen=True)
class IterationBodyResult:
    """The streams that a body returns (FLIP-176).

    `feedback` has a stream for each variable, of its type and key, whose records are the variable's in the next epoch.
    `outputs` leave the iteration. `termination_criteria` ends it after an epoch in which it has no record; the
    iteration also ends after an epoch in which nothing was fed back.
    """

    feedback: Sequence[DataStream[Any]]
    outputs: Sequence[DataStream[Any]]
    termination_criteria: DataStream[Any] | None = None


class IterationBody(ABC):
    """Builds the body of an iteration (FLIP-176).

    `process` is called once, while the graph is built. It may use the streams that it is given, and no others.
    """

    @abstractmethod
    def process(self, variables: Sequence[DataStream[Any]], data: Sequence[DataStream[Any]]) -> IterationBodyResult:
        """The streams of the body, from those that stand for the variables and the data."""


def iterate_bounded_streams_until_termination(
    variables: Sequence[DataStream[Any]],
    data: Sequence[DataStream[Any]] | ReplayableDataStreams,
    body: IterationBody,
    config: IterationConfig = IterationConfig(),  # frozen
) -> list[DataStream[Any]]:
    """Runs a body epoch by epoch over bounded streams, and returns its outputs: what each of them had in all epochs.

    Initial variables and data belong to epoch 0, and what is fed back to the epoch after that of the records that
    caused it. The iteration ends after an epoch in which the termination criteria, where there are
    any, had no record, or in which nothing was fed back; listeners are told that it has.

    In BATCH the whole iteration is a part of one stage. Each epoch is committed, and a stage that is retried, or
    re-executed from its failure, goes on after the last epoch that was. In STREAMING the iteration keeps what comes in,
    and goes round when its input has ended, as in BATCH; a job that is started again goes on after the last epoch.

    `variables` and `data` may be keyed, and are then keyed in the body as well. In it run `map`, `flat_map`, `filter`,
    `map_batches`, `process`, keyed functions with state, connected and broadcast streams, and `reduce`; windows, joins
    and `co_group` in PER_ROUND operators. FLIP-176: `Iterations.iterateBoundedStreamsUntilTermination`.

    Raises `PipelineError` where the body is not one that can run.

    Examples:
        >>> class Collatz(iterations.IterationBody):
        ...     def process(self, variables, data):
        ...         numbers = variables[0].filter(lambda n: n > 1)
        ...         following = numbers.map(lambda n: n // 2 if n % 2 == 0 else 3 * n + 1, int)
        ...         return iterations.IterationBodyResult(feedback=[following], outputs=[following])
        >>> (visited,) = iterations.iterate_bounded_streams_until_termination([numbers], [], Collatz())
        >>> sorted(collect(visited))
        [1, 1, 2, 4, 5, 8, 10, 16]
    """
    streams = data if isinstance(data, ReplayableDataStreams) else ReplayableDataStreams(not_replayed=data)
    return _Builder(variables, streams, body, config, bounded=True).build()


def iterate_unbounded_streams(
    variables: Sequence[DataStream[Any]],
    data: Sequence[DataStream[Any]],
    body: IterationBody,
    config: IterationConfig = IterationConfig(),  # frozen
) -> list[DataStream[Any]]:
    """Runs a body over streams that need not end, and returns its outputs: what each of them has in all epochs.

    In STREAMING an epoch has what has come in since the epoch before, and what that fed back, so that an epoch of the
    job has at least one of the iteration where there is either. A model is a variable, and samples are data. The
    iteration goes on for as long as its input does, and then until nothing is fed back; listeners are told when it has
    ended. What is fed back and the state of the body are in the job's checkpoint, committed epoch by epoch. In BATCH
    the first epoch has all of the input, and it ends when nothing is fed back.

    In both modes a record that comes in belongs to the epoch that takes it. (In Flink ML it belongs to epoch 0, so that
    no epoch ends before the input does.) So it depends on when records come which of them are in an epoch together;
    where it may not, use a body that gives the same for any order.

    There are no criteria, and no data that is replayed. Otherwise bodies are those of
    `iterate_bounded_streams_until_termination`. FLIP-176: `Iterations.iterateUnboundedStreams`.

    Raises `PipelineError` where the body is not one that can run.

    Examples:
        >>> class Collatz(iterations.IterationBody):
        ...     def process(self, variables, data):
        ...         following = variables[0].map(lambda n: n // 2 if n % 2 == 0 else 3 * n + 1, int)
        ...         return iterations.IterationBodyResult([following.filter(lambda n: n > 1)], [following])
        >>> (visited,) = iterations.iterate_unbounded_streams([numbers], [], Collatz())
        >>> sorted(collect(visited))
        [1, 1, 1, 2, 2, 4, 4, 5, 8, 10, 16]
    """
    if isinstance(data, ReplayableDataStreams):
        raise PipelineError(
            "iterate_unbounded_streams: data that does not end cannot be replayed; give a list of streams, and keep in"
            " state what later epochs need"
        )
    return _Builder(variables, ReplayableDataStreams(not_replayed=data), body, config, bounded=False).build()


def for_each_round(
    inputs: Sequence[DataStream[Any]],
    sub_body: Callable[[Sequence[DataStream[Any]]], Sequence[DataStream[Any]]],
) -> list[DataStream[Any]]:
    """Runs a part of an ALL_ROUND body with operators that live for one epoch, whose input ends with it.

    So `reduce`, windows, joins and `co_group` give their results at the end of each epoch. FLIP-176:
    `IterationBody.forEachRound`.

    Examples:
        >>> class Doubling(iterations.IterationBody):
        ...     def process(self, variables, data):
        ...         def totals(inputs):
        ...             return [inputs[0].key_by(lambda n: 0, key_type=int).reduce(lambda a, b: a + b)]
        ...         (total,) = iterations.for_each_round(variables, totals)
        ...         more = total.filter(lambda n: n < 20).flat_map(lambda n: [n, n], int)
        ...         return iterations.IterationBodyResult(feedback=[more], outputs=[total])
        >>> collect(iterations.iterate_bounded_streams_until_termination([numbers], [], Doubling())[0])
        [6, 12, 24]
    """
    builder = inputs[0]._pipeline if inputs else None
    if not isinstance(builder, _BodyBuilder):
        raise PipelineError("for_each_round: give it streams of an iteration's body, in the body's process(...)")
    with builder.each_round():
        outputs = sub_body(inputs)
    _check_streams(builder.name, "what the sub-body of for_each_round returns", outputs)
    for stream in outputs:
        builder.check_own(stream, "for_each_round")
    return list(outputs)


def all_reduce(stream: DataStream[T], function: Callable[[T, T], T]) -> DataStream[T]:
    """Reduces the records of each epoch to one, at the epoch's end; `broadcast()` brings it to all subtasks.

    `function` is associative and commutative. Each subtask reduces its own records first. An epoch without records has
    no result. Flink ML: `DataStreamUtils.allReduceSum`.
    """
    records = stream._records("all_reduce").python
    partly = stream.flat_map(AllReduce(function), records).name("reduce")
    return partly.global_().flat_map(AllReduce(function), records).name("all reduce")


def combine(stream: KeyedStream[K, T], how: Combiner[T]) -> DataStream[T]:
    """Reduces what a subtask has for each key in an epoch to one record, at the epoch's end, before it is sent.

    `how` is an associative and commutative function of two records of a key, or says of each column beside the key
    what becomes of it: `{"distance": "min", "count": "sum"}`, which is computed on Arrow columns. The result is not
    keyed, and in another subtask the same key may have another record: behind a `key_by` reduce them again. Use it
    where many small messages go to few keys. Hadoop: combiner.

    Examples:
        >>> class Thirds(iterations.IterationBody):
        ...     def process(self, variables, data):
        ...         sums = iterations.combine(variables[0].key_by("shop"), {"amount": "sum", "at": "min"})
        ...         smaller = sums.map(lambda sale: sale._replace(amount=sale.amount // 3), Sale)
        ...         return iterations.IterationBodyResult([smaller.filter(lambda sale: sale.amount > 0)], [sums])
        >>> config = iterations.IterationConfig(parallelism=1)
        >>> (sums,) = iterations.iterate_bounded_streams_until_termination([sales], [], Thirds(), config)
        >>> sorted((sale.shop, sale.amount) for sale in collect(sums))
        [('north', 2), ('north', 8), ('south', 1), ('south', 4)]
    """
    if isinstance(stream, UntypedStream):
        return stream
    if not isinstance(stream, KeyedStream):
        raise PipelineError("combine: it reduces the records of each key; call key_by on the stream before")
    return _combined(stream, stream._records("combine"), stream._key_selector, how)


def forward_inputs_of_last_round(stream: DataStream[T]) -> DataStream[T]:
    """The records of a stream's last epoch, when the iteration has ended: for an output that is the final model.

    Flink ML: `ForwardInputsOfLastRound`.
    """
    records = stream._records("forward_inputs_of_last_round").python
    return stream.forward().flat_map(ForwardInputsOfLastRound(records), records).name("last round")


def iterate_delta(
    solution_set: KeyedStream[K, S],
    workset: KeyedStream[K, T],
    body: DeltaFunction[S, T] | BatchDeltaFunction,
    max_rounds: int | None = None,
    config: IterationConfig = IterationConfig(),  # frozen
    combine: Combiner[T] | None = None,
) -> DataStream[S]:
    """Runs a delta iteration over bounded streams, and returns its final solution set: one record for each key.

    In each epoch `body` is called for every key that was sent something, with the key's record of the solution set. It
    returns the record that replaces that one, if any, and what is sent to keys for the next epoch. Keys that nothing is
    sent to are not touched. The iteration ends when nothing is sent, or after `max_rounds`.

    A `BatchDeltaFunction` as `body` does the same for many keys at once, over Arrow batches.

    With `combine` each subtask reduces what it sends to a key to one record before it is sent, as the function
    `combine` does: `combine={"distance": "min"}`, or a function of two records. A key may be sent one record by each
    subtask still.

    In both modes it is a bounded iteration like any other: committed epoch by epoch, and in STREAMING run when its
    input has ended.

    The keys of both streams are of one type, and `solution_set` has one record of each key at most. Where a key is
    sent something that the solution set has no record of, a change adds it. Flink: *Delta Iterate*
    (`DataSet.iterateDelta`); Ewen et al., "Spinning Fast Iterative Data Flows", VLDB 2012.

    Raises `PipelineError` where the streams are not keyed alike, and where the body is not one that can run.

    Examples:
        >>> class Place(NamedTuple):
        ...     name: str
        ...     hops: int | None
        ...     roads: list[str]
        >>> class Visit(NamedTuple):
        ...     name: str
        ...     hops: int
        >>> class Nearest(iterations.DeltaFunction[Place, Visit]):
        ...     def update(self, solution, workset):
        ...         hops = min(visit.hops for visit in workset)
        ...         if solution.hops is not None and solution.hops <= hops:
        ...             return None, []
        ...         return solution._replace(hops=hops), [Visit(name, hops + 1) for name in solution.roads]
        >>> roads = {"a": ["b", "c"], "b": ["d"], "c": [], "d": ["a"], "e": ["a"]}
        >>> places = pipeline.from_collection([Place(name, None, to) for name, to in roads.items()], name="places")
        >>> visits = pipeline.from_collection([Visit("a", 0)], name="visits")
        >>> found = iterations.iterate_delta(places.key_by("name"), visits.key_by("name"), Nearest())
        >>> sorted((place.name, place.hops) for place in collect(found))
        [('a', 0), ('b', 1), ('c', 1), ('d', 2), ('e', None)]
    """
    inputs: list[DataStream[Any]] = [solution_set, workset]
    untyped = [stream for stream in inputs if isinstance(stream, UntypedStream)]
    if untyped:
        return untyped[0]
    _check_config(config)
    delta = _Delta(solution_set, workset, body, max_rounds, config, combine)
    (final_set,) = iterate_bounded_streams_until_termination([delta.first], [delta.initial], delta, config)
    return final_set


_INSTEAD = {
    nodes.SinkNode: ("a sink", "return the stream as an output, and write it behind the iteration"),
    nodes.LookupNode: ("a lookup", "pass the table in as data, and broadcast() it"),
    nodes.AssignTimestampsNode: ("a timestamp assigner", "assign timestamps before the iteration"),
    IterationNode: (
        "an iteration",
        "iterations cannot be nested; put one behind the other, or make one body of both",
    ),
}
"""Operators that a body cannot have, and what to do instead."""


class _BodyBuilder(GraphBuilder):
    """Builds the graph of a body."""

    is_body = True

    def __init__(self, name: str, iteration: str, life_cycle: LifeCycle) -> None:
        super().__init__(name)
        self.iteration = iteration
        self.per_round: set[int] = set()
        self._life_cycle = life_cycle

    @contextmanager
    def each_round(self) -> Iterator[None]:
        """Operators that are added meanwhile live for one epoch."""
        before, self._life_cycle = self._life_cycle, LifeCycle.PER_ROUND
        try:
            yield
        finally:
            self._life_cycle = before

    def _add(self, kind: type[Any], upstream: list[Upstream], name: str, **attributes: Any) -> Any:
        where = f"{self.name}: iteration '{self.iteration}', operator '{name}'"
        what, instead = next((refusal for refused, refusal in _INSTEAD.items() if issubclass(kind, refused)), ("", ""))
        if instead:
            raise PipelineError(f"{where}: a body cannot have {what} in it; {instead}")
        if kind.native:
            raise UnsupportedError(
                f"{where}: a body runs in Python workers, and not in Catalyst; use filter, map, map_batches or reduce,"
                " or do it before the iteration"
            )
        if any(listener.in_one_subtask for listener in iteration_listeners(attributes.get("function"))):
            attributes["parallelism"] = 1
        node = super()._add(kind, upstream, name, **attributes)
        lasts = any(listener.in_all_rounds for listener in iteration_listeners(attributes.get("function")))
        if self._life_cycle is LifeCycle.PER_ROUND and not lasts and not isinstance(node, (HeadNode, TailNode)):
            self.per_round.add(node.id)
        return node

    def check_own(self, stream: DataStream[Any], what: str) -> None:
        """Raise where a stream is not one of the body."""
        if not isinstance(stream, DataStream) or stream._pipeline is not self:
            raise PipelineError(
                f"{self.name}: iteration '{self.iteration}': {what} has to be a stream of the body, made from those"
                f" that process(variables, data) is given, not {stream!r}"
            )

    def body(self) -> Graph:
        """Return the graph; raises where an operator in it cannot run there."""
        self._raise_mistakes()
        graph = Graph(self.name, tuple(self._identified(self._nodes)), tuple(self._edges))
        check_operator_state(graph)
        for node in graph.nodes:
            self._check(node)
        return graph

    def _check(self, node: Node) -> None:
        where = f"{self.name}: iteration '{self.iteration}', operator '{node.name}'"
        per_round = node.id in self.per_round
        if node.parallelism not in (None, 1):
            raise PipelineError(
                f"{where}: a body has one parallelism; use IterationConfig(parallelism={node.parallelism}), or"
                " set_parallelism(1) where there is to be one subtask only"
            )
        if per_round and hears_of_epochs(node.user_function):
            raise PipelineError(
                f"{where}: an operator that lives for one epoch hears of no epochs; move it out of for_each_round, or"
                " use the life cycle ALL_ROUND"
            )
        if isinstance(node, nodes.ReduceNode) and hears_of_epochs(node.function):
            raise PipelineError(
                f"{where}: a reduce function hears of no epochs; use process, with the value in its state"
            )
        assigner = node.function.assigner if isinstance(node, nodes.WindowNode) else None
        if not per_round and assigner is not None and (assigner.is_event_time or assigner.is_processing_time):
            raise PipelineError(
                f"{where}: windows of time need the end of their input, which an ALL_ROUND operator has only once; put"
                " them into for_each_round, or use the life cycle PER_ROUND"
            )
        if not per_round and getattr(node.user_function, "requires_time_sorted_input", False):
            raise PipelineError(
                f"{where}: input sorted by time needs the end of the input, which an ALL_ROUND operator has only once;"
                " put it into for_each_round, or use the life cycle PER_ROUND"
            )


def _combined(stream: DataStream[Any], records: RecordType, key: Key, how: Combiner[Any]) -> DataStream[Any]:
    """Return a stream whose records are combined by key in the subtask that has them."""
    bare = _without_exchange(stream)
    where = stream._pipeline.name
    if isinstance(how, Mapping):
        if key.computed is not None:
            raise PipelineError(
                f"{where}: the stream is keyed by a function, and columns are combined by columns of the key; give a"
                " function that reduces two records to one"
            )
        function = CombineColumns(records, key.fields, how, where)
        return bare._next(nodes.MapBatchesNode, "combine", records=records, function=function)
    bare._check_function("combine", getattr(how, "reduce", how))
    bare._check_combines("combine")
    return bare._next(
        nodes.FlatMapNode, "combine", records=records, function=CombineRecords(how, _key_getter(key, records))
    )


def _key_getter(key: Key, records: RecordType) -> Callable[[Any], Hashable]:
    if key.computed is not None:
        getter: Callable[[Any], Hashable] = getattr(key.computed.function, "get_key", key.computed.function)
        return getter
    if records.shape == "tuple":
        return itemgetter(*map(records.names.index, key.fields))
    return records.getter(key.fields[0]) if records.shape == "value" else attrgetter(*key.fields)


def _without_exchange(stream: DataStream[T]) -> DataStream[T]:
    return DataStream(stream._pipeline, None, tuple(replace(u, partitioning=None) for u in stream._upstream))


class _Delta(IterationBody):
    """The body of a delta iteration: workset and solution set reach one keyed operator, whose state is the latter."""

    def __init__(
        self,
        solution_set: DataStream[Any],
        workset: DataStream[Any],
        function: DeltaFunction[Any, Any] | BatchDeltaFunction,
        max_rounds: int | None,
        config: IterationConfig,
        combiner: Combiner[Any] | None,
    ) -> None:
        self.name = config.name or type(function).__name__
        self.function, self.max_rounds, self.combiner = function, max_rounds, combiner
        if not isinstance(solution_set, DataStream) or not isinstance(workset, DataStream):
            raise PipelineError(
                f"iteration '{self.name}': a delta iteration needs two keyed streams, such as stream.key_by('id'), not"
                f" {solution_set!r} and {workset!r}"
            )
        pipeline = solution_set._pipeline
        self.where = f"{pipeline.name}: iteration '{self.name}'"
        if not isinstance(function, (DeltaFunction, BatchDeltaFunction)):
            raise PipelineError(
                f"{self.where}: its body has to be a DeltaFunction or a BatchDeltaFunction, such as MyFunction(), not"
                f" {function!r}"
            )
        if max_rounds is not None:
            check_count(f"{self.where}: max_rounds", max_rounds)
        if config.operator_life_cycle == "PER_ROUND":
            raise PipelineError(
                f"{self.where}: a solution set lives over all epochs; leave operator_life_cycle as it is"
            )
        keys = [self._key(what, s) for what, s in (("solution set", solution_set), ("workset", workset))]
        records = [solution_set._records(self.name), workset._records(self.name)]
        types = [_key_types(key, stream_type) for key, stream_type in zip(keys, records, strict=True)]
        if types[0] != types[1]:
            both = " and ".join(", ".join(map(str, parts)) for parts in types)
            raise PipelineError(
                f"{self.where}: the solution set is {_keyed(keys[0])}, and the workset {_keyed(keys[1])}, which are of"
                f" different types ({both}); key both alike"
            )
        for what, stream_type in zip(("solution set", "workset"), records, strict=True):
            if stream_type.shape == "value" and stream_type.schema.field(0).nullable:
                raise PipelineError(
                    f"{self.where}: a record of the {what} may be None, which means that there is none; make it a"
                    " record with a field"
                )
        self._check_types(records)
        self.solution, self.work = records
        self.key, self.work_key = keys
        self._check_batches()
        self.rows = pipeline._record_type(rows_type(_key_parts(self.key, self.solution), *records), self.name)
        self.tag: OutputTag[Any] = OutputTag(SOLUTION, self.solution.python)
        self.initial = self._sided(solution_set, SOLUTION)
        self.first = self._sided(workset, WORK)

    def process(self, variables: Sequence[DataStream[Any]], data: Sequence[DataStream[Any]]) -> IterationBodyResult:
        both = variables[0].union(data[0]).key_by(*self.rows.names[:-2])
        joined = both._keyed(
            nodes.DeltaNode,
            self.name,
            naming=Naming.FUNCTION,
            records=self.work,
            timestamped=False,
            function=self.function,
            types=self._types(),
        )
        solution = joined.get_side_output(self.tag)
        ends = None if self.max_rounds is None else solution.flat_map(TerminateOnMaxIter(self.max_rounds))
        sent = joined
        if self.combiner is not None:
            sent = _combined(joined, self.work, self.work_key, self.combiner)
        return IterationBodyResult([self._sided(sent, WORK)], [solution], ends)

    def _types(self) -> Solutions:
        combiner = None
        if isinstance(self.function, BatchDeltaFunction) and isinstance(self.combiner, Mapping):
            combiner = CombineColumns(self.work, self.work_key.fields, self.combiner, self.where)
        key, of_work = self.key, self.work_key.fields
        return Solutions(self.solution, self.work, self.rows, self.tag, key.fields, key.computed, of_work, combiner)

    def _key(self, what: str, stream: DataStream[Any]) -> Key:
        if not isinstance(stream, KeyedStream):
            raise PipelineError(f"{self.where}: the {what} is not keyed; call key_by on it")
        return stream._key_selector

    def _check_batches(self) -> None:
        """Raise where a function of batches would have to find rows by a key that is no plain column."""
        if not isinstance(self.function, BatchDeltaFunction):
            return
        if any(key.computed is not None for key in (self.key, self.work_key)) or any(
            pa.types.is_nested(part) for part in _key_types(self.key, self.solution)
        ):
            raise PipelineError(
                f"{self.where}: a BatchDeltaFunction finds rows by columns, and the solution set is"
                f" {_keyed(self.key)}, the workset {_keyed(self.work_key)}; key both by plain fields"
            )
        if any(pa.types.is_floating(part) for part in _key_types(self.key, self.solution)):
            raise PipelineError(
                f"{self.where}: a BatchDeltaFunction finds rows by values that are the same to the bit, and floats need"
                " not be; key by another field, or use a DeltaFunction"
            )
        if self.combiner is not None and not isinstance(self.combiner, Mapping):
            raise PipelineError(
                f"{self.where}: batches are combined by columns; give combine= as a mapping such as"
                " {'distance': 'min'}, or use a DeltaFunction"
            )

    def _check_types(self, records: Sequence[RecordType]) -> None:
        """Raise where the function is annotated with other types than those of the streams."""
        for what, variable, stream_type in zip(("solution set", "workset"), (S, T), records, strict=True):
            stated = type_argument(type(self.function), variable)
            if stated is not None and record_type(stated, self.where).schema != stream_type.schema:
                raise RecordTypeError(
                    f"{self.where}: the function is annotated with {type_name(stated)} for the {what}, which is of"
                    f" {stream_type.describe()}; make them the same"
                )

    def _sided(self, stream: DataStream[Any], side: str) -> DataStream[Any]:
        """Return a stream's records as rows of both streams' columns."""
        key, records = (self.key, self.solution) if side == SOLUTION else (self.work_key, self.work)
        name = "solution set" if side == SOLUTION else "workset"
        function = Sided(records, self.rows, side, key.fields, key.computed, f"iteration '{self.name}': {name}")
        bare = _without_exchange(stream)
        return bare._next(nodes.MapBatchesNode, name, records=self.rows, timestamped=False, function=function)


def _key_parts(key: Key, records: RecordType) -> list[Any]:
    """Return the types of a key's parts, as the author knows them."""
    return [key.computed.python] if key.computed is not None else [records.type_of(name) for name in key.fields]


def _key_types(key: Key, records: RecordType) -> list[pa.DataType]:
    """Return the types of a key's parts, as Arrow knows them."""
    return [key.computed.arrow] if key.computed is not None else [records.schema.field(n).type for n in key.fields]


_SAID = {
    ExchangeKind.BROADCAST: "broadcast()",
    ExchangeKind.GLOBAL: "global_()",
    ExchangeKind.CUSTOM: "partition_custom(...)",
}
"""Exchanges that say which subtasks have a record; the others only spread records."""


class _Builder:
    """Builds an iteration: its body, and the operator that it is in its pipeline."""

    def __init__(
        self,
        variables: Sequence[DataStream[Any]],
        data: ReplayableDataStreams,
        body: IterationBody,
        config: IterationConfig,
        bounded: bool,
    ) -> None:
        if not isinstance(body, IterationBody):
            raise PipelineError(f"an iteration needs an IterationBody, not {body!r}")
        _check_config(config)
        self.author, self.config, self.bounded = body, config, bounded
        self.name = body.name if isinstance(body, _Delta) else config.name or type(body).__name__
        _check_streams(f"iteration '{self.name}'", "variables", variables)
        _check_streams(f"iteration '{self.name}'", "data", data.replayed)
        _check_streams(f"iteration '{self.name}'", "data", data.not_replayed)
        self.variables, self.replayed = list(variables), list(data.replayed)
        self.inputs = [*self.variables, *self.replayed, *data.not_replayed]
        for stream in self.inputs:
            if not isinstance(stream, DataStream):
                raise PipelineError(
                    f"iteration '{self.name}': variables and data are lists of streams, and one of them is {stream!r};"
                    " give pipeline.from_collection([...]), or call broadcast() in the body"
                )
        if not self.variables:
            raise PipelineError(
                f"iteration '{self.name}': there is no variable; a loop needs a stream that is fed back"
            )
        self.outer = self.variables[0]._pipeline
        self.where = f"{self.outer.name}: iteration '{self.name}'"
        if isinstance(self.outer, _BodyBuilder):
            raise PipelineError(f"{self.where}: {_INSTEAD[IterationNode][1]}")
        if any(stream._pipeline is not self.outer for stream in self.inputs):
            raise PipelineError(f"{self.where}: its variables and its data belong to different pipelines")
        if config.staleness and not bounded:
            raise PipelineError(
                f"{self.where}: an epoch of an unbounded iteration waits for what comes in, and no subtask is ahead of"
                " another; leave staleness out, or use iterate_bounded_streams_until_termination"
            )
        self.builder = _BodyBuilder(self.outer.name, self.name, LifeCycle[config.operator_life_cycle])

    def build(self) -> list[DataStream[Any]]:
        """Return the iteration's outputs."""
        untyped = [stream for stream in self.inputs if isinstance(stream, UntypedStream)]
        if untyped:
            return [untyped[0]]
        if self.bounded:
            self._check_bounded()
        heads = [self._head(number, stream) for number, stream in enumerate(self.inputs)]
        before = len(self.outer._nodes)
        count = len(self.variables)
        result = self.author.process(heads[:count], heads[count:])
        self._check(result, before)
        for number, stream in enumerate(result.feedback):
            self._tail(Role.FEEDBACK, number, stream)
        for number, stream in enumerate(result.outputs):
            self._tail(Role.OUTPUT, number, stream)
        if result.termination_criteria is not None:
            self._tail(Role.CRITERIA, 0, result.termination_criteria)
        node = self._node(self.builder.body())
        if node.staleness:
            check_staleness(self.where, node)
        return [DataStream(self.outer, None, (Upstream(node.id, self._tag(node, tail)),)) for tail in node.outputs]

    def _node(self, body: Graph) -> IterationNode:
        upstream = [replace(u, partitioning=None) for stream in self.inputs for u in stream._upstream]
        identity = {} if self.config.uid is None else {"uid": self.config.uid, "given_uid": True}
        return self.outer._add(
            IterationNode,
            upstream,
            self.name,
            naming=Naming.FUNCTION if self.config.name is None else Naming.AUTHOR,
            parallelism=self.config.parallelism,
            body=body,
            author=self.author,
            inputs=tuple(len(stream._upstream) for stream in self.inputs),
            life_cycle=LifeCycle[self.config.operator_life_cycle],
            per_round=frozenset(self.builder.per_round),
            is_unbounded=not self.bounded,
            staleness=self.config.staleness,
            **identity,
        )

    def _tag(self, node: IterationNode, tail: TailNode) -> OutputTag[Any]:
        records: Any = tail.records
        tag: OutputTag[Any] = OutputTag(output_tag(tail.number), records)
        self.outer._declare_tag(node, tag)
        return tag

    def _check_bounded(self) -> None:
        for stream in self.inputs:
            for upstream in stream._upstream:
                for node in self._sources_of(upstream.node):
                    if node.source.boundedness is not Boundedness.BOUNDED:
                        raise PipelineError(
                            f"{self.where}: source '{node.name}' is unbounded, and a bounded iteration waits for the"
                            " end of its input; use a bounded source, or iterate_unbounded_streams"
                        )

    def _sources_of(self, node: int) -> list[nodes.SourceNode]:
        pending, sources = {node}, []
        seen: set[int] = set()
        while pending:
            current = pending.pop()
            seen.add(current)
            if isinstance(self.outer._node(current), nodes.SourceNode):
                sources.append(self.outer._node(current))
            pending |= {edge.source for edge in self.outer._edges if edge.target == current} - seen
        return sources  # type: ignore[return-value]

    def _head(self, number: int, stream: DataStream[Any]) -> DataStream[Any]:
        """Return the body's stream that stands for one from outside."""
        variable = number < len(self.variables)
        what = "variable" if variable else "data"
        self._check_exchange(what, stream, "call it on the stream that the body is given")
        node = self.builder._add(
            HeadNode,
            [],
            f"{what} {number if variable else number - len(self.variables)}",
            records=stream._records(self.name),
            timestamped=any(self.outer._node(u.node).timestamped for u in stream._upstream),
            number=number,
            variable=variable,
            replayed=len(self.variables) <= number < len(self.variables) + len(self.replayed),
        )
        if isinstance(stream, KeyedStream):
            return KeyedStream(self.builder, (Upstream(node.id),), stream._key_selector)
        return DataStream(self.builder, node.id)

    def _tail(self, role: Role, number: int, stream: DataStream[Any]) -> None:
        name = role.value if role is Role.CRITERIA else f"{role.value} {number}"
        behind = "behind the iteration" if role is Role.OUTPUT else "on the variable in the body"
        self._check_exchange(name, stream, f"call it {behind}")
        upstream = [replace(u, partitioning=None) for u in stream._upstream]
        self.builder._add(TailNode, upstream, name, records=stream._records(name), role=role, number=number)

    def _check_exchange(self, what: str, stream: DataStream[Any], instead: str) -> None:
        """Raise where a stream ends with an exchange that chooses subtasks of an operator behind it: there is none."""
        for upstream in stream._upstream:
            kind = upstream.partitioning.kind if upstream.partitioning is not None else None
            if kind in _SAID:
                raise PipelineError(
                    f"{self.where}: {what} ends with {_SAID[kind]}, which brings records to the subtasks of the"
                    f" operator behind it, and there is none; {instead}"
                )

    def _check(self, result: IterationBodyResult, before: int) -> None:
        if not isinstance(result, IterationBodyResult):
            raise PipelineError(f"{self.where}: process(variables, data) has to return an IterationBodyResult")
        if len(self.outer._nodes) > before:
            stray = self.outer._nodes[before]
            if isinstance(stray, nodes.SourceNode):
                raise PipelineError(
                    f"{self.where}: a body cannot have a source in it, as '{stray.name}' ({stray.location}) is; read it"
                    " before the iteration, and pass the stream in as data"
                )
            raise PipelineError(
                f"{self.where}: '{stray.name}' ({stray.location}) works on a stream of the outside; pass the stream in"
                " as data"
            )
        _check_streams(self.where, "feedback", result.feedback)
        _check_streams(self.where, "outputs", result.outputs)
        if len(result.feedback) != len(self.variables):
            raise PipelineError(
                f"{self.where}: there are {len(self.variables)} variables and {len(result.feedback)} feedback streams;"
                " each variable needs the stream that becomes it in the next epoch"
            )
        if not result.outputs:
            raise PipelineError(f"{self.where}: nothing leaves the iteration; return a stream in outputs")
        for number, stream in enumerate(result.feedback):
            self.builder.check_own(stream, f"feedback {number}")
            self._check_feedback(number, stream)
        for number, stream in enumerate(result.outputs):
            self.builder.check_own(stream, f"output {number}")
        if result.termination_criteria is not None:
            if not self.bounded:
                raise PipelineError(
                    f"{self.where}: an unbounded iteration has no termination criteria: it ends when its input has"
                    " ended and nothing is fed back; leave them out, or use iterate_bounded_streams_until_termination"
                )
            self.builder.check_own(result.termination_criteria, "the termination criteria")

    def _check_feedback(self, number: int, stream: DataStream[Any]) -> None:
        variable = self.variables[number]
        if isinstance(stream, UntypedStream):
            return  # its mistake is raised with the others
        fed_back, declared = stream._records("feedback"), variable._records("variable")
        if fed_back.schema != declared.schema or fed_back.shape != declared.shape:
            raise RecordTypeError(
                f"{self.where}: feedback {number} is of {fed_back.describe()}, and its variable of"
                f" {declared.describe()}; map it to the variable's type"
            )
        keys = [keyed._key_selector if isinstance(keyed, KeyedStream) else None for keyed in (stream, variable)]
        if (keys[0] is not None and keys[0] != keys[1]) or (keys[0] is None and keys[1] is not None):
            raise PipelineError(
                f"{self.where}: feedback {number} is {_keyed(keys[0])}, and its variable {_keyed(keys[1])}; key both"
                " alike"
            )


def _check_streams(where: str, what: str, streams: object) -> None:
    if isinstance(streams, (DataStream, str)) or not isinstance(streams, Sequence):
        raise PipelineError(f"{where}: {what} is a list of streams, such as [stream], not {streams!r}")


def _check_config(config: object) -> None:
    if not isinstance(config, IterationConfig):
        raise PipelineError(
            f"an iteration needs an IterationConfig, such as IterationConfig(staleness=1), not {config!r}"
        )


def _keyed(key: Key | None) -> str:
    return "not keyed" if key is None else f"keyed by {key.describe()}"
