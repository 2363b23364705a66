"""Records with records in them, whose fields have defaults."""

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
