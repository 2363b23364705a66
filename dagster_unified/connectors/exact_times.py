"""Times as Python's classes have them: to the microsecond, in the years 1 to 9999.

Other systems have finer ones, which Python and msgspec would cut off or round, later ones, and infinite ones. Knows no
format, and nothing of where times come from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import date, datetime
from typing import Any

import msgspec
import pyarrow as pa
from msgspec import inspect as mi

from dagster_unified.connectors.plain_values import Find, finder

_FINER = re.compile(r"[.,]\d{6}\d*[1-9]")
_FINER_IN_JSON = re.compile(rb"\.(?:(?<=:\d\d\.)\d{6}\d*[1-9]|\d{6}\d*[1-9]S)")
"""What looks like a time, or a duration, that is finer than microseconds."""

Decode = Callable[[Any], Any]
"""Makes a value of JSON."""


def check_microseconds(text: str) -> None:
    """Raises `ValueError` for the text of a time or a duration that is finer than microseconds."""
    if _FINER.search(text):
        raise ValueError(
            f"'{text}' is finer than microseconds, which is all that a time has; declare a str to read it as it is"
        )


def check_each(texts: Iterable[str]) -> None:
    """Raises `ValueError` where one of these texts is finer than microseconds."""
    for text in texts:
        check_microseconds(text)


def json_decoder(python: Any) -> Decode:
    """What decodes JSON to this type. It raises `ValueError` for times that msgspec would round."""
    decode, decode_plain = msgspec.json.Decoder[Any](python).decode, msgspec.json.Decoder[Any]().decode
    times = times_in(mi.type_info(python))
    if times is None:
        return decode

    def exact(value: bytes | str) -> Any:
        found = decode(value)
        if _FINER_IN_JSON.search(value.encode() if isinstance(value, str) else value):
            check_each(times(decode_plain(value)))
        return found

    return exact


def python_times(times: pa.Array) -> pa.Array:
    """The same days, or times in microseconds; raises `ValueError` where Python's classes do not have one of them."""
    if pa.types.is_timestamp(times.type):
        try:
            times = times.cast(pa.timestamp("us", times.type.tz))
        except pa.ArrowInvalid:
            if times.type.unit == "ns":
                raise ValueError(
                    "it is finer than microseconds, which is all that a time has; cast it to a text to read it as it is"
                ) from None
            raise _outside() from None
    import pyarrow.compute as pc  # slow to load, and a pipeline is built without it

    whole, kind = (pa.int32(), date) if pa.types.is_date(times.type) else (pa.int64(), datetime)
    low, high = (pa.scalar(value, times.type).value for value in (kind.min, kind.max))
    numbers = times.view(whole)
    inside = pc.and_(pc.greater_equal(numbers, low), pc.less_equal(numbers, high))
    if pc.all(inside).as_py() is False:
        raise _outside()
    return times


def _outside() -> ValueError:
    return ValueError(
        "it is infinite, or outside of the years 1 to 9999, which times are in; give another value for it in a query"
    )


def times_in(info: mi.Type) -> Find | None:
    """What finds the texts of times in a plain value of this type; None where it has no times."""
    return finder(info, (mi.DateTimeType, mi.TimeDeltaType), str)
