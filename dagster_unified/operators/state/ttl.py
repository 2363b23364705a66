"""How long an entry of state lives (Flink: *State TTL*). Names and methods are PyFlink's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from typing import Generic, NamedTuple, Self

from dagster_unified.errors import PipelineError
from dagster_unified.operators.functions.type_variables import R
from dagster_unified.operators.time import checked_span
from dagster_unified.records import shorten


class Renewed(NamedTuple, Generic[R]):
    """A value with a time to live, as in the column of a savepoint; a checkpoint has a pair."""

    value: R
    renewed: int
    """When it was renewed last, in milliseconds since the epoch."""


class UpdateType(Enum):
    """What renews an entry's time to live; there is an example at `StateTtlConfig`."""

    ON_CREATE_AND_WRITE = "on create and write"
    ON_READ_AND_WRITE = "on read and write"


class StateVisibility(Enum):
    """Whether an expired entry that has not been removed yet is returned.

    There is an example at `StateTtlConfig`.
    """

    NEVER_RETURN_EXPIRED = "never return expired"
    RETURN_EXPIRED_IF_NOT_CLEANED_UP = "return expired if not cleaned up"


@dataclass(frozen=True)
class StateTtlConfig:
    """How long an entry of state lives without being renewed, on the processing-time clock (Flink: *State TTL*).

    In STREAMING an expired entry is removed when it is read, and with the next micro-batch that touches its page of
    keys (for a large list or map, its chunk); until then `visibility` says whether reading returns it once more. In
    BATCH nothing expires: a key's whole history passes in a moment, whose length says nothing of the time between its
    records. So a result that depends on expiry differs between the modes, which the lint notes; event-time timers
    forget alike in both.

    Examples:
        >>> ttl = StateTtlConfig.new_builder(timedelta(hours=1)).update_ttl_on_read_and_write().build()
        >>> class Count(KeyedProcessFunction[str, str, int]):
        ...     def open(self, runtime_context: RuntimeContext) -> None:
        ...         self.count = runtime_context.get_state(ValueStateDescriptor("count", int, ttl))
        ...     def process_element(self, value: str, ctx: KeyedProcessFunction.Context) -> list[int]:
        ...         self.count.update((self.count.value() or 0) + 1)
        ...         return [self.count.value()]
        >>> harness = KeyedHarness(Count())
        >>> harness.element("north", "a"), harness.element("north", "b")
        ([1], [2])
        >>> harness.clock.advance(3_600_000)
        >>> harness.element("north", "c")
        [1]
    """

    ttl: timedelta
    update_type: UpdateType = UpdateType.ON_CREATE_AND_WRITE
    visibility: StateVisibility = StateVisibility.NEVER_RETURN_EXPIRED

    def __post_init__(self) -> None:
        checked_span("StateTtlConfig: the time to live", self.ttl, 1)
        for what, kind in (("update_type", UpdateType), ("visibility", StateVisibility)):
            value = getattr(self, what)
            if not isinstance(value, kind):
                known = " or ".join(map(str, kind))
                raise PipelineError(f"StateTtlConfig: {what} is {known}, not {shorten(value)}")

    @staticmethod
    def new_builder(ttl: timedelta) -> StateTtlConfigBuilder:
        """PyFlink's spelling: `StateTtlConfig.new_builder(ttl).update_ttl_on_read_and_write().build()`."""
        return StateTtlConfigBuilder(StateTtlConfig(ttl))


class StateTtlConfigBuilder:
    """A `StateTtlConfig` that is being built."""

    def __init__(self, config: StateTtlConfig) -> None:
        self._config = config

    def set_update_type(self, update_type: UpdateType) -> Self:
        """Set what renews an entry."""
        self._config = replace(self._config, update_type=update_type)
        return self

    def update_ttl_on_create_and_write(self) -> Self:
        """Renew an entry when it is written, which is the default."""
        return self.set_update_type(UpdateType.ON_CREATE_AND_WRITE)

    def update_ttl_on_read_and_write(self) -> Self:
        """Renew an entry when it is read or written."""
        return self.set_update_type(UpdateType.ON_READ_AND_WRITE)

    def set_state_visibility(self, visibility: StateVisibility) -> Self:
        """Set whether an expired entry that has not been removed yet is returned."""
        self._config = replace(self._config, visibility=visibility)
        return self

    def never_return_expired(self) -> Self:
        """Never return an expired entry, which is the default."""
        return self.set_state_visibility(StateVisibility.NEVER_RETURN_EXPIRED)

    def return_expired_if_not_cleaned_up(self) -> Self:
        """Return an expired entry until it is removed."""
        return self.set_state_visibility(StateVisibility.RETURN_EXPIRED_IF_NOT_CLEANED_UP)

    def build(self) -> StateTtlConfig:
        """The configuration."""
        return self._config
