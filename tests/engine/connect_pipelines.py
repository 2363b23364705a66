"""What pipelines give through Spark Connect: of files with odd names, and to functions without a key.

A process of its own: one that has a classic session cannot have one of Connect. Prints what it has found as JSON.
"""

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dagster_unified.api import CheckpointedFunction, ListStateDescriptor, MapFunction, Pipeline
from dagster_unified.connectors import CsvSource, FileSink, ParquetSource
from dagster_unified.engine import session
from dagster_unified.engine.streaming.job import Start, StreamingJob
from tests.connectors.test_paths import Sale, as_path
from tests.engine.test_checkpoint_listener_on_spark import Seen, Value, listening
from tests.engine.test_unkeyed_watermarks import PARTS, STREAMS, Row, timed
from tests.support import arrive, run_stages


def execute(spark, pipeline, mode, folder):
    options = {"execution.runtime-mode": mode, "execution.checkpointing.dir": str(folder / "checkpoints")}
    plan = pipeline.plan({**options, "pipeline.max-parallelism": 4})
    if mode == "STREAMING":
        StreamingJob(plan, spark, Start("test")).run()
    else:
        run_stages(plan, spark, folder)


def written(folder):
    table = pa.concat_tables(pq.read_table(file) for file in folder.glob("*.parquet"))
    return sorted(tuple(row.values()) for row in table.to_pylist())


def named(spark, folder, mode):
    """The amounts in files of odd names, each read by its own."""
    (folder / "in").mkdir(parents=True)
    names = {"a[1]": 1, "a1": 100, "a?": 2, "ab": 200, "a b": 3, "{a,b}": 4}
    for name, amount in names.items():
        (folder / "in" / f"{name}.csv").write_text(f"amount\n{amount}\n")
    pipeline = Pipeline("named")
    for number, name in enumerate(["a[1]", "a?", "a b", "{a,b}"]):
        source = CsvSource(f"{folder}/in/{as_path(name)}.csv", Sale, name=f"sales {number}")
        pipeline.from_source(source).sink_to(FileSink(str(folder / f"out{number}"), name=f"out {number}"))
    execute(spark, pipeline, mode, folder)
    return [written(folder / f"out{number}") for number in range(4)]


def unkeyed(spark, folder):
    """Which watermark functions without a key meet."""
    arrive(folder / "in", *[[Row("a", at) for at in part] for part in PARTS])
    pipeline = Pipeline("unkeyed")
    rows = timed(pipeline.from_source(ParquetSource(str(folder / "in"), Row, max_files_per_trigger=1)))
    for name in ("plain", "exchanged", "broadcast"):
        STREAMS[name](rows).sink_to(FileSink(str(folder / name), name=name))
    execute(spark, pipeline, "STREAMING", folder)
    return {name: written(folder / name) for name in ("plain", "exchanged", "broadcast")}


class Saved(MapFunction, CheckpointedFunction):
    """Says of each record in which epoch its state was saved before."""

    def initialize_state(self, context):
        self.state = context.get_operator_state_store().get_list_state(ListStateDescriptor("epochs", int))

    def snapshot_state(self, context):
        self.state.update([context.get_checkpoint_id()])

    def map(self, value: Value) -> Seen:
        return Seen(value.value, max(self.state.get(), default=-1), 0, 0)


def epochs(spark, folder):
    """Of which epochs functions hear, and which they save."""
    arrive(folder / "in", *[[Value(number)] for number in range(3)])
    pipeline = listening(str(folder / "in"), FileSink(str(folder / "heard"), name="heard"))
    saving = pipeline.from_source(ParquetSource(str(folder / "in"), Value, max_files_per_trigger=1, name="saving"))
    saving.map(Saved()).set_parallelism(1).sink_to(FileSink(str(folder / "saved"), name="saved"))
    execute(spark, pipeline, "STREAMING", folder)
    return {name: written(folder / name) for name in ("heard", "saved")}


def main(folder):
    spark = session.start()
    found = {mode: named(spark, folder / mode, mode) for mode in ("BATCH", "STREAMING")}
    print(
        json.dumps({**found, "unkeyed": unkeyed(spark, folder / "unkeyed"), "epochs": epochs(spark, folder / "epochs")})
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
