"""A bar: a number that has to hold, as a ratio within one run or as an amount of memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bar:
    """`value` holds `bar` from above, or with `at_most` from below."""

    name: str
    value: float
    bar: float
    at_most: bool = False

    @property
    def holds(self) -> bool:
        return self.value <= self.bar if self.at_most else self.value >= self.bar

    def as_json(self) -> dict[str, object]:
        return {"name": self.name, "value": round(self.value, 3), "bar": self.bar, "holds": self.holds}


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    records: int
    keys: int
    rounds: int
    one_key_records: int
    flink: bool
    flink_records: int
    stream_records: int


@dataclass(frozen=True)
class Measurement:
    """One thing measured: its best rate over the rounds, in millions of records per second, and every round's."""

    name: str
    best: float
    rounds: tuple[float, ...]
