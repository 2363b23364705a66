"""The orders of the project's shops: the same for a day whenever it is asked for."""

from __future__ import annotations

import random
from datetime import datetime, timedelta
from typing import NamedTuple

import pyarrow as pa

SHOPS = ("north", "south", "east", "west")
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("at", pa.timestamp("us", "UTC")),
        ("shop", pa.string()),
        ("amount", pa.int64()),
        ("day", pa.string()),
    ]
)


class Order(NamedTuple):
    """Something that a shop sold. An amount of 0 is an order that was taken back."""

    at: datetime
    shop: str
    amount: int
    day: str


def orders_of(day: str, count: int = 500) -> pa.Table:
    """The orders of a day, in the order in which they came."""
    chance = random.Random(day)
    begin = datetime.fromisoformat(f"{day}T00:00:00+00:00")
    moments = sorted(chance.randrange(86_400_000) for _ in range(count))
    rows = [
        {
            "id": number,
            "at": begin + timedelta(milliseconds=moment),
            "shop": chance.choice(SHOPS),
            "amount": chance.choice((0, chance.randrange(1, 100_000))),
            "day": day,
        }
        for number, moment in enumerate(moments)
    ]
    return pa.Table.from_pylist(rows, SCHEMA)


def late_order(day: str, shop: str, amount: int) -> pa.Table:
    """An order that arrives after its day: at noon."""
    at = datetime.fromisoformat(f"{day}T12:00:00+00:00")
    return pa.Table.from_pylist([{"id": -1, "at": at, "shop": shop, "amount": amount, "day": day}], SCHEMA)
