"""Reads what a finished Spark job observed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import Observation


def observed(observation: Observation) -> dict[str, Any]:
    """The metrics that a finished job observed.

    Empty where the optimizer removed the observed node, as it does over input that it knows to be empty.
    """
    try:
        return observation.get
    except Exception as error:
        if "toPyRow" in str(error):  # how a classic session says that the row is not there
            return {}
        raise
