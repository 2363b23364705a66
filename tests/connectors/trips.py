"""Records for tests of several connectors: with records in them, whose fields have defaults, and with partitions."""

from typing import NamedTuple


class Spot(NamedTuple):
    x: float
    y: float = 1.5
    z: int | None = None


class Trip(NamedTuple):
    id: int
    start: Spot = Spot(0.0)
    spots: list[Spot] = [Spot(2.0)]
    by_name: dict[str, Spot] = {"a": Spot(3.0)}


class Parcel(NamedTuple):
    """A record that any of its fields may put into a partition."""

    region: str | None
    shelf: int
    at: int
