"""Open windows in a table of state: what nothing would close is an error. Knows tables of Arrow and of Spark only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import repeat
from operator import add, or_
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dagster_unified.errors import StateError
from dagster_unified.operators.state.table import EVENT_TIMERS, PROCESSING_TIMERS
from dagster_unified.operators.time import TimeDomain
from dagster_unified.operators.windows.spec import CONTENTS
from dagster_unified.operators.windows.spec import TIMERS as WINDOW_TIMERS
from dagster_unified.state.state_table import is_frame

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_TIMERS = {TimeDomain.EVENT_TIME: EVENT_TIMERS, TimeDomain.PROCESSING_TIME: PROCESSING_TIMERS}


def check_windows(where: str, rows: pa.Table | DataFrame, schema: pa.Schema, key: Sequence[str]) -> None:
    """Raises `StateError` where there are windows that nothing would close; `schema` is that of the states.

    Each window of time has a timer, for which the table says that it is the window's. One of another kind may have
    none: its trigger may count, and it may never go.
    """
    names = set(schema.names)
    if CONTENTS not in names:
        return
    if not names & set(WINDOW_TIMERS.values()):
        raise StateError(
            f"{where}: the table has '{CONTENTS}', and not which timers close them; give it the column"
            f" '{WINDOW_TIMERS[TimeDomain.EVENT_TIME]}' as well, a map from times to lists of windows"
        )
    if not set(rows.columns if is_frame(rows) else rows.schema.names) & set(_TIMERS.values()):
        raise StateError(f"{where}: the table has '{CONTENTS}', and no timers, which close them; give timers= as well")
    if not _is_of_time(schema.field(CONTENTS).type):
        return
    found = _first_unclosed_of_frame(rows, key) if is_frame(rows) else _first_unclosed(rows, key)
    if found is not None:
        shown = found[0] if len(found) == 1 else found
        columns = " or ".join(f"'{name}'" for name in WINDOW_TIMERS.values() if name in names)
        raise StateError(
            f"{where}: nothing would close the windows of key {shown!r}; each moment in its {columns} needs a timer of"
            " that key in timers=, and there has to be one"
        )


def _is_of_time(contents: pa.DataType) -> bool:
    """Whether a column has what windows of time hold; of another type the start of a job says what is wrong."""
    window = contents.key_type if pa.types.is_map(contents) else contents
    return pa.types.is_struct(window) and {field.name for field in window} == {"start", "end"}


def _first_unclosed(rows: pa.Table, key: Sequence[str]) -> tuple[Any, ...] | None:
    """The key of the first row with windows that lacks a timer of them."""
    empty = repeat(None, rows.num_rows)

    def column(name: str) -> Any:
        return rows[name].to_pylist() if name in rows.schema.names else empty

    waiting = [zip(column(WINDOW_TIMERS[domain]), column(_TIMERS[domain]), strict=True) for domain in TimeDomain]
    keys = zip(*[rows[name].to_pylist() for name in key], strict=True)
    own: tuple[Any, ...]
    for own, windows, *domains in zip(keys, rows[CONTENTS], *waiting, strict=True):
        if not windows.is_valid or not len(windows):
            continue
        moments = [{moment for moment, _ in waiting or ()} for waiting, _ in domains]
        timers = [{timer["timestamp"] for timer in timers or ()} for _, timers in domains]
        if not any(moments) or any(one - other for one, other in zip(moments, timers, strict=True)):
            return own
    return None


def _first_unclosed_of_frame(rows: DataFrame, key: Sequence[str]) -> tuple[Any, ...] | None:
    """As `_first_unclosed`, of a DataFrame."""
    from pyspark.sql import functions as F

    def size(column: Column) -> Column:
        return F.when(column.isNull(), 0).otherwise(F.size(column))

    moments, missing = [], []
    for domain in TimeDomain:
        if WINDOW_TIMERS[domain] not in rows.columns:
            continue
        waiting = F.map_keys(F.col(f"`{WINDOW_TIMERS[domain]}`"))
        none = F.array().cast("array<long>")
        timers = F.col(f"`{_TIMERS[domain]}`")["timestamp"] if _TIMERS[domain] in rows.columns else none
        moments.append(size(waiting))
        missing.append(size(F.array_except(waiting, F.coalesce(timers, none))) > 0)
    unclosed = (reduce(add, moments) == 0) | reduce(or_, missing)
    found = rows.where((size(F.col(f"`{CONTENTS}`")) > 0) & unclosed).select(*[f"`{name}`" for name in key]).first()
    return None if found is None else tuple(found)
