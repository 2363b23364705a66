"""Iterations in BATCH: k-means against what a Spark user writes, connected components against a loop over DataFrames.

Also what a round costs by itself, late, where few keys are touched, and where subtasks need not wait for each other; a
hop in STREAMING; and a run that is killed. All of k-means' variants move the same centroids over the same million
points.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from benchmarks.bars import Bar, Measurement, Options
from benchmarks.resumed_iteration import resumed
from benchmarks.worker_memory import largest_worker
from dagster_unified.api import FlatMapFunction, Pipeline, RuntimeContext, iterations
from dagster_unified.connectors import FileSink, ParquetSource
from dagster_unified.engine import session
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.engine.events import EpochCommitted, Event, IterationEpochCommitted, Observer, ignore_events
from dagster_unified.engine.iterations.epoch_log import Epoch
from dagster_unified.engine.streaming.job import Start, StreamingJob
from jobs.graph_components import LeastLabels, Offer, Vertex

POINTS, DIMENSIONS, CLUSTERS, ROUNDS = 1_000_000, 10, 10, 15
VERTICES, EDGES = 300_000, 500_000
NAMES = [f"c{n}" for n in range(DIMENSIONS)]
UNEVEN_ROUNDS, WORK = 24, 0.2
HOPPING, EPOCH = 15, 20_000
WARM = 3
"""Rounds before those that are measured."""
TURNS = 3
"""How often what is compared runs, one after the other: the first is the first that its JVM runs."""

SHORT_TURNS = 9
"""The same where fifty rounds are a third of a second, in which a machine's speed changes."""


def measure(_: Options) -> tuple[list[Bar], list[Measurement]]:
    folder = tempfile.mkdtemp(prefix="bench")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    spark = session.start("local[2]", config={"spark.driver.memory": "4g", "spark.sql.shuffle.partitions": "4"})
    try:
        bars = [
            *_kmeans(spark, folder),
            *_components(spark, folder),
            *_empty(spark, folder),
            *_stale(spark, folder),
            *_hop(spark, folder),
        ]
        spark.stop()
        return [*bars, *resumed(folder)], []
    finally:
        spark.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _rounds(spark: SparkSession, folder: str, pipeline: Pipeline) -> list[float]:
    """The seconds of each round of a pipeline's iteration."""
    return [one.seconds for one in _epochs(spark, folder, pipeline)]


def _epochs(spark: SparkSession, folder: str, pipeline: Pipeline, also: Observer = ignore_events) -> list[Epoch]:
    """What was committed of each round of a pipeline's iteration; `also` hears of it."""
    found: list[Epoch] = []

    def observe(event: Event) -> None:
        also(event)
        if isinstance(event, IterationEpochCommitted):
            found.append(event.epoch)

    plan = pipeline.plan({"execution.runtime-mode": "BATCH", "parallelism.default": 2})
    store = IntermediateStore(f"{folder}/store")
    run_all(Run(plan, spark, store, pipeline.name, pipeline.name, observe=observe))
    return found


# k-means


class Sums(NamedTuple):
    cluster: int
    count: int  # type: ignore[assignment]
    sums: list[float]


class Centroid(NamedTuple):
    cluster: int
    at: list[float]


Point = NamedTuple("Point", [(name, float) for name in NAMES])  # type: ignore[misc]


def nearest(matrix: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """The cluster of each row."""
    return (-2.0 * (matrix @ centroids.T) + (centroids * centroids).sum(1)).argmin(1)


def summed(matrix: np.ndarray, centroids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums and counts of the rows of each cluster."""
    near = nearest(matrix, centroids)
    sums = [np.bincount(near, weights=matrix[:, j], minlength=CLUSTERS) for j in range(DIMENSIONS)]
    return np.stack(sums, 1), np.bincount(near, minlength=CLUSTERS)


def matrix_of(batch: pa.RecordBatch) -> np.ndarray:
    return np.stack([batch.column(j).to_numpy(zero_copy_only=False) for j in range(DIMENSIONS)], 1)


def assign(points: pa.RecordBatch, centroids: pa.Table) -> pa.RecordBatch:
    """The sums of a batch of points by cluster."""
    sums, counts = summed(matrix_of(points), np.array(centroids.sort_by("cluster")["at"].to_pylist()))
    columns = [pa.array(range(CLUSTERS)), pa.array(counts.astype("int64")), pa.array(sums.tolist())]
    return pa.RecordBatch.from_arrays(columns, names=["cluster", "count", "sums"])


class Update(FlatMapFunction[Sums, Centroid], iterations.IterationListener[Centroid]):
    """Moves the centroids at the end of a round."""

    def __init__(self) -> None:
        self.sums, self.counts = np.zeros((CLUSTERS, DIMENSIONS)), np.zeros(CLUSTERS)

    def flat_map(self, value: Sums) -> list[Centroid]:
        self.sums[value.cluster] += value.sums
        self.counts[value.cluster] += value.count
        return []

    def on_epoch_watermark_incremented(
        self,
        epoch_watermark: int,
        context: iterations.EpochContext,
        collector: iterations.EpochCollector[Centroid],
    ) -> None:
        for cluster, at in enumerate(self.sums / np.maximum(self.counts, 1)[:, None]):
            collector.collect(Centroid(cluster, at.tolist()))


class KMeans(iterations.IterationBody):
    def process(self, variables, data):
        sums = data[0].connect(variables[0].broadcast()).map_batches(assign, Sums)
        moved = sums.global_().flat_map(Update(), Centroid)
        ends = moved.flat_map(iterations.TerminateOnMaxIter(ROUNDS))
        return iterations.IterationBodyResult([moved], [iterations.forward_inputs_of_last_round(moved)], ends)


def _kmeans(spark: SparkSession, folder: str) -> list[Bar]:
    random = np.random.default_rng(1)
    centers = random.normal(0, 4, (CLUSTERS, DIMENSIONS))
    points = centers[random.integers(0, CLUSTERS, POINTS)] + random.normal(0, 2, (POINTS, DIMENSIONS))
    table = pa.table({name: points[:, j] for j, name in enumerate(NAMES)})
    pq.write_table(table, f"{folder}/points.parquet", row_group_size=POINTS // 4)
    start = points[:CLUSTERS].copy()
    frame = spark.read.parquet(f"{folder}/points.parquet")

    pipeline = Pipeline("kmeans")
    given = pipeline.from_source(ParquetSource(f"{folder}/points.parquet", Point, name="points"))
    first = [Centroid(n, at.tolist()) for n, at in enumerate(start)]
    model = pipeline.from_collection(first, Centroid, name="centroids")
    data = iterations.ReplayableDataStreams(replayed=[given])
    (out,) = iterations.iterate_bounded_streams_until_termination([model], data, KMeans())
    out.sink_to(FileSink(f"{folder}/centroids"))
    cached = frame.repartition(2).persist()
    cached.count()
    tasks = spark.range(0, 2, 1, 2)
    (Path(folder) / "mapped").mkdir()
    frame.repartition(2).mapInArrow(functools.partial(_to_file, folder), "rows long").collect()
    library, by_hand, mapped = [], [], []
    for _ in range(TURNS):
        library += _rounds(spark, folder, pipeline)[WARM:]
        found = pq.read_table(f"{folder}/centroids").sort_by("cluster")["at"].to_pylist()
        seconds, ends = _loop(start, functools.partial(_with_pandas, cached))
        _same(found, ends)
        by_hand += seconds[WARM:]
        seconds, ends = _loop(start, functools.partial(_with_files, tasks, folder))
        _same(found, ends)
        mapped += seconds[WARM:]
    cached.unpersist()
    a, b, c = (statistics.median(seconds) for seconds in (library, by_hand, mapped))
    print(f"k-means, a round: {a:.3f} s, with pandas_udf {b:.3f} s, mapped files by hand {c:.3f} s")
    return [
        Bar("iterations.kmeans_vs_pandas_udf", b / a, 3.0),
        Bar("iterations.kmeans_vs_mapped_files", a / c, 1.15, True),
    ]


def _loop(start: np.ndarray, step: Callable[[np.ndarray, int], np.ndarray]) -> tuple[list[float], np.ndarray]:
    centroids, seconds = start, []
    for number in range(ROUNDS):
        begun = time.perf_counter()
        centroids = step(centroids, number)
        seconds.append(time.perf_counter() - begun)
    return seconds, centroids


def _same(found: list[list[float]], ends: np.ndarray) -> None:
    if not np.allclose(np.array(found), ends):
        raise RuntimeError("the variants of k-means disagree")


def _with_pandas(cached, centroids: np.ndarray, number: int) -> np.ndarray:
    """A round as a Spark user writes it."""

    @F.pandas_udf("int")  # type: ignore[attr-defined]
    def near(columns: pd.DataFrame) -> pd.Series:
        return pd.Series(nearest(columns.to_numpy(), centroids).astype("int32"))

    means = [F.avg(name).alias(name) for name in NAMES]
    moved = centroids.copy()
    for row in cached.withColumn("near", near(F.struct(*NAMES))).groupBy("near").agg(*means).collect():
        moved[row["near"]] = [row[name] for name in NAMES]
    return moved


def _partition() -> int:
    context = TaskContext.get()
    assert context is not None
    return context.partitionId()


def _to_file(folder: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    table = pa.Table.from_batches(batches)
    with pa.ipc.new_file(f"{folder}/mapped/{_partition()}.arrow", table.schema) as file:
        file.write_table(table)
    yield pa.RecordBatch.from_pydict({"rows": [table.num_rows]})


def _with_files(tasks, folder: str, centroids: np.ndarray, number: int) -> np.ndarray:
    """A round whose workers map files of their own, with a manifest that is committed."""
    rows = tasks.mapInArrow(functools.partial(_over_files, folder, centroids), "sums array<double>, counts array<long>")
    found = rows.collect()
    sums = sum(np.array(row["sums"]).reshape(CLUSTERS, DIMENSIONS) for row in found)
    moved = sums / np.maximum(sum(np.array(row["counts"]) for row in found), 1)[:, None]
    with open(f"{folder}/.manifest", "w") as file:
        json.dump({"epoch": number, "feedback": moved.tolist()}, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(f"{folder}/.manifest", f"{folder}/epoch-{number}.json")
    return moved


def _over_files(folder: str, centroids: np.ndarray, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in batches:
        pass
    sums, counts = np.zeros((CLUSTERS, DIMENSIONS)), np.zeros(CLUSTERS)
    with pa.memory_map(f"{folder}/mapped/{_partition()}.arrow") as mapped:
        file = pa.ipc.open_file(mapped)
        for number in range(file.num_record_batches):
            own, of = summed(matrix_of(file.get_batch(number)), centroids)
            sums, counts = sums + own, counts + of
    yield pa.RecordBatch.from_pydict({"sums": [sums.ravel().tolist()], "counts": [counts.astype("int64").tolist()]})


# Connected components


class Least(iterations.DeltaFunction[Vertex, Offer]):
    """A function per key: a vertex that is offered a smaller label takes it, and offers it to its neighbours."""

    def update(self, solution: Vertex | None, workset: Sequence[Offer]) -> tuple[Vertex | None, Iterable[Offer]]:
        assert solution is not None
        label = min([offer.label for offer in workset])
        if solution.label is not None and solution.label <= label:
            return None, ()
        return Vertex(solution.vertex, label, solution.near), [Offer(vertex, label) for vertex in solution.near]


def _components(spark: SparkSession, folder: str) -> list[Bar]:
    random = np.random.default_rng(7)
    a, b = random.integers(0, VERTICES, EDGES), random.integers(0, VERTICES, EDGES)
    a, b = a[a != b], b[a != b]
    source, target = np.concatenate([a, b]), np.concatenate([b, a])
    pq.write_table(pa.table({"vertex": source, "value": target}), f"{folder}/edges.parquet")
    order = np.argsort(source, kind="stable")
    vertices, starts = np.unique(source[order], return_index=True)
    near = pa.ListArray.from_arrays(np.append(starts, len(source)).astype("int32"), target[order])
    nothing = pa.nulls(len(vertices), pa.int64())
    pq.write_table(pa.table({"vertex": vertices, "label": nothing, "near": near}), f"{folder}/vertices.parquet")
    pq.write_table(pa.table({"vertex": vertices, "label": vertices}), f"{folder}/offers.parquet")
    turns, few = [], []
    for _ in range(TURNS):
        epochs = _epochs(spark, folder, _delta(folder, Least()))
        late, keys = _round_of_few_keys(epochs)
        few.append(late / epochs[0].seconds)
        vectorised = _rounds(spark, folder, _delta(folder, LeastLabels()))
        turns.append(([one.seconds for one in epochs], vectorised, _over_dataframes(spark, folder)))
        _same_components(folder)
    library, vectorised, by_hand = (sorted(of, key=sum)[TURNS // 2] for of in zip(*turns, strict=True))
    print(
        f"components: {len(library)} rounds in {sum(library):.1f} s, by batches {sum(vectorised):.1f} s, over"
        f" DataFrames {len(by_hand)} in {sum(by_hand):.1f} s; the first round {library[0]:.2f} s,"
        f" one of {keys:,} records {late:.2f} s"
    )
    return [
        Bar("iterations.components_vs_dataframes", sum(by_hand) / sum(library), 1.5),
        Bar("iterations.components_by_batches_vs_dataframes", sum(by_hand) / sum(vectorised), 8.0),
        Bar("iterations.round_of_few_keys", statistics.median(few), 0.15, at_most=True),
    ]


def _round_of_few_keys(epochs: Sequence[Epoch]) -> tuple[float, int]:
    """The seconds of the round that was fed records for a hundredth of the vertices, more or less, and how many."""
    taken = [(before.feedback, one.seconds) for before, one in itertools.pairwise(epochs) if before.feedback]
    count, seconds = min(taken, key=lambda one: abs(math.log(one[0] / (VERTICES / 100))))
    return seconds, count


def _delta(folder: str, function: iterations.DeltaFunction[Vertex, Offer] | iterations.BatchDeltaFunction) -> Pipeline:
    pipeline = Pipeline(type(function).__name__)
    vertices = pipeline.from_source(ParquetSource(f"{folder}/vertices.parquet", Vertex, name="vertices"))
    offers = pipeline.from_source(ParquetSource(f"{folder}/offers.parquet", Offer, name="offers"))
    found = iterations.iterate_delta(
        vertices.key_by("vertex"), offers.key_by("vertex"), function, combine={"label": "min"}
    )
    found.sink_to(FileSink(f"{folder}/{pipeline.name}"))
    return pipeline


def _same_components(folder: str) -> None:
    """Raises where the variants disagree, or where the label of a vertex is not its component's least."""
    found = [
        pq.read_table(f"{folder}/{one.__name__}", columns=["vertex", "label"]).sort_by("vertex")
        for one in (Least, LeastLabels)
    ]
    edges = pq.read_table(f"{folder}/edges.parquet")
    labels = np.zeros(VERTICES, dtype="int64")
    labels[found[0]["vertex"]] = found[0]["label"]
    if not found[0].equals(found[1]) or (labels[edges["vertex"]] != labels[edges["value"]]).any():
        raise RuntimeError("the variants of connected components disagree")


def _over_dataframes(spark: SparkSession, folder: str) -> list[float]:
    """The delta loop of a Spark user: joins, and a local checkpoint in each round."""
    edges = spark.read.parquet(f"{folder}/edges.parquet").select("vertex", "value").repartition(4, "vertex").persist()
    edges.count()
    labels = edges.select(F.col("vertex").alias("id")).distinct().withColumn("label", F.col("id"))
    labels = work = labels.repartition(4, "id").localCheckpoint()
    seconds = []
    while True:
        begun = time.perf_counter()
        joined = edges.join(work, edges["vertex"] == work["id"])
        offered = joined.groupBy(F.col("value").alias("id")).agg(F.min("label").alias("offered"))
        changed = offered.join(labels, "id").where("offered < label")
        changed = changed.select("id", F.col("offered").alias("label")).localCheckpoint()
        count = changed.count()
        if count:
            better = changed.withColumnRenamed("label", "better")
            label = F.coalesce("better", "label").alias("label")
            labels = labels.join(better, "id", "left").select("id", label).localCheckpoint()
            work = changed
        seconds.append(time.perf_counter() - begun)
        if not count:
            edges.unpersist()
            return seconds


# A round by itself


class Around(iterations.IterationBody):
    """Hands four records on, for a thousand rounds."""

    def process(self, variables, data):
        same = variables[0].map(lambda n: n, int)
        ends = same.flat_map(iterations.TerminateOnMaxIter(1000))
        return iterations.IterationBodyResult([same], [same.filter(lambda n: n < 0)], ends)


def _empty(spark: SparkSession, folder: str) -> list[Bar]:
    pipeline = Pipeline("around")
    numbers = pipeline.from_collection([1, 2, 3, 4], name="numbers")
    (out,) = iterations.iterate_bounded_streams_until_termination([numbers], [], Around())
    out.sink_to(FileSink(f"{folder}/around"))
    turns = []
    for _ in range(SHORT_TURNS):
        seconds = _rounds(spark, folder, pipeline)
        turns.append((statistics.median(seconds[10:60]), statistics.median(seconds[-50:])))
    driver, worker = _memory_of_rounds(spark, folder, pipeline)
    tenth, last = sorted(turns, key=lambda turn: turn[1] / turn[0])[SHORT_TURNS // 2]
    print(f"an empty round: {1000 * tenth:.0f} ms, the thousandth {1000 * last:.0f} ms")
    return [
        Bar("iterations.empty_round_seconds", tenth, 0.12, at_most=True),
        Bar("iterations.round_1000_vs_10", last / tenth, 1.1, at_most=True),
        Bar("iterations.driver_memory_in_round_1000_vs_10", driver, 1.1, at_most=True),
        Bar("iterations.worker_memory_in_round_1000_vs_10", worker, 1.1, at_most=True),
    ]


def _memory_of_rounds(spark: SparkSession, folder: str, pipeline: Pipeline) -> tuple[float, float]:
    """What driver and worker hold late, as a multiple of what they hold early: live objects of the JVM, and PSS."""
    found: dict[int, tuple[float, float]] = {}
    jvm = spark._jvm.java.lang  # type: ignore[union-attr]

    def observe(event: Event) -> None:
        if isinstance(event, IterationEpochCommitted) and event.epoch.number in (10, 990):
            jvm.System.gc()
            runtime = jvm.Runtime.getRuntime()
            found[event.epoch.number] = (runtime.totalMemory() - runtime.freeMemory(), largest_worker())

    _epochs(spark, folder, pipeline, observe)
    (early, late) = found[10], found[990]
    return late[0] / early[0], late[1] / early[1]


# Subtasks that need not wait for each other


class Uneven(FlatMapFunction[int, int], iterations.IterationListener[int]):
    """Two subtasks, of which in each round another one works for twice as long."""

    def open(self, runtime_context: RuntimeContext) -> None:
        self.subtask = runtime_context.get_index_of_this_subtask()

    def flat_map(self, value: int) -> list[int]:
        return [value]

    def on_epoch_watermark_incremented(
        self,
        epoch_watermark: int,
        context: iterations.EpochContext,
        collector: iterations.EpochCollector[int],
    ) -> None:
        time.sleep(WORK * (1 + (epoch_watermark + self.subtask) % 2))


class Exchanging(iterations.IterationBody):
    def process(self, variables, data):
        worked = variables[0].rebalance().flat_map(Uneven())
        ends = worked.flat_map(iterations.TerminateOnMaxIter(UNEVEN_ROUNDS))
        return iterations.IterationBodyResult([worked], [worked.filter(lambda n: n < 0)], ends)


def _stale(spark: SparkSession, folder: str) -> list[Bar]:
    seconds = {}
    for staleness in (0, 2):
        pipeline = Pipeline(f"staleness{staleness}")
        numbers = pipeline.from_collection(list(range(100)), int, name="numbers")
        config = iterations.IterationConfig(staleness=staleness)
        (out,) = iterations.iterate_bounded_streams_until_termination([numbers], [], Exchanging(), config)
        out.sink_to(FileSink(f"{folder}/{pipeline.name}"))
        seconds[staleness] = sum(_rounds(spark, folder, pipeline))
    print(f"{UNEVEN_ROUNDS} uneven rounds: {seconds[0]:.1f} s in step, {seconds[2]:.1f} s with a staleness of 2")
    return [Bar("iterations.staleness", seconds[0] / seconds[2], 1.25)]


# A hop in STREAMING


class Hop(NamedTuple):
    number: int
    hops: int


class Going(iterations.IterationBody):
    """One record in a hundred goes round, once; or none."""

    def __init__(self, hops: int) -> None:
        self.hops = hops

    def process(self, variables, data):
        hops = self.hops
        further = variables[0].filter(lambda hop: hop.hops < hops and hop.number % 100 == 0)
        fed_back = further.map(lambda hop: Hop(hop.number, hop.hops + 1), Hop)
        return iterations.IterationBodyResult([fed_back], [variables[0].map(lambda hop: hop, Hop)])


def _hop(spark: SparkSession, folder: str) -> list[Bar]:
    (Path(folder) / "hops").mkdir()
    numbers = np.arange(EPOCH)
    for file in range(WARM + HOPPING):
        table = pa.table({"number": numbers + file * EPOCH, "hops": np.zeros(EPOCH, dtype="int64")})
        pq.write_table(table, f"{folder}/hops/{file:03}.parquet")
    without, with_it = (_epoch_seconds(spark, folder, hops) for hops in (0, 1))
    print(f"an epoch of an unbounded iteration: {with_it:.2f} s with a hop, {without:.2f} s without")
    return [Bar("iterations.hop_vs_epoch", with_it / without, 1.5, at_most=True)]


def _epoch_seconds(spark: SparkSession, folder: str, hops: int) -> float:
    """The seconds of an epoch in which records take so many hops."""
    pipeline = Pipeline(f"hops{hops}")
    given = pipeline.from_source(ParquetSource(f"{folder}/hops", Hop, "numbers", max_files_per_trigger=1))
    (out,) = iterations.iterate_unbounded_streams([given], [], Going(hops))
    out.sink_to(FileSink(f"{folder}/{pipeline.name}"))
    seconds: list[float] = []

    def observe(event: Event) -> None:
        if isinstance(event, EpochCommitted) and event.rows_in:
            seconds.append(event.seconds)

    options = {
        "execution.runtime-mode": "STREAMING",
        "execution.checkpointing.dir": f"{folder}/{pipeline.name}-checkpoints",
        "parallelism.default": 2,
    }
    StreamingJob(pipeline.plan(options), spark, Start(pipeline.name), observe).run()
    return statistics.median(seconds[WARM:])
