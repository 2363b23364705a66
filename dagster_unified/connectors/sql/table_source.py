"""What all sources of a table or a query have in common: ranges of a column, and columns that fit. No client."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection
from decimal import Decimal
from itertools import pairwise

import msgspec
import pyarrow as pa

from dagster_unified.connectors.protocol.offsets import cuts
from dagster_unified.connectors.protocol.splits import SplitSource
from dagster_unified.errors import PipelineError, SourceError, nearest
from dagster_unified.operators.functions.type_variables import Out
from dagster_unified.values import check_count


class KeyRange(msgspec.Struct, frozen=True):
    """What one task reads: all rows, those of a range of `split_by`, or those without a value in it."""

    low: int | None = None
    high: int | None = None
    nulls: bool = False


def key_ranges(low: int | Decimal | None, high: int | Decimal | None, count: int) -> list[KeyRange]:
    """The ranges between the lowest and the highest whole number of a column, which may have none.

    What is written meanwhile at either end belongs to the first and the last.
    """
    if low is None or high is None:
        return [KeyRange()]
    marks = [None, *[start for start, _ in cuts(int(low), int(high) + 1, count)[1:]], None]
    ranges = [KeyRange(start, end) for start, end in pairwise(marks)]
    return ranges if len(ranges) == 1 else [*ranges, KeyRange(nulls=True)]


class TableSource(SplitSource[Out]):
    """Reads the rows of a table or a query, if it is told so by ranges of the column `split_by`."""

    split_by: str | None
    parallelism: int

    @property
    @abstractmethod
    def _place(self) -> str:
        """What is read, for messages: `table shop`, or `the query`."""

    @property
    def _where(self) -> str:
        return f"source '{self.name}'"

    def _check_field(self, column: str) -> pa.DataType:
        """The type of a field that the author has named; raises `PipelineError` where there is no such field."""
        if column not in self.records.names:
            raise PipelineError(
                f"{self._where}: the records have no field '{column}'{nearest(column, self.records.names)}"
            )
        return self.records.schema.field(column).type

    def _check_split_by(self) -> None:
        if self.split_by is not None and self._check_field(self.split_by) != pa.int64():
            raise PipelineError(f"{self._where}: split_by='{self.split_by}' has to be an int")
        check_count(f"{self._where}: parallelism", self.parallelism)

    def _check_columns(self, names: Collection[str], unfit: Callable[[pa.Field], tuple[str, str] | None]) -> None:
        """Raises `SourceError` where the record has a field without a column, or one that does not fit.

        `unfit` returns the column's type and the field's, for messages, where one is not read as the other.
        """
        for field in self.records.schema:
            if field.name not in names:
                raise SourceError(
                    f"{self._where}: {self._place} has no column '{field.name}'{nearest(field.name, names)}; the record"
                    " has a field of this name"
                )
            if (types := unfit(field)) is not None:
                raise SourceError(
                    f"{self._where}: column '{field.name}' of {self._place} is {types[0]}, and cannot be read as the"
                    f" field's {types[1]}; declare another type, or cast it in a query"
                )
