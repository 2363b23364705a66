"""Bodies of iterations that hypothesis makes up, and what they give by a model of its own.

The model knows FLIP-176 and nothing of the library: streams are lists, an operator is a function from the records of a
round to the records that it emits, and the coordinator is a loop. What an operator emits does not depend on the order
of a round's records, so that both give the same records.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import strategies as st

from dagster_unified.api import (
    ArrowListStateDescriptor,
    BroadcastProcessFunction,
    CheckpointedFunction,
    FlatMapFunction,
    KeyedBatchFunction,
    KeyedCoProcessFunction,
    KeyedProcessFunction,
    KeyedStream,
    MapStateDescriptor,
    OutputTag,
    Pipeline,
    ProcessFunction,
    ValueStateDescriptor,
    iterations,
)
from tests.iterations.victims import Trap

LAST = 3
"""The epoch after which nothing is fed back."""

MOST = 3_000
"""Records that a stream has at most in a round; the model gives up on more."""

END = 99
"""The `at` of records that operators emit when the iteration has ended."""


class Rec(NamedTuple):
    key: int
    value: int
    at: int
    """The epoch of the record; 0 where data is replayed, as there the records of a round come of several."""


@dataclass(frozen=True)
class Op:
    kind: str
    inputs: tuple[int, ...]
    number: int
    per_round: bool


@dataclass(frozen=True)
class Spec:
    """A body. Streams are numbered: variables, data (replayed ones first), then what operators emit in their order."""

    variables: tuple[tuple[Rec, ...], ...]
    keyed: tuple[bool, ...]
    replayed: tuple[tuple[Rec, ...], ...]
    once: tuple[tuple[Rec, ...], ...]
    ops: tuple[Op, ...]
    feedback: tuple[int, ...]
    outputs: tuple[int, ...]
    per_round: bool
    rounds: int
    """How many rounds the criteria allow; 0 where there are none."""

    parallelism: int
    behind: bool = False
    """Whether an operator with state comes behind the iteration, and gives what leaves it summed up by key."""


# What the operators do: functions that the library runs, and the model as well where they have no state


def moved(number: int) -> Callable[[Rec], Rec]:
    def move(r: Rec) -> Rec:
        return Rec((r.key + number) % 5, (3 * r.value + number) % 97, r.at)

    return move


def kept(number: int) -> Callable[[Rec], bool]:
    return lambda r: (r.value + number) % 3 != 0


def doubled(r: Rec) -> list[Rec]:
    return [r, r._replace(key=(r.key + 1) % 5)] if r.value % 2 else [r]


def added(a: Rec, b: Rec) -> Rec:
    return Rec(a.key, a.value + b.value, max(a.at, b.at))


def at_the_end(r: Rec) -> Rec:
    return r._replace(at=END)


def one_of(r: Rec) -> Rec:
    return r._replace(value=1)


ODD = OutputTag("odd", Rec)


class Split(ProcessFunction[Rec, Rec]):
    def process_element(self, value: Rec, ctx) -> list[Rec]:
        if value.value % 2:
            ctx.output(ODD, value)
            return []
        return [value]


class Numbered(KeyedProcessFunction[int, Rec, Rec]):
    """The n-th record of a key becomes n."""

    def open(self, runtime_context):
        self.count = runtime_context.get_state(ValueStateDescriptor("count", int))

    def process_element(self, value: Rec, ctx) -> list[Rec]:
        self.count.update((self.count.value() or 0) + 1)
        return [value._replace(value=self.count.value())]


class Told(KeyedProcessFunction[int, Rec, Rec], iterations.IterationListener[Rec]):
    """Adds up in state that lives on; says so at the end of an epoch, and forgets some sums."""

    def open(self, runtime_context):
        self.sum = runtime_context.get_state(ValueStateDescriptor("sum", int))

    def process_element(self, value: Rec, ctx) -> list[Rec]:
        self.sum.update((self.sum.value() or 0) + value.value)
        return []

    def on_epoch_watermark_incremented(self, epoch_watermark, context, collector):
        total = self.sum.value()
        collector.collect(Rec(context.get_current_key(), total % 97, epoch_watermark))
        if total % 5 == 0:
            self.sum.clear()

    def on_iteration_terminated(self, context, collector):
        collector.collect(Rec(context.get_current_key(), 1000 + self.sum.value(), END))


class NumberedBatches(KeyedBatchFunction[int]):
    """As `Numbered`, many records at once."""

    def open(self, runtime_context):
        self.count = runtime_context.get_state(ValueStateDescriptor("count", int))

    def process_batch(self, batch, ctx):
        before = self.count.value() or 0
        self.count.update(before + batch.num_rows)
        numbers = pa.array(range(before + 1, before + 1 + batch.num_rows), pa.int64())
        return batch.set_column(1, "value", numbers)


class ToldBatches(KeyedBatchFunction[int], iterations.IterationListener[pa.RecordBatch]):
    """As `Told`, many records at once."""

    def open(self, runtime_context):
        self.sum = runtime_context.get_state(ValueStateDescriptor("sum", int))

    def process_batch(self, batch, ctx):
        self.sum.update((self.sum.value() or 0) + pc.sum(batch["value"]).as_py())

    def on_epoch_watermark_incremented(self, epoch_watermark, context, collector):
        total = self.sum.value()
        collector.collect(one_row(Rec(context.get_current_key(), total % 97, epoch_watermark)))
        if total % 5 == 0:
            self.sum.clear()

    def on_iteration_terminated(self, context, collector):
        collector.collect(one_row(Rec(context.get_current_key(), 1000 + self.sum.value(), END)))


def one_row(r: Rec) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([r._asdict()])


class LastBatches(CheckpointedFunction, iterations.IterationListener[pa.RecordBatch]):
    """As `forward_inputs_of_last_round`, many records at once."""

    in_all_rounds = True

    def initialize_state(self, context):
        self.state = context.get_operator_state_store().get_list_state(ArrowListStateDescriptor("rows", Rec))
        self.last, self.current = self.state.get(), self.state.get().slice(0, 0)

    def snapshot_state(self, context):
        self.state.update(self.last)

    def __call__(self, batch):
        own = pa.Table.from_batches([batch.select(Rec._fields)])
        self.current = pa.concat_tables([self.current, own.cast(self.current.schema)])
        return batch.slice(0, 0)

    def on_epoch_watermark_incremented(self, epoch_watermark, context, collector):
        self.last, self.current = self.current, self.current.slice(0, 0)

    def on_iteration_terminated(self, context, collector):
        for batch in [*self.last.to_batches(), *self.current.to_batches()]:  # these came when the iteration had ended
            collector.collect(batch)


class Both(KeyedCoProcessFunction[int, Rec, Rec, Rec], iterations.IterationListener[Rec]):
    """Adds two streams up side by side."""

    def open(self, runtime_context):
        self.sum = runtime_context.get_state(ValueStateDescriptor("sum", int))

    def process_element1(self, value: Rec, ctx) -> list[Rec]:
        self.sum.update((self.sum.value() or 0) + value.value)
        return []

    def process_element2(self, value: Rec, ctx) -> list[Rec]:
        self.sum.update((self.sum.value() or 0) + 7 * value.value)
        return []

    def on_epoch_watermark_incremented(self, epoch_watermark, context, collector):
        collector.collect(Rec(context.get_current_key(), self.sum.value() % 97, epoch_watermark))


class Timed(KeyedProcessFunction[int, Rec, Rec]):
    """Adds up until the end of its input, which a timer waits for: that of a round, or of the iteration."""

    def __init__(self, lasts: bool) -> None:
        self.lasts = lasts

    def open(self, runtime_context):
        self.sum = runtime_context.get_state(ValueStateDescriptor("sum", int))
        self.at = runtime_context.get_state(ValueStateDescriptor("at", int))

    def process_element(self, value: Rec, ctx) -> list[Rec]:
        self.sum.update((self.sum.value() or 0) + value.value)
        self.at.update(max(self.at.value() or 0, value.at))
        ctx.timer_service().register_event_time_timer(1)
        return []

    def on_timer(self, timestamp: int, ctx) -> list[Rec]:
        return [Rec(ctx.get_current_key(), self.sum.value() % 97, END if self.lasts else self.at.value())]


class Watching(FlatMapFunction[Rec, Rec], iterations.IterationListener[Rec]):
    """Says in each subtask that an epoch is over."""

    def flat_map(self, value: Rec) -> list[Rec]:
        return []

    def on_epoch_watermark_incremented(self, epoch_watermark, context, collector):
        if epoch_watermark < LAST:
            collector.collect(Rec(0, epoch_watermark, epoch_watermark))

    def on_iteration_terminated(self, context, collector):
        collector.collect(Rec(1, 500, END))


MOST_OF = MapStateDescriptor("most", int, int)


class Below(BroadcastProcessFunction[Rec, Rec, Rec]):
    """Lets records through that are at most as large as the largest broadcast record of their key."""

    def process_element(self, value: Rec, ctx) -> list[Rec]:
        most = ctx.get_broadcast_state(MOST_OF).get(value.key)
        return [value] if value.value <= (50 if most is None else most) else []

    def process_broadcast_element(self, value: Rec, ctx) -> list[Rec]:
        held = ctx.get_broadcast_state(MOST_OF)
        held.put(value.key, max(value.value, held.get(value.key) or 0))
        return [value._replace(key=4)]


def with_sum(records: pa.RecordBatch, other: pa.Table) -> pa.RecordBatch:
    total = sum(other.column("value").to_pylist()) % 89
    return records.set_column(1, "value", pc.add(records.column("value"), total))


# Kinds: how many inputs, how many outputs, whether for one round as well, and for all


class Kind(NamedTuple):
    inputs: int = 1
    outputs: int = 1
    one_round: bool = True
    all_rounds: bool = True


KINDS = {
    "map": Kind(),
    "filter": Kind(),
    "double": Kind(),
    "split": Kind(outputs=2),
    "union": Kind(inputs=2),
    "spread": Kind(),
    "global": Kind(),
    "copy": Kind(),
    "numbered": Kind(),
    "counted": Kind(),
    "told": Kind(one_round=False),
    "both": Kind(inputs=2, one_round=False),
    "timed": Kind(),
    "watching": Kind(one_round=False),
    "below": Kind(inputs=2),
    "batches": Kind(inputs=2),
    "last": Kind(),
    "all_reduce": Kind(),
}


def by_key(stream, number: int):
    """A stream by its key, which is a field, or computed."""
    if isinstance(stream, KeyedStream):
        return stream
    return stream.key_by("key") if number % 2 else stream.key_by(lambda r: r.key, key_type=int)


def built_op(op: Op, ins, lasts: bool):
    """The streams that an operator emits."""
    one = ins[0]
    if op.kind == "map":
        return [one.map(moved(op.number), Rec)]
    if op.kind == "filter":
        return [one.filter(kept(op.number))]
    if op.kind == "double":
        return [one.flat_map(doubled, Rec)]
    if op.kind == "split":
        split = one.process(Split())
        return [split, split.get_side_output(ODD)]
    if op.kind == "union":
        return [one.union(ins[1])]
    if op.kind == "spread":
        ways = [one.rebalance, one.shuffle, one.rescale]
        return [ways[op.number % 3]().map(lambda r: r, Rec)]
    if op.kind == "global":
        return [one.global_().map(lambda r: r, Rec)]
    if op.kind == "copy":
        return [one.broadcast().map(lambda r: r, Rec)]
    if op.kind == "numbered":
        keyed = by_key(one, op.number)
        batches = op.number // 2 == 1
        return [keyed.map_batches(NumberedBatches(), Rec) if batches else keyed.process(Numbered())]
    if op.kind == "counted":
        return [by_key(one.map(one_of, Rec), op.number).reduce(added)]
    if op.kind == "told":
        keyed = by_key(one, op.number)
        return [keyed.map_batches(ToldBatches(), Rec) if op.number // 2 == 1 else keyed.process(Told())]
    if op.kind == "both":
        return [by_key(one, op.number).connect(by_key(ins[1], op.number)).process(Both())]
    if op.kind == "timed":
        return [by_key(one, op.number).process(Timed(lasts))]
    if op.kind == "watching":
        watching = one.rebalance().flat_map(Watching())
        return [watching.set_parallelism(1) if op.number % 2 else watching]
    if op.kind == "below":
        return [one.rebalance().connect(ins[1].broadcast(MOST_OF)).process(Below())]
    if op.kind == "batches":
        return [one.connect(ins[1].broadcast()).map_batches(with_sum, Rec)]
    if op.kind == "last":
        batches = op.number // 2 == 1
        last = (
            one.forward().map_batches(LastBatches(), Rec) if batches else iterations.forward_inputs_of_last_round(one)
        )
        return [last.map(at_the_end, Rec)]
    return [iterations.all_reduce(one.map(lambda r: r._replace(key=0), Rec), added)]


def fed_back(step: int, trap: Trap | None) -> Callable[[Rec], Rec]:
    """What a record becomes in the next round."""

    def feed(r: Rec) -> Rec:
        if trap is not None:
            trap.meet()
        return r._replace(at=r.at + step)

    return feed


class Body(iterations.IterationBody):
    """A body as it is specified, which meets a trap in each record that it would feed back."""

    def __init__(self, spec: Spec, trap: Trap | None = None) -> None:
        self.spec, self.trap = spec, trap

    def process(self, variables, data):
        spec, streams = self.spec, [*variables, *data]
        for op in spec.ops:
            ins = [streams[number] for number in op.inputs]
            if op.per_round and not spec.per_round:
                streams += iterations.for_each_round(ins, lambda given, op=op: built_op(op, given, lasts=False))
            else:
                streams += built_op(op, ins, lasts=not spec.per_round)
        step = 0 if spec.replayed else 1
        feedback = [
            streams[number].map(fed_back(step, self.trap), Rec).filter(lambda r: r.at <= LAST)
            for number in spec.feedback
        ]
        criteria = feedback[0].flat_map(iterations.TerminateOnMaxIter(spec.rounds)) if spec.rounds else None
        keyed = [stream.key_by("key") if key else stream for stream, key in zip(feedback, spec.keyed, strict=True)]
        return iterations.IterationBodyResult(keyed, [streams[number] for number in spec.outputs], criteria)


class Totals(KeyedProcessFunction[int, tuple[int, int, int, int], tuple[int, int, int, int]]):
    """Adds up all columns, and says so when the iteration has ended."""

    def open(self, runtime_context):
        self.totals = runtime_context.get_state(ValueStateDescriptor("totals", tuple[int, int, int, int]))

    def process_element(self, value, ctx):
        self.totals.update(summed(value, self.totals.value()))
        ctx.timer_service().register_event_time_timer(1)
        return []

    def on_timer(self, timestamp, ctx):
        return [self.totals.value()]


def summed(one, others):
    return one if others is None else tuple(map(sum, zip(one, others, strict=True)))


def built(spec: Spec, trap: Trap | None = None):
    """The pipeline, and a stream of all records that its iteration gives, each with the number of its output."""
    pipeline = Pipeline("generated")
    variables = []
    for number, (records, key) in enumerate(zip(spec.variables, spec.keyed, strict=True)):
        stream = pipeline.from_collection(records, Rec, name=f"variable{number}")
        variables.append(stream.key_by("key") if key else stream)
    replayed = [pipeline.from_collection(r, Rec, name=f"replayed{n}") for n, r in enumerate(spec.replayed)]
    once = [pipeline.from_collection(r, Rec, name=f"once{n}") for n, r in enumerate(spec.once)]
    outputs = iterations.iterate_bounded_streams_until_termination(
        variables,
        iterations.ReplayableDataStreams(replayed, once),
        Body(spec, trap),
        iterations.IterationConfig(
            operator_life_cycle="PER_ROUND" if spec.per_round else "ALL_ROUND", parallelism=spec.parallelism
        ),
    )
    numbered = [
        stream.map(lambda r, number=number: (number, *r), tuple[int, int, int, int])
        for number, stream in enumerate(outputs)
    ]
    every = numbered[0].union(*numbered[1:]) if numbered[1:] else numbered[0]
    return pipeline, every.key_by(lambda r: r[1], key_type=int).process(Totals()) if spec.behind else every


# The model


class TooManyError(Exception):
    """A body that multiplies its records."""


class Model:
    """Runs a body as FLIP-176 says."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.state: list[dict[int, int]] = [{} for _ in spec.ops]
        self.last: list[list[Rec]] = [[] for _ in spec.ops]
        self.rounds = 0
        self.fed: list[int] = []
        """The rounds in which something comes to what feeds back."""

    def run(self) -> list[tuple[int, int, int, int]]:
        """What the pipeline gives."""
        found = self._leaving()
        if not self.spec.behind:
            return found
        totals = {}
        for record in found:
            totals[record[1]] = summed(record, totals.get(record[1]))
        return sorted(totals.values())

    def _leaving(self) -> list[tuple[int, int, int, int]]:
        """All records of all outputs."""
        spec, found = self.spec, []
        begin: list[Sequence[Rec]] = [*spec.variables]
        while True:
            epoch = self.rounds
            once = spec.once if epoch == 0 else [()] * len(spec.once)
            streams = self._through([*begin, *spec.replayed, *once], epoch)
            found += self._outputs(streams)
            if any(streams[number] for number in spec.feedback):
                self.fed.append(epoch)
            self.rounds += 1
            begin = [self._fed_back(streams[number]) for number in spec.feedback]
            if self.rounds == spec.rounds or not any(begin):
                return sorted(found + self._outputs(self._through([()] * (len(streams) - self._emitted()), None)))

    def _emitted(self) -> int:
        return sum(KINDS[op.kind].outputs for op in self.spec.ops)

    def _outputs(self, streams):
        return [(number, *r) for number, stream in enumerate(self.spec.outputs) for r in streams[stream]]

    def _fed_back(self, stream):
        step = 0 if self.spec.replayed else 1
        return [r._replace(at=r.at + step) for r in stream if r.at + step <= LAST]

    def _through(self, inputs, epoch):
        streams = [list(one) for one in inputs]
        for number, op in enumerate(self.spec.ops):
            streams += self._emit(number, op, [streams[n] for n in op.inputs], epoch)
            if len(streams[-1]) > MOST:
                raise TooManyError
        return streams

    def _emit(self, number: int, op: Op, ins, epoch):
        one, ended = ins[0], epoch is None
        lasts = not (op.per_round or self.spec.per_round)
        state = self.state[number] if lasts else {}
        if op.kind == "map":
            return [[moved(op.number)(r) for r in one]]
        if op.kind == "filter":
            return [[r for r in one if kept(op.number)(r)]]
        if op.kind == "double":
            return [[each for r in one for each in doubled(r)]]
        if op.kind == "split":
            return [[r for r in one if not r.value % 2], [r for r in one if r.value % 2]]
        if op.kind == "union":
            return [one + ins[1]]
        if op.kind in ("spread", "global"):
            return [one]
        if op.kind == "copy":
            return [one * self.spec.parallelism]
        if op.kind == "numbered":
            return [self._numbered(state, one)]
        if op.kind == "counted":
            return [self._counted(state, one, lasts)]
        if op.kind == "told":
            return [self._told(state, one, epoch)]
        if op.kind == "both":
            weighed = [(r.key, r.value) for r in one] + [(r.key, 7 * r.value) for r in ins[1]]
            for key, value in weighed:
                state[key] = state.get(key, 0) + value
            keys = {key for key, _ in weighed}
            return [[] if ended else [Rec(key, state[key] % 97, epoch) for key in keys]]
        if op.kind == "timed":
            return [self._timed(state, one, epoch, lasts)]
        if op.kind == "watching":
            subtasks = 1 if op.number % 2 else self.spec.parallelism
            if ended:
                return [[Rec(1, 500, END)] * subtasks]
            return [[Rec(0, epoch, epoch)] * subtasks if epoch < LAST else []]
        if op.kind == "below":
            for r in ins[1]:
                state[r.key] = max(r.value, state.get(r.key, 0))
            return [[r for r in one if r.value <= state.get(r.key, 50)] + [r._replace(key=4) for r in ins[1]]]
        if op.kind == "batches":
            total = sum(r.value for r in ins[1]) % 89
            return [[r._replace(value=r.value + total) for r in one]]
        if op.kind == "last":
            if ended:
                return [[at_the_end(r) for r in [*self.last[number], *one]]]
            self.last[number] = one
            return [[]]
        if not one:
            return [[]]
        return [[Rec(0, sum(r.value for r in one), max(r.at for r in one))]]

    def _numbered(self, state, records):
        found = []
        for r in records:
            state[r.key] = state.get(r.key, 0) + 1
            found.append(r._replace(value=state[r.key]))
        return found

    def _counted(self, state, records, lasts):
        """A reduce: rolling where it lives over all rounds, and one result a round where it does not."""
        latest = {}
        found = []
        for r in self._numbered(state, records):
            found.append(r)
            latest[r.key] = Rec(r.key, r.value, max(r.at, latest[r.key].at if r.key in latest else 0))
        return found if lasts else list(latest.values())

    def _told(self, state, records, epoch):
        for r in records:
            state[r.key] = state.get(r.key, 0) + r.value
        if epoch is None:
            return [Rec(key, 1000 + total, END) for key, total in state.items()]
        found = [Rec(key, state[key] % 97, epoch) for key in {r.key for r in records}]
        for key in [key for key in {r.key for r in records} if state[key] % 5 == 0]:
            del state[key]
        return found

    def _timed(self, state, records, epoch, lasts):
        at = defaultdict(lambda: END if lasts else 0)
        for r in records:
            state[r.key] = state.get(r.key, 0) + r.value
            at[r.key] = max(at[r.key], r.at)
        fires = epoch is None or not lasts
        return [Rec(key, total % 97, at[key]) for key, total in state.items()] if fires else []


# What hypothesis makes up

RECORDS = st.lists(st.builds(Rec, st.integers(0, 4), st.integers(0, 30), st.just(0)), max_size=5).map(tuple)


@st.composite
def specs(draw, parallelism=st.integers(1, 3)) -> Spec:
    variables = draw(st.lists(RECORDS, min_size=1, max_size=2))
    replayed = draw(st.lists(RECORDS, max_size=1))
    once = draw(st.lists(RECORDS, max_size=2))
    per_round = draw(st.booleans())
    streams = len(variables) + len(replayed) + len(once)
    first, ops = streams, []
    for _ in range(draw(st.integers(1, 6))):
        for_one = per_round or draw(st.integers(0, 3)) == 0
        names = [n for n, kind in KINDS.items() if kind.one_round or not for_one]
        if for_one and not per_round:  # the library's own listeners live on in for_each_round as well
            names = [n for n in names if n not in ("last", "all_reduce")]
        kind = draw(st.sampled_from(names))
        # the newest streams more often, so that operators follow each other
        number = st.one_of(st.integers(0, streams - 1), st.integers(max(0, streams - 2), streams - 1))
        inputs = tuple(draw(number) for _ in range(KINDS[kind].inputs))
        ops.append(Op(kind, inputs, draw(st.integers(0, 5)), for_one))
        streams += KINDS[kind].outputs
    anything, emitted = st.integers(0, streams - 1), st.integers(first, streams - 1)
    return Spec(
        variables=tuple(variables),
        keyed=tuple(draw(st.booleans()) for _ in variables),
        replayed=tuple(replayed),
        once=tuple(once),
        ops=tuple(ops),
        feedback=tuple(draw(st.one_of(emitted, anything)) for _ in variables),
        outputs=tuple(draw(st.lists(emitted, min_size=1, max_size=3))),
        per_round=per_round,
        rounds=draw(st.integers(1, 4)) if replayed else draw(st.integers(0, 4)),
        parallelism=draw(parallelism),
        behind=draw(st.booleans()),
    )
