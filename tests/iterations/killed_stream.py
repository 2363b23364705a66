"""A process that runs an iteration as a stream, and is killed: `killed_stream FOLDER KIND HOPS POINT COUNT [STORE]`.

Points: in a round (`level`), after its commit (`round`), after the sinks had an epoch that Spark has not logged
(`sinks`); with state behind the iteration also after its query was handed something (`handed`), and after that query
has taken it (`taken`). It dies at the COUNT-th of them; with POINT `none` it does not. At `worker` and `jvm` one of
these dies in a round, where a record takes its COUNT-th hop, once. Checkpoints are in FOLDER, or in a bucket of the
server at STORE. Where SPARK_REMOTE is set, it runs through Spark Connect: epochs are the server's then, and a job dies
once it has heard of one (`epoch`). At `stopped` it is stopped when it hears of a round. In FOLDER/rounds are the rounds
that it began to compute, where it computes them itself.
"""

import os
import signal
import sys
from pathlib import Path

from dagster_unified.api import Pipeline, iterations
from dagster_unified.connectors import FileSink, ParquetSource
from dagster_unified.engine import session
from dagster_unified.engine.events import IterationEpochCommitted, IterationResumed
from dagster_unified.engine.iterations.epoch_log import EpochLog
from dagster_unified.engine.iterations.levels import SparkLevels
from dagster_unified.engine.streaming.cross_query import CrossQueryLog, QueryInputPosition
from dagster_unified.engine.streaming.epoch import EpochWriter
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.engine.streaming.key_group_query import KeyGroupQuery
from tests.iterations.support import Body, Hop, Visits
from tests.iterations.victims import kill
from tests.object_store import s3a


def hopping(folder, hops, kind="unbounded", more=None, uid=None, behind=False):
    """Records that take so many hops, each written in each hop.

    `more` is an operator that comes behind them in the body; `behind` says that one with state comes behind the loop.
    """
    pipeline = Pipeline("hopping")
    given = pipeline.from_source(ParquetSource(f"{folder}/in", Hop, "numbers", max_files_per_trigger=1))

    def build(variables, data):
        seen = variables[0].key_by("number").process(Visits())
        further = seen.map(lambda hop: hop._replace(hops=hop.hops + 1), Hop).filter(lambda hop: hop.hops <= hops)
        return iterations.IterationBodyResult([further.key_by("number")], [seen if more is None else more(seen)])

    variables, config = [given.key_by("number")], iterations.IterationConfig(uid=uid)
    if kind == "unbounded":
        (out,) = iterations.iterate_unbounded_streams(variables, [], Body(build), config)
    else:
        (out,) = iterations.iterate_bounded_streams_until_termination(variables, [], Body(build), config)
    if behind:
        out = out.key_by("number").process(Visits())
    out.sink_to(FileSink(f"{folder}/out", name="out"))
    return pipeline


def dying(owner, name, count):
    """Has a method kill the process once it has returned for the `count`-th time."""
    method, left = getattr(owner, name), [count]

    def run(self, *given, **named):
        found = method(self, *given, **named)
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, name, run)


def noting(file):
    """Notes in a file which rounds are computed."""
    run = SparkLevels.run

    def noted(self, level, epoch, terminated, *given):
        if level == 0 and not terminated:
            with open(file, "a") as rounds:
                rounds.write(f"{epoch}\n")
        return run(self, level, epoch, terminated, *given)

    SparkLevels.run = noted


class Killing:
    """A function in a body that kills a process when the first record takes its `count`-th hop."""

    def __init__(self, folder, victim, count):
        self.died, self.victim, self.count = Path(folder, "died"), victim, count

    def __call__(self, hop: Hop) -> Hop:
        if hop.hops == self.count and not self.died.exists():
            self.died.touch()
            kill(self.victim)
        return hop


LOOP = {"level": (SparkLevels, "run"), "round": (EpochLog, "commit"), "sinks": (EpochWriter, "commit")}
POINTS = {
    "unbounded": LOOP,
    "bounded": LOOP,
    "behind": {
        "handed": (CrossQueryLog, "commit"),
        "taken": (QueryInputPosition, "reached"),
        "sinks": (EpochWriter, "commit"),
    },
}

HEARD = (KeyGroupQuery, "committed")


def options(folder, checkpoints=""):
    return {
        "execution.runtime-mode": "STREAMING",
        "execution.checkpointing.dir": checkpoints or f"{folder}/checkpoints",
        "pipeline.max-parallelism": 4,
        "parallelism.default": 2,
    }


def main(folder, kind, hops, point, count, store=""):
    more = None
    noting(Path(folder, "rounds"))
    if point in POINTS[kind]:
        dying(*POINTS[kind][point], count)
    elif point == "epoch":
        dying(*HEARD, count)
    elif point in ("worker", "jvm"):
        killing = Killing(folder, point, count)
        more = lambda seen: seen.map(killing)  # noqa: E731
    config = {"spark.sql.shuffle.partitions": "2", **(s3a(Path(folder), store) if store else {})}
    remote = os.environ.get("SPARK_REMOTE")
    spark = session.start(remote=remote) if remote else session.start("local[2,3]", config=config)
    behind = kind == "behind"
    plan = hopping(folder, hops, "unbounded" if behind else kind, more, behind=behind).plan(
        options(folder, "s3://lake/checkpoints" if store else "")
    )
    seen = []
    job = StreamingJob(plan, spark, Start("test", patience=1), seen.append)
    events = (IterationEpochCommitted, IterationResumed)
    print(job.run(lambda: point == "stopped" and any(isinstance(e, events) for e in seen)), flush=True)
    if point == "stopped":
        print(*(type(e).__name__ for e in seen if isinstance(e, events)))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5]), *sys.argv[6:])
