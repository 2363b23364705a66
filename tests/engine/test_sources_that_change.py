"""New code of a stream whose sources are others, or come in another order, than those in its checkpoint."""

import os
import re
import shutil
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_unified.api import Pipeline
from dagster_unified.api import functions as F
from dagster_unified.connectors import DeltaSink, ParquetSource
from dagster_unified.engine.streaming.checkpoint import CheckpointDirectory
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.engine.streaming.savepoints.request import take
from dagster_unified.errors import StateError
from tests.support import Sale, table_rows

pytestmark = pytest.mark.spark

DEADLINE = 120.0


class Shops:
    """A stream of the union of some folders: its records, their totals by key, or Spark's totals."""

    def __init__(self, spark, folder):
        self.spark, self.folder = spark, folder
        self.directory = CheckpointDirectory(f"{folder}/checkpoints", "shops")

    def arrive(self, name, *amounts):
        (self.folder / name).mkdir(exist_ok=True)
        number = len(list((self.folder / name).iterdir()))
        pq.write_table(
            pa.Table.from_pylist([Sale(name, n)._asdict() for n in amounts]), self.folder / name / f".{number}"
        )
        os.rename(self.folder / name / f".{number}", self.folder / name / f"{number}.parquet")

    def plan(self, names, kind="records", **options):
        pipeline = Pipeline("shops")
        first, *others = [
            pipeline.from_source(ParquetSource(f"{self.folder}/{name}", Sale, name=name, monitor=True))
            for name in names
        ]
        stream = first.union(*others)
        mode = {"mode": "append"} if kind == "records" else {"mode": "upsert", "key": "shop"}
        if kind == "totals":
            stream = stream.key_by("shop").reduce(lambda a, b: Sale(a.shop, a.amount + b.amount)).uid("totals")
        elif kind == "Spark's totals":
            totals = stream.key_by("shop").agg(F.sum("amount").alias("amount"), output_type=Sale)
            stream = totals.uid("totals")
            options["state.native-aggregates"] = "SPARK"
        stream.sink_to(DeltaSink(f"{self.folder}/table", name="table", **mode))
        return pipeline.plan({"execution.checkpointing.dir": f"{self.folder}/checkpoints", **options})

    def run(self, names, until, kind="records", **options):
        """Runs until the table has these rows, and a moment longer, in which more of them may come."""
        begun, reached = time.monotonic(), []

        def enough():
            if not reached and self.rows() == sorted(until):
                reached.append(time.monotonic())
            assert time.monotonic() < begun + DEADLINE, self.rows()
            return bool(reached) and time.monotonic() > reached[0] + 3.0

        StreamingJob(self.plan(names, kind, **options), self.spark, Start("job")).run(enough)
        assert self.rows() == sorted(until)

    def rows(self):
        if not (self.folder / "table/_delta_log").exists():
            return []
        return table_rows(f"{self.folder}/table")


@pytest.mark.a_day(1)
@pytest.mark.parametrize("kind", ["records", "totals"])
def test_sources_that_change_places_are_each_read_on(spark, tmp_path, kind):
    shops, sales = Shops(spark, tmp_path), []
    for names, arrived in [("ab", [("a", 1), ("b", 10), ("b", 20)]), ("ba", [("a", 2)]), ("ab", [("b", 40)])]:
        for sale in arrived:
            shops.arrive(*sale)
        sales += arrived
        totals = [(shop, sum(amount for of, amount in sales if of == shop)) for shop in "ab"]
        shops.run(names, sales if kind == "records" else totals, kind)


def test_sources_that_come_or_go_need_a_savepoint(spark, tmp_path):
    shops = Shops(spark, tmp_path)
    shops.arrive("a", 1), shops.arrive("b", 10), shops.arrive("c", 100)
    shops.run("ab", [("a", 1), ("b", 10)], "totals")
    changes = ("abc", "a", "ac")
    for names in changes:
        others = (
            rf"shops: the sources are {', '.join(names)}, and the checkpoint has what was read of a, b; .* savepoint"
        )
        with pytest.raises(StateError, match=others):
            shops.run(names, [], "totals")
        other = shops.plan(names, "totals")
        stopped = take(other, shops.directory, "asker", "test", lambda: spark, path=f"{tmp_path}/wrong")
        assert re.search(others, stopped.error)
    saved = f"{tmp_path}/saved"
    take(shops.plan("ab", "totals"), shops.directory, "asker", "test", lambda: spark, path=saved)
    shops.arrive("a", 2)
    for names in changes:
        shutil.rmtree(tmp_path / "table")  # of b there is nothing new
        options = {
            "execution.checkpointing.dir": f"{tmp_path}/new {names}",
            "execution.state-recovery.path": saved,
            "execution.savepoint.ignore-unclaimed-state": True,
        }
        more = [("c", 100)] if "c" in names else []
        shops.run(names, [("a", 3), *more], "totals", **options)


def test_a_query_of_sparks_reads_its_sources_in_the_order_that_they_had(spark, tmp_path):
    shops = Shops(spark, tmp_path)
    shops.arrive("a", 1), shops.arrive("b", 10)
    shops.run("ab", [("a", 1), ("b", 10)], "Spark's totals")
    with pytest.raises(StateError, match="the sources are b, a, and the checkpoint has what was read of a, b"):
        shops.run("ba", [], "Spark's totals")
