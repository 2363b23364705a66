"""What a sink may be asked to promise. Knows no sink."""

from __future__ import annotations

from enum import Enum


class DeliveryGuarantee(Enum):
    """What a sink promises, as Flink's sinks name it. There is an example at `KafkaSink`."""

    EXACTLY_ONCE = "exactly-once"
    AT_LEAST_ONCE = "at-least-once"
