"""Asset checks of a pipeline's sinks.

Schema, unique keys, row counts against history, freshness, and parity of the two modes.
"""

# No `from __future__ import annotations` here: Dagster reads the annotations of a check's function as objects.
import re
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias, TypeGuard

import pyarrow as pa
import pyarrow.compute as pc
from dagster import (
    AssetCheckExecutionContext,
    AssetCheckResult,
    AssetChecksDefinition,
    AssetCheckSeverity,
    AssetCheckSpec,
    AssetKey,
    AssetRecordsFilter,
    MetadataValue,
    TableColumn,
    TableRecord,
    TableSchema,
    asset_check,
    build_last_update_freshness_checks,
)

from dagster_unified.connectors.protocol.commits import SparkSink
from dagster_unified.connectors.protocol.frame import spark_schema
from dagster_unified.engine.batch.parity import batch_tables
from dagster_unified.engine.comparison import Comparison, compare
from dagster_unified.errors import ConfigurationError
from dagster_unified.graph.connectors import Sink, Slice
from dagster_unified.graph.nodes import Graph, SinkNode
from dagster_unified.graph.plan import Plan
from dagster_unified.orchestration._dagster_compat import without_warning
from dagster_unified.orchestration.metadata import CARRIED_FROM, MADE_BY
from dagster_unified.orchestration.partitions import check_lengths
from dagster_unified.orchestration.resources import OBJECT_STORE, connections, session_of


@dataclass(frozen=True)
class Parity:
    """Re-runs a slice of a streaming pipeline's input in BATCH, and compares it with the sinks' tables.

    `slice` gives the slice, to which sources are bounded as to a partition; None is all input that is there. `where`
    says which rows of a table belong to it. What the stream has not come to yet, such as windows that are open,
    differs: choose a slice that its watermark has passed.
    """

    slice: Callable[[], Slice | None] = lambda: None
    where: Callable[[Slice | None], pc.Expression | None] = lambda slice_: None
    options: Mapping[str, Any] = field(default_factory=dict)
    differences: int = 10


@dataclass(frozen=True)
class Checks:
    """Which checks the assets of a pipeline's sinks get.

    `rows_within` is by which part a materialization's row count may differ from the median of the `history` before it
    (0.5: from half to one and a half times), of BATCH only; `fresh_within` how old the last materialization may be, or
    of a stream the last rows that it wrote. Of a run over several partitions each is compared, with what was there
    before the run. With `blocking` a check that fails stops the assets after it in its run.

    `schema`, `unique_keys` and `parity` read the tables of a `DeltaSink` and a `FileSink`; other sinks have the other
    checks. A database keeps the types and keys of its tables itself.
    """

    schema: bool = True
    unique_keys: bool = True
    rows_within: float | None = None
    history: int = 10
    fresh_within: timedelta | None = None
    parity: Parity | None = None
    blocking: bool = False

    def __post_init__(self) -> None:
        check_lengths("Checks", timedelta(seconds=1), fresh_within=self.fresh_within)
        if self.rows_within is not None and not (isinstance(self.rows_within, (int, float)) and self.rows_within >= 0):
            raise ConfigurationError(
                f"checks: rows_within is a number such as 0.5, not negative, and not {self.rows_within!r}"
            )
        if self.history < 1:
            raise ConfigurationError("checks: history must be at least 1")


def sink_checks(
    graph: Graph, planned: Plan, checks: Checks, assets: Mapping[str, AssetKey]
) -> list[AssetChecksDefinition]:
    """Return the checks of a pipeline. `assets` are those of its sinks, by name."""
    built: list[AssetChecksDefinition] = []
    if checks.parity is not None and not any(_is_read(node.sink) for node in planned.graph.sinks):
        raise ConfigurationError(
            f"{planned.name}: parity compares the tables of a DeltaSink or a FileSink, and there is none; leave"
            " parity out"
        )
    for node in planned.graph.sinks:
        declared = partial(
            asset_check,
            asset=assets[node.name],
            blocking=checks.blocking,
            required_resource_keys={OBJECT_STORE, *graph.resource_keys},
        )
        if _is_read(node.sink):
            if checks.schema:
                built.append(_schema(planned, node, node.sink, declared))
            if checks.unique_keys and node.sink.key:
                built.append(_unique(planned, node, node.sink, declared))
            if checks.parity is not None:
                built.append(_parity(graph, planned, node, node.sink, declared, checks.parity))
    if checks.rows_within is not None:
        built += [_rows(key, checks, checks.rows_within) for key in dict.fromkeys(assets.values())]
    if checks.fresh_within is not None:
        with without_warning("build_last_update_freshness_checks"):
            built += build_last_update_freshness_checks(
                assets=list(dict.fromkeys(assets.values())),
                lower_bound_delta=checks.fresh_within,
                severity=AssetCheckSeverity.ERROR if checks.blocking else AssetCheckSeverity.WARN,
                blocking=checks.blocking,
            )
    return built


def _is_read(sink: Sink[Any]) -> TypeGuard[SparkSink[Any, Any]]:
    """Return whether checks can read a sink's table, and write a second one elsewhere to compare."""
    return isinstance(sink, SparkSink) and sink.elsewhere("/") is not None


Declare: TypeAlias = "Callable[..., Callable[[Callable[..., AssetCheckResult]], AssetChecksDefinition]]"
"""Dagster's `asset_check`, for the asset of a sink."""


def _schema(planned: Plan, node: SinkNode, sink: SparkSink[Any, Any], declared: Declare) -> AssetChecksDefinition:
    records = planned.graph.written_to(node.id)

    @declared(
        name=_name(node, "schema"), description=f"The table of {node.name} has the columns of {records.describe()}."
    )
    def check() -> AssetCheckResult:
        if not sink.exists():
            return _nothing(planned, node)
        actual = {f.name: f.dataType.simpleString() for f in spark_schema(sink.dataset(records).schema)}
        wanted = {f.name: f.dataType.simpleString() for f in spark_schema(sink.schema_of(records))}
        wrong = [
            f"'{n}' is {actual.get(n, 'missing')}, and should be {t}" for n, t in wanted.items() if actual.get(n) != t
        ]
        more = sorted(set(actual) - set(wanted))
        return AssetCheckResult(
            passed=not wrong,
            description="; ".join(wrong) or "as declared",
            metadata={"columns": str(actual), "further columns": str(more)},
        )

    return check


def _unique(planned: Plan, node: SinkNode, sink: SparkSink[Any, Any], declared: Declare) -> AssetChecksDefinition:
    columns, records = list(sink.key), planned.graph.written_to(node.id)

    @declared(
        name=_name(node, "unique_keys"), description=f"No two rows of {node.name} have the same {', '.join(columns)}."
    )
    def check() -> AssetCheckResult:
        if not sink.exists():
            return _nothing(planned, node)
        dataset = sink.dataset(records)
        missing = [name for name in columns if name not in dataset.schema.names]
        if missing:
            return AssetCheckResult(passed=False, description=f"the table has no column '{missing[0]}'")
        table = dataset.to_table(columns=columns)
        counted = table.group_by(columns).aggregate([([], "count_all")])
        twice = counted.filter(pc.field("count_all") > 1)
        return AssetCheckResult(
            passed=twice.num_rows == 0,
            description=f"{twice.num_rows} keys are there more than once",
            metadata={"rows": table.num_rows, "first": _records(twice.slice(0, 10))},
        )

    return check


def _rows(key: AssetKey, checks: Checks, within: float) -> AssetChecksDefinition:
    @asset_check(
        name="row_count",
        asset=key,
        blocking=checks.blocking,
        description=(
            f"The row count is within {within:.0%} of the median of the {checks.history} materializations before."
        ),
    )
    def check(context: AssetCheckExecutionContext) -> AssetCheckResult:
        counted, before = _counts(context, key, checks.history)
        if not (counted and before):
            now = next(iter(counted.values()), 0)
            return AssetCheckResult(passed=True, description="there is no history yet", metadata={"rows": now})
        median = statistics.median(before)
        partition, now = max(counted.items(), key=lambda item: abs(item[1] - median))
        in_partition = "" if partition is None else f" in partition {partition}"
        return AssetCheckResult(
            passed=abs(now - median) <= within * median,
            severity=AssetCheckSeverity.ERROR if checks.blocking else AssetCheckSeverity.WARN,
            description=f"{now} rows{in_partition}, and {median:g} in the median of the {len(before)} before",
            metadata={"rows": now, "median before": median},
        )

    return check


def _counts(
    context: AssetCheckExecutionContext, key: AssetKey, history: int
) -> tuple[dict[str | None, int], list[int]]:
    """Return the row count of each partition that a run materialized, and those of `history` materializations before.

    The run is the check's own, or the latest where that has materialized nothing.
    """
    wanted = history + 1
    while True:
        recorded = context.instance.fetch_materializations(AssetRecordsFilter(asset_key=key), limit=wanted)
        run = context.run.run_id if any(r.run_id == context.run.run_id for r in recorded.records) else None
        run = run or next((r.run_id for r in recorded.records), None)
        counted: dict[str | None, int] = {}
        before = []
        for record in recorded.records:
            materialization = record.asset_materialization
            count = materialization.metadata.get("dagster/row_count") if materialization is not None else None
            if materialization is None or count is None:
                continue
            if record.run_id == run and (run or not counted):  # those that people report have no run
                counted.setdefault(materialization.partition, int(count.value))
            elif counted:  # of a run that has ended meanwhile it is not known that it was before
                before.append(int(count.value))
        if len(before) >= history or not recorded.has_more:
            return counted, before[:history]
        wanted *= 4


def _parity(
    graph: Graph,
    planned: Plan,
    node: SinkNode,
    sink: SparkSink[Any, Any],
    declared: Declare,
    parity: Parity,
) -> AssetChecksDefinition:
    records = planned.graph.written_to(node.id)

    @declared(
        name=_name(node, "parity"),
        required_resource_keys={"spark", OBJECT_STORE, *graph.resource_keys},
        description=f"BATCH over a slice of the input gives what {node.name} holds.",
    )
    def check(context: AssetCheckExecutionContext) -> AssetCheckResult:
        if not sink.exists():
            return _nothing(planned, node)
        slice_ = parity.slice()
        with tempfile.TemporaryDirectory(prefix="parity-") as folder:
            of_run = graph.connected(connections(graph, context.resources))
            tables = batch_tables(of_run, slice_, parity.options, session_of(context.resources.spark), folder)
            in_batch = tables[node.name]
        chosen = parity.where(slice_)
        in_table = sink.dataset(records).to_table(filter=chosen)
        by_batch = in_batch if chosen is None else in_batch.filter(chosen)
        comparison = compare(by_batch, in_table, list(sink.key), parity.differences)
        return AssetCheckResult(
            passed=not comparison.different,
            description=(
                f"{comparison.different} rows differ: {comparison.batch_rows} by BATCH, {comparison.table_rows} in the"
                " table"
            ),
            metadata={
                "slice": slice_.key if slice_ is not None else "all",
                "rows by BATCH": comparison.batch_rows,
                "rows in the table": comparison.table_rows,
                "first differences": _differences(comparison),
            },
        )

    return check


def _nothing(planned: Plan, node: SinkNode) -> AssetCheckResult:
    return AssetCheckResult(
        passed=False,
        description=f"{planned.name}: sink '{node.name}' ({node.sink.describe()}): nothing is there yet; run the"
        " pipeline, or see who has removed it",
    )


def _differences(comparison: Comparison) -> MetadataValue:
    columns: Sequence[str] = ("row", "by BATCH", "in the table")
    records = [
        TableRecord(dict(zip(columns, (d.key, d.batch or "not there", d.table or "not there"), strict=True)))
        for d in comparison.first
    ]
    return MetadataValue.table(records=records, schema=TableSchema([TableColumn(c) for c in columns]))


def _records(table: pa.Table) -> MetadataValue:
    schema = TableSchema([TableColumn(n) for n in table.column_names])
    return MetadataValue.table(
        records=[TableRecord({k: str(v) for k, v in row.items()}) for row in table.to_pylist()], schema=schema
    )


def _name(node: SinkNode, what: str) -> str:
    return re.sub(r"\W", "_", f"{node.name}_{what}")


CHECK = "carried_state"


def carried_state_spec(asset: AssetKey) -> AssetCheckSpec:
    """Return the check that the runs of a stage report."""
    return AssetCheckSpec(
        CHECK,
        asset=asset,
        description="Each partition goes on from the state that the one before it ended with when it last ran.",
    )


def carried_state_result(
    asset: AssetKey, keys: Sequence[str], shown: Mapping[str, Mapping[str, Any]]
) -> AssetCheckResult:
    """Warn of the partitions that a backfill has to run again, by the metadata of all that `keys` name in order.

    They are not wrong in themselves, so it is a warning.
    """
    stale = stale_partitions(keys, shown)
    if not stale:
        return AssetCheckResult(
            asset_key=asset,
            check_name=CHECK,
            passed=True,
            description="every partition goes on from the one before it",
            metadata={"stale partitions": 0},
        )
    which = stale[0] if len(stale) == 1 else f"{stale[0]} to {stale[-1]}"
    return AssetCheckResult(
        asset_key=asset,
        check_name=CHECK,
        passed=False,
        severity=AssetCheckSeverity.WARN,
        description=(
            f"{which} went on from a state that has been replaced since: run a backfill over"
            f" {'it' if len(stale) == 1 else 'them'}"
        ),
        metadata={"stale partitions": len(stale), "first": stale[0], "last": stale[-1]},
    )


def stale_partitions(keys: Sequence[str], shown: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The partitions to run again, in order: the first whose predecessor was materialized again, and all after it."""
    for i, (before, mine) in enumerate(pairwise(keys), 1):
        if (
            before in shown
            and MADE_BY in shown.get(mine, ())  # it has state; one that was the first went on from none
            and _run(shown[mine], CARRIED_FROM) != _run(shown[before], MADE_BY)
        ):
            return [key for key in keys[i:] if key in shown]
    return []


def _run(metadata: Mapping[str, Any], name: str) -> str | None:
    value = metadata.get(name)
    return None if value is None else str(value.value)
