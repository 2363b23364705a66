"""A source of what another asset returns in memory. Knows values and records; Dagster gives the value where it runs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from dagster_unified.arrow_types import has
from dagster_unified.connectors.collection import records_of
from dagster_unified.connectors.protocol.frame import spark_schema
from dagster_unified.connectors.protocol.source import SparkSource
from dagster_unified.errors import ConfigurationError, MalformedInputError, PipelineError, RecordTypeError, nearest
from dagster_unified.graph.connectors import Boundedness, Dimensions
from dagster_unified.graph.fingerprint import digest
from dagster_unified.operators.functions.type_variables import Out
from dagster_unified.records import RecordType, record_type

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from upath import UPath


class AssetSource(SparkSource[Out]):
    """Reads what another asset of the code location returns in memory: a table, or a list of records.

    `asset` is the asset's key, such as "orders" or "shop/orders". In BATCH under Dagster the step of the stage that
    reads it gets the value as its input, through the asset's IO manager, and is after it in a run. The value is a
    `pyarrow.Table`, a DataFrame of pandas or polars, or a list of records of the type `record`. A table may have
    further columns; a value becomes that of its field only where it is the same: a float is no int, and a text no time.
    A missing value of pandas is None.

    A run for a partition reads what the asset returned for that partition, or for those that belong to it. Of an asset
    without partitions say which records do, with `partitioned_by(field)`, or that all do, with `for_every_partition()`.

    Raises `PipelineError` in STREAMING, which cannot follow a value: write it to a table, and read that.
    `ConfigurationError` where no step gives a value, as in `Pipeline.execute`; the harness takes its records as those
    of other sources. `MalformedInputError` for a value that does not fit, naming asset, source and field.

    Examples:
        >>> AssetSource("shop/orders", Sale).describe()
        'what asset shop/orders returns'
    """

    boundedness = Boundedness.BOUNDED
    only_in_batch = "STREAMING cannot follow a value in memory; write the asset to a table, and read that"

    def __init__(self, asset: str, record: type[Out] | Any, name: str | None = None) -> None:
        self.asset = tuple(asset.split("/")) if isinstance(asset, str) else ()
        if not self.asset or not all(self.asset):
            raise PipelineError(f"{asset!r} is no key of an asset; write it as Dagster shows it, such as shop/orders")
        self.name = name or self.asset[-1]
        self.records = record_type(record, f"source '{self.name}'")
        self._table: pa.Table | None = None

    def describe(self) -> str:
        return f"what asset {'/'.join(self.asset)} returns{self.of_partition()}"

    def snapshot(self) -> str:
        return digest("asset", *self.asset)

    def identifies_input(self) -> bool:
        return False

    def can_be_bounded(self) -> bool:
        return True

    def check_dimensions(self, known: Dimensions) -> None:
        if self.partition_columns:
            super().check_dimensions(known)

    def reading(self, values: Sequence[object]) -> Self:
        """The source with what the asset returned: one value, or one for each of its partitions that belong to this.

        Raises `MalformedInputError` where one does not fit the records.
        """
        where = f"source '{self.name}': what asset {'/'.join(self.asset)} returned"
        changed = copy.copy(self)
        tables = [table_of(value, self.records, where) for value in values]
        changed._table = pa.concat_tables(tables or [self.records.schema.empty_table()])
        return changed

    def read(self, spark: SparkSession) -> DataFrame:
        if self._table is None:
            raise ConfigurationError(
                f"source '{self.name}' ({self.describe()}): only a step of its own stage, in BATCH under Dagster, is"
                " given the value; materialize the stage there, give records to the harness, or write the asset to a"
                " table and read that"
            )
        return spark.createDataFrame(self._table, schema=spark_schema(self.records.schema))

    def read_stream(self, spark: SparkSession, folder: UPath) -> DataFrame:
        raise PipelineError(f"source '{self.name}' ({self.describe()}): {self.only_in_batch}")


def values_of(value: object, partitions: Sequence[str], source: AssetSource[Any]) -> dict[str, list[object]]:
    """By partition of a run, the values of an asset's partitions that belong to it.

    `value` is what an IO manager gives: one value, or, of several partitions of the asset, one by key. Raises
    `ConfigurationError` where it does not say which are whose.
    """
    by_key = value if isinstance(value, Mapping) else {}
    everything = list(by_key.values()) or [value]
    if len(partitions) == 1 or source.partition_columns or source.in_every_partition:
        return dict.fromkeys(partitions, everything)
    if set(by_key) == set(partitions):
        return {key: [by_key[key]] for key in partitions}
    raise ConfigurationError(
        f"source '{source.name}' ({source.describe()}): the run is of several partitions, and its value is not one for"
        f" each of them; run one partition at a time (backfill_policy=BackfillPolicy.multi_run()), or name the field"
        " that says it, with .partitioned_by(field)"
    )


def table_of(value: object, records: RecordType, where: str) -> pa.Table:
    """A value as a table of the records' columns; raises `MalformedInputError` where it does not fit."""
    table = _as_arrow(value)
    try:
        if table is None:
            return pa.Table.from_batches([records.to_batch(records_of(value, records.python))])
        for name in records.names:
            if name not in table.column_names:
                raise MalformedInputError(
                    f"{where} has no column '{name}'{nearest(name, table.column_names)}, which {records.describe()} has"
                )
        columns = [_as_field(table[field.name].combine_chunks(), field, where) for field in records.schema]
        batch = pa.RecordBatch.from_arrays(columns, schema=records.schema)
        records.check_nulls(batch)
        records.check_members(batch)
    except (PipelineError, RecordTypeError) as error:
        raise MalformedInputError(f"{where} does not fit: {error}") from error
    return pa.Table.from_batches([batch])


def _as_arrow(value: object) -> pa.Table | None:
    """A table as Arrow has it; None for what is no table."""
    if isinstance(value, pa.Table):
        return value
    if isinstance(value, pa.RecordBatch):
        return pa.Table.from_batches([value])
    names = {f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in type(value).__mro__}
    frame: Any = value
    if "pandas.DataFrame" in names:
        return pa.Table.from_pandas(frame, preserve_index=False)
    if "polars.LazyFrame" in names:
        frame = frame.collect()
    return frame.to_arrow() if names & {"polars.DataFrame", "polars.LazyFrame"} else None


def _as_field(column: pa.Array, field: pa.Field, where: str) -> pa.Array:
    plain = _plain(column.type)
    if not _holds(field.type, plain):
        raise MalformedInputError(
            f"{where} has a column '{field.name}' of {column.type}, and a value of it could change on its way to the"
            f" field, which is {field.type}; return it in that type, or declare the field as what it is"
        )
    try:
        given = column if plain == column.type else column.cast(plain)
        held = given.cast(field.type)
        # Arrow's cast of a decimal that is too large for its new type gives another number
        if has(plain, pa.types.is_decimal) and not held.cast(plain).equals(given):
            raise pa.ArrowInvalid(f"it has a number that a {field.type} cannot hold")
        return held
    except pa.ArrowInvalid as error:
        raise MalformedInputError(f"{where}: column '{field.name}' does not fit {field.type}: {error}") from error


def _plain(kind: pa.DataType) -> pa.DataType:
    """A type without the forms that only some libraries give it, such as large texts and dictionaries."""
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_plain(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([member.with_type(_plain(member.type)) for member in kind])
    return kind


_SAME = (
    pa.types.is_string, pa.types.is_integer, pa.types.is_timestamp, pa.types.is_date, pa.types.is_duration,
    pa.types.is_boolean, pa.types.is_binary,
)  # fmt: skip
"""Types of one kind: Arrow's cast of one to another keeps every value, or fails."""


def _holds(field: pa.DataType, column: pa.DataType) -> bool:
    """Whether a cast of a column to a field's type keeps every value, or fails."""
    if pa.types.is_null(column):
        return True
    if pa.types.is_floating(field):
        return bool(pa.types.is_floating(column) or pa.types.is_integer(column))
    if pa.types.is_decimal(field):
        return bool(pa.types.is_decimal(column) or pa.types.is_integer(column))
    if pa.types.is_list(field):
        return bool(pa.types.is_list(column)) and _holds(field.value_type, column.value_type)
    if pa.types.is_struct(field):
        return (
            bool(pa.types.is_struct(column))
            and [member.name for member in field] == [member.name for member in column]
            and all(_holds(a.type, b.type) for a, b in zip(field, column, strict=True))
        )
    if pa.types.is_map(field):
        return (
            bool(pa.types.is_map(column))
            and _holds(field.key_type, column.key_type)
            and _holds(field.item_type, column.item_type)
        )
    return any(same(field) and same(column) for same in _SAME)
