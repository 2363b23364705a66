"""What is within Arrow's types. A leaf module: knows no records and no values."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa


def has(kind: pa.DataType, is_such: Callable[[pa.DataType], bool]) -> bool:
    """Whether a type, or one that is anywhere within it, is such a type."""
    return is_such(kind) or any(has(kind.field(number).type, is_such) for number in range(kind.num_fields))


def is_number(kind: pa.DataType) -> bool:
    """Whether a sum of values of a type is a value of that type as well: of two bools it would be a number."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))
