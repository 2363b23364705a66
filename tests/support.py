"""What tests of many folders use."""

import os
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.engine.events import EpochCommitted
from dagster_unified.records import record_type
from dagster_unified.testing import run_pipeline

MODES = pytest.mark.parametrize("mode", ["BATCH", "STREAMING"])


class Event(NamedTuple):
    key: str
    at: int
    value: int


class Sale(NamedTuple):
    shop: str
    amount: int


def results(stream, mode="STREAMING", **how):
    """What a stream gives in the harness."""
    stream.print("out")
    return run_pipeline(stream._pipeline, mode, **how).sinks["out"]


def run_stages(plan, spark, folder, run="run"):
    """Runs the stages of a plan on Spark."""
    return run_all(Run(plan, spark, IntermediateStore(f"{folder}/store"), run, run))


def streaming(folder, groups):
    """The options of a job with its checkpoints below a folder."""
    return {
        "execution.runtime-mode": "STREAMING",
        "execution.checkpointing.dir": f"{folder}/checkpoints",
        "pipeline.max-parallelism": groups,
    }


def committed(seen):
    """Keeps the epochs that a job commits."""
    return lambda event: seen.append(event) if isinstance(event, EpochCommitted) else None


def arrive(folder, *parts, first=0, of=None):
    """Writes each part's records into a file and gives the folder; a source takes them in the order of their age."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, records in enumerate(parts, first):
        file = folder / f"{number}.parquet"
        batch = record_type(of or type(records[0])).to_batch(records)
        pq.write_table(pa.Table.from_batches([batch]), file)
        os.utime(file, (number, number))
    return str(folder)


def table_rows(path):
    """The rows of a Delta table."""
    return sorted(tuple(row.values()) for row in DeltaTable(str(path)).to_pyarrow_table().to_pylist())


def file_rows(path):
    """The rows of a Parquet file, or of all of a folder."""
    return sorted(tuple(row.values()) for row in pq.read_table(path).to_pylist())
