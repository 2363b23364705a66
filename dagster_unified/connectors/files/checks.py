"""What may be wrong with a value of a Spark column, wherever in the value it is. Knows types only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import Column

Check: TypeAlias = "tuple[str, Callable[[Column], Column]]"
"""What is wrong, and what says of a value whether it is."""


def within(field: pa.Field, path: str, checks: Callable[[pa.Field, str], Iterator[Check]]) -> Iterator[Check]:
    """The checks of a field, and of all that is within its values, each as one of the field's value."""
    yield from checks(field, path)
    kind = field.type
    if pa.types.is_struct(kind):
        for member in kind:
            for problem, test in within(member, f"{path}.{member.name}", checks):
                yield problem, partial(_of_member, member.name, test)
    elif pa.types.is_list(kind):
        for problem, test in within(kind.value_field, f"{path}[]", checks):
            yield problem, partial(_of_any, test)
    elif pa.types.is_map(kind):
        for problem, test in within(kind.item_field, f"{path}[]", checks):
            yield problem, partial(_of_any_value, test)


def _of_member(name: str, test: Callable[[Column], Column], value: Column) -> Column:
    return value.isNotNull() & test(value[name])


def _of_any(test: Callable[[Column], Column], values: Column) -> Column:
    from pyspark.sql import functions as F

    return F.exists(values, lambda value: test(value))


def _of_any_value(test: Callable[[Column], Column], mapped: Column) -> Column:
    from pyspark.sql import functions as F

    return _of_any(test, F.map_values(mapped))
