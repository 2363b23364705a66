"""The stages of a STREAMING query, with programs as a worker loads them."""

import msgspec

from dagster_unified.api import MapFunction, Pipeline
from dagster_unified.engine.streaming.worker import shipped
from dagster_unified.graph.queries import key_group_queries
from dagster_unified.graph.topology import Lanes
from dagster_unified.operators.drivers.stages import Pass
from dagster_unified.testing.streaming import InMemoryEpoch


def test_each_subtask_gets_records_of_its_own_copy_of_their_class():
    class Item(msgspec.Struct):
        tags: list[str]

    class Tagged(MapFunction[Item, Item]):
        def __init__(self) -> None:
            self.seen = 0

        def map(self, item: Item) -> Item:
            self.seen += 1
            if type(item) is not Item:
                raise TypeError("an item of another copy")
            item.tags.append(f"seen {self.seen}")
            return item

    pipeline = Pipeline("p")
    items = pipeline.from_collection([], Item).partition_custom(lambda key, n: key, lambda item: 0, key_type=int)
    tagged = items.map(Tagged(), Item).set_parallelism(2)
    twice = tagged.map(Tagged(), Item).set_parallelism(2)
    for stream in (twice, tagged.filter(lambda item: True).set_parallelism(2)):
        stream.key_by(lambda item: item.tags[0], key_type=str).reduce(lambda first, second: first).print()
    (query,) = key_group_queries(pipeline.plan({"execution.runtime-mode": "STREAMING"}), Lanes())
    ((exchanged,), *_) = query.stages.between
    ((lane, routed),) = exchanged.programs.items()
    out = []

    def leave(route, batch, before_event, group):
        out.append((group, batch.column("tags").to_pylist()))

    (programs,) = shipped(exchanged.programs).load()
    with Pass(programs, InMemoryEpoch(lambda: 0), leave) as running:
        for group in (0, 1):
            running.push(lane, group, routed.program.input.records.to_batch([Item(["new"])]))
        running.finish()
    assert out == [(group, [["new", *seen]]) for group in (0, 1) for seen in (["seen 1", "seen 1"], ["seen 1"])]
