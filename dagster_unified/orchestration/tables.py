"""A pipeline's tables as values of other assets: an ordinary asset that names one as an argument gets its rows.

The pipeline writes its tables itself, so that nothing is stored here.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import pyarrow as pa
from dagster import (
    AssetKey,
    AssetSpec,
    InputContext,
    IOManager,
    IOManagerDefinition,
    OutputContext,
    PartitionsDefinition,
)

from dagster_unified.connectors.protocol.bounds import expression_of
from dagster_unified.connectors.protocol.commits import PartitionsUnknownError, SparkSink, WriteIdentity
from dagster_unified.engine.commit import spark_sink
from dagster_unified.errors import ConfigurationError, SinkError
from dagster_unified.graph.nodes import SinkNode
from dagster_unified.orchestration._dagster_compat import CheckedIOManagerDefinition, ObjectMetadataValue, is_of_range
from dagster_unified.orchestration.partitions import dimensions_of, slice_of
from dagster_unified.orchestration.resources import OBJECT_STORE, connections
from dagster_unified.orchestration.translator import Stage, Table
from dagster_unified.records import RecordType, type_name

if TYPE_CHECKING:
    import pyarrow.dataset as ds

    from dagster_unified.graph.plan import Plan
    from dagster_unified.orchestration.catalog import Catalog

PARTITION_EXPR = "partition_expr"
"""Metadata of an input, or of a table's asset: the column that says a row's partition, or one for each dimension.

Dagster's own managers of tables have the same name for it.
"""

ALLOW_MISSING = "allow_missing_partitions"
"""Metadata of an input: whether partitions that were not materialized count as empty, as in Dagster's own managers."""


TABLES, _LOADER = "unified_tables", "dagster_unified/loader"


def tables_of(plan: Plan) -> str:
    """Return the key of the resource that loads a pipeline's tables.

    Each job of a location has all resources, so that one for each pipeline would make loading quadratic. A pipeline
    whose sources and sinks name resources has one of its own, which requires those.
    """
    return f"{plan.name}_tables" if plan.graph.resource_keys else TABLES


def loaded_by(spec: AssetSpec, plan: Plan, catalog: Catalog) -> AssetSpec:
    """Return an asset of a pipeline that this resource loads, unless its author names an IO manager for it."""
    if "dagster/io_manager_key" in spec.metadata:
        return spec
    loaded = spec.with_io_manager_key(tables_of(plan))
    if plan.graph.resource_keys:
        return loaded
    return loaded.merge_attributes(metadata={_LOADER: ObjectMetadataValue(_manager(plan, catalog))})


def table_loader(plan: Plan, catalog: Catalog) -> IOManagerDefinition:
    """Return the resource that loads a pipeline's tables, as an asset's argument asks for them.

    Definitions in which a resource of the pipeline's sources and sinks is missing do not load, which it sees to.
    """
    if not plan.graph.resource_keys:
        return SHARED
    return CheckedIOManagerDefinition(
        lambda context: _manager(plan.connected(connections(plan.graph, context.resources)), catalog),
        {OBJECT_STORE, *plan.graph.resource_keys},
        check=plan.graph.connected,
        description=f"Loads the tables of {plan.name}, as the type that an asset's argument has.",
    )


def _manager(plan: Plan, catalog: Catalog) -> TableIOManager:
    sinks = {catalog.key(Table(plan, node)): node.id for node in plan.graph.sinks}
    stages = {catalog.key(Stage(plan, region)): region.name for region in plan.regions}
    return TableIOManager(plan, sinks, stages)


class TableIOManager(IOManager):
    """Loads the tables that the sinks of a pipeline write, as the type that an input is annotated with.

    That is `pyarrow.Table` (also without an annotation), `pyarrow.dataset.Dataset`, `pandas.DataFrame`,
    `polars.DataFrame`, `polars.LazyFrame`, `duckdb.DuckDBPyRelation`, or a list of the sink's records. An input of some
    partitions has the rows that these have written; that of an asset without partitions has the whole table. What it
    loads is the table as it is now, whether BATCH or STREAMING has written it.

    Raises `SinkError` where nothing is there yet, where a partition was not materialized, and where the table does not
    say which rows belong to it; `ConfigurationError` for another type, and for a stage, which is no table.
    """

    def __init__(self, plan: Plan, sinks: Mapping[AssetKey, int], stages: Mapping[AssetKey, str]) -> None:
        self._plan, self._sinks, self._stages = plan, sinks, stages

    def handle_output(self, context: OutputContext, obj: object) -> NoReturn:
        raise ConfigurationError(
            f"{self._plan.name}: {context.asset_key.to_user_string()} is written by the pipeline, and takes no value of"
            " an asset; give your asset another io_manager_key"
        )

    def load_input(self, context: InputContext) -> object:
        number = self._sinks.get(context.asset_key)
        if number is None:
            raise self._no_table(context.asset_key)
        table = _Table(self._plan, number, context)
        return _FORMS[table.form](table)

    def _no_table(self, key: AssetKey) -> ConfigurationError:
        name, stage = key.to_user_string(), self._stages.get(key)
        tables = ", ".join(sorted(key.to_user_string() for key in self._sinks))
        what = "is no table of the pipeline" if stage is None else f"is stage '{stage}', whose records stay in the run"
        return ConfigurationError(
            f"{self._plan.name}: {name} {what}, so that it has no value; name it in deps=[...] to run after it, or"
            f" take a table: {tables}"
        )


class _SharedTableIOManager(IOManager):
    """Loads each table by the manager that its asset carries, so that all pipelines have one resource for it."""

    def handle_output(self, context: OutputContext, obj: object) -> NoReturn:
        raise ConfigurationError(
            f"{context.asset_key.to_user_string()}: {TABLES} loads what pipelines write, and takes no value of an"
            " asset; give your asset another io_manager_key"
        )

    def load_input(self, context: InputContext) -> object:
        upstream = context.upstream_output
        carried = ((upstream and upstream.definition_metadata) or {}).get(_LOADER)
        if not isinstance(carried, ObjectMetadataValue) or not isinstance(carried.instance, TableIOManager):
            raise ConfigurationError(
                f"{context.asset_key.to_user_string()}: {TABLES} loads what pipelines write, and this asset is not of"
                " unified_definitions, or lost its metadata; give it another io_manager_key"
            )
        return carried.instance.load_input(context)


SHARED = IOManagerDefinition(
    lambda _: _SharedTableIOManager(),
    required_resource_keys={OBJECT_STORE},
    description="Loads tables of pipelines, as the type that an asset's argument has.",
)
"""The same object each time, so that the definitions of several calls can be merged."""


@dataclass(frozen=True)
class _Table:
    """A table, as an input asks for it."""

    plan: Plan
    number: int
    context: InputContext

    @property
    def where(self) -> str:
        return f"{self.plan.name}: table {self.context.asset_key.to_user_string()}"

    @property
    def records(self) -> RecordType:
        return self.plan.graph.written_to(self.number)

    @property
    def form(self) -> str:
        """The name of the type that the input is annotated with."""
        wanted = self.context.dagster_type.typing_type
        if wanted is Any:
            return "pyarrow.Table"
        if typing.get_origin(wanted) is list:
            (of,) = typing.get_args(wanted)
            if of is self.records.python:
                return "list"
            raise ConfigurationError(
                f"{self.where} has records of {self.records.describe()}, and the input asks for a list of"
                f" {type_name(of)}; annotate it with list[{type_name(self.records.python)}]"
            )
        names = [f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in getattr(wanted, "__mro__", ())]
        form = next((name for name in names if name in _FORMS), None)
        if form is None:
            raise ConfigurationError(
                f"{self.where} cannot be loaded as {type_name(wanted)}; annotate the input with one of"
                f" {', '.join(name for name in _FORMS if name != 'list')} or list[{type_name(self.records.python)}]"
            )
        return form

    @property
    def sink(self) -> SparkSink[Any, Any]:
        return spark_sink(self.plan.name, self._node)

    @property
    def _node(self) -> SinkNode:
        node = self.plan.graph.node(self.number)
        assert isinstance(node, SinkNode)
        return node

    def dataset(self) -> ds.Dataset:
        """The rows that are asked for."""
        if not self.sink.exists():
            raise SinkError(f"{self.where} ({self.sink.describe()}): nothing is there yet; materialize it first")
        keys, definition = self._partitions(), self._definition
        if keys is None or definition is None:
            return self.sink.dataset(self.records)
        columns = self._metadata(PARTITION_EXPR)
        if columns is not None:
            return self._by_columns(definition, keys, columns)
        return self._by_writer(definition, keys)

    def table(self) -> pa.Table:
        """These rows, in memory."""
        return self.dataset().to_table()

    def _metadata(self, name: str) -> Any:
        """What the input says, or else the table's asset."""
        upstream = self.context.upstream_output
        of_asset: Mapping[str, Any] = {} if upstream is None else upstream.definition_metadata or {}
        return (self.context.definition_metadata or {}).get(name, of_asset.get(name))

    @property
    def _definition(self) -> PartitionsDefinition[str] | None:
        return self.context.asset_partitions_def if self.context.has_asset_partitions else None

    def _partitions(self) -> Sequence[str] | None:
        """The keys of the partitions that are asked for; None for the whole table."""
        definition, context = self._definition, self.context
        if definition is None:
            return None
        keys = context.asset_partition_keys
        if context.has_partition_key or is_of_range(context):
            return keys
        everything = definition.get_partition_keys(dynamic_partitions_store=context.instance)
        return None if set(keys) == set(everything) else keys

    def _by_columns(
        self, definition: PartitionsDefinition[str], keys: Sequence[str], columns: str | Mapping[str, str]
    ) -> ds.Dataset:
        """The rows of partitions by the columns that say it."""
        by_dimension = {"": columns} if isinstance(columns, str) else dict(columns)
        missing = set(dimensions_of(definition).names) - set(by_dimension)
        if missing:
            raise ConfigurationError(
                f"{self.where}: its partitions have {dimensions_of(definition).describe()}, and {PARTITION_EXPR} names"
                f" no column for {', '.join(sorted(missing))}; give one for each, as a dict"
            )
        dataset = self.sink.dataset(self.records)
        slices = [slice_of(definition, key) for key in keys]
        return dataset.filter(
            expression_of(by_dimension, dataset.schema, dimensions_of(definition), slices, self.where)
        )

    def _by_writer(self, definition: PartitionsDefinition[str], keys: Sequence[str]) -> ds.Dataset:
        """The rows that runs of these partitions wrote."""
        import pyarrow.dataset as ds

        writes = {key: self._write(slice_of(definition, key).name) for key in keys}
        try:
            found = self.sink.partitions(list(writes.values()), self.records)
        except PartitionsUnknownError as error:
            raise PartitionsUnknownError(
                f"{self.where}: {error}, so that the rows of {_listed(keys)} cannot be told from others; name the"
                f" column that says it, with AssetIn(metadata={{'{PARTITION_EXPR}': ...}}), or take the whole table in"
                " an asset without partitions"
            ) from error
        self._check_materialized([key for key, write in writes.items() if write not in found])
        parts = [found[write] for write in writes.values() if write in found]
        if not parts:
            schema = self.sink.dataset(self.records).schema
            return ds.dataset(schema.empty_table())
        return parts[0] if len(parts) == 1 else ds.dataset(parts)

    def _write(self, partition: str) -> WriteIdentity:
        return WriteIdentity(self.plan.name, self._node.uid, "", partition)

    def _check_materialized(self, without_rows: Sequence[str]) -> None:
        """Raise where a partition has no rows since none was written, unless the input takes that."""
        if not without_rows or self._metadata(ALLOW_MISSING):
            return
        written = self.context.instance.get_materialized_partitions(self.context.asset_key)
        missing = [key for key in without_rows if key not in written]
        if missing:
            raise SinkError(
                f"{self.where}: {_listed(missing)} has not been materialized; materialize it, or say that it counts as"
                f" empty, with AssetIn(metadata={{'{ALLOW_MISSING}': True}})"
            )


def _listed(keys: Sequence[str]) -> str:
    some = ", ".join(keys[:3])
    return f"partition {some}" if len(keys) == 1 else f"partitions {some}{', ...' if len(keys) > 3 else ''}"


# The forms of a table


def _records(table: _Table) -> list[Any]:
    records = table.records
    try:
        rows = table.dataset().to_table(columns=list(records.names)).cast(records.schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SinkError(f"{table.where} does not hold {records.describe()}: {error}") from error
    return [record for batch in rows.to_batches() for record in records.from_batch(batch)]


def _pandas(table: _Table) -> object:
    """As a DataFrame; whole numbers with nulls stay whole numbers, as pandas' Int64."""
    rows = table.table()
    frame = rows.to_pandas(integer_object_nulls=True)
    for column in rows.schema:
        if pa.types.is_integer(column.type) and rows[column.name].null_count:
            frame[column.name] = frame[column.name].astype("Int64")
    return frame


def _polars(table: _Table) -> object:
    import polars

    return polars.from_arrow(table.table())


def _lazy_polars(table: _Table) -> object:
    import polars

    return polars.scan_pyarrow_dataset(table.dataset())


def _duckdb(table: _Table) -> object:
    import duckdb

    return duckdb.connect().from_arrow(table.dataset())


_FORMS: Mapping[str, Callable[[_Table], object]] = {
    "pyarrow.Table": _Table.table,
    "pyarrow.Dataset": _Table.dataset,
    "pandas.DataFrame": _pandas,
    "polars.DataFrame": _polars,
    "polars.LazyFrame": _lazy_polars,
    "duckdb.DuckDBPyRelation": _duckdb,
    "list": _records,
}
"""How a table becomes a value, by the annotation of the input."""
