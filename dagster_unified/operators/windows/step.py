"""A window, as a step of a program."""

from __future__ import annotations

from dagster_unified.operators.program.step import KeyedStep, Place
from dagster_unified.operators.windows.operator import WindowOperator


class WindowStep(KeyedStep):
    """`window` with its trigger, evictor and function."""

    def operator(self, place: Place) -> WindowOperator:
        return WindowOperator(place.where, self.function, place.options, place.clock, place.metrics, place.copy)
