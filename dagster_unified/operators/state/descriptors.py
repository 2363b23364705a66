"""The base of all state descriptors: a name, types and a time to live (Flink: *State TTL*). Names are PyFlink's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, get_args, get_origin

from msgspec import inspect as mi

from dagster_unified.errors import PipelineError
from dagster_unified.operators.functions.type_variables import R
from dagster_unified.operators.state.columns import TypedColumn
from dagster_unified.operators.state.evolution import Renewed, layout_of
from dagster_unified.operators.time import checked_span
from dagster_unified.records import instead_of_model, is_model, shorten, type_name

if TYPE_CHECKING:
    from dagster_unified.operators.state.chunks import SpilledCollection


class UpdateType(Enum):
    """The accesses that renew an entry's time to live; there is an example at `StateTtlConfig`."""

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


class StateHandle(Protocol):
    """Reads and writes one state of the current key: a `State` (`handles.py`)."""

    def __init__(self, backend: Any, descriptor: Any) -> None: ...

    @property
    def descriptor(self) -> StateDescriptor[Any]: ...

    def forget_expired(self) -> None: ...


class StateDescriptor(Generic[R]):
    """The name, type and time to live of one state of an operator; `R` is the handle that reads and writes it.

    Names are unique within an operator. A kind of state is a subclass, which sets `kind`, `handle_type` and
    `stored_type`.
    """

    kind: ClassVar[str]
    """Its name in messages and plans: `value`."""

    handle_type: ClassVar[type[StateHandle]]

    spilled: ClassVar[type[SpilledCollection] | None] = None
    """The collection for the many entries of one key, where a state can have many."""

    trusted = False
    """Whether the library itself writes it, lists of an operator's input, which need no check."""

    def __init__(self, name: str, types: tuple[Any, ...], ttl: StateTtlConfig | None) -> None:
        if not name:
            raise PipelineError("a state descriptor needs a name")
        for python in types:
            _check_type(name, python)
        self.name = name
        self.ttl = _checked(name, ttl)
        self._types = types

    def describe(self) -> str:
        """`map state of str and int`, for messages."""
        return (
            f"{self.kind} state of"
            f" {' and '.join(map(type_name, self._types))}{'' if self.ttl is None else ' with a time to live'}"
        )

    @property
    def stored_type(self) -> Any:
        """The type that is stored for one key.

        With a time to live, each value is stored together with the time of its last renewal.
        """
        raise NotImplementedError

    @property
    def stored_layout(self) -> str:
        """The layout of the stored type in a checkpoint."""
        return layout_of(self.column_type)

    @property
    def column_type(self) -> Any:
        """The type that is stored for one key, in a column of a savepoint.

        With a time to live its values are `Renewed`, so that they differ from tuples in a state without one.
        """
        return self.stored_type if self.ttl is None else _renewed(self.stored_type)

    def column(self, what: str) -> TypedColumn:
        """The column of a savepoint; `what` names it in errors."""
        return TypedColumn(what, self.column_type, self.declared)

    @property
    def declared(self) -> str:
        """The type's name in errors of a savepoint; empty for the name of its column's type."""
        return "" if self.ttl is None else self.describe()

    def _timed(self, python: Any) -> Any:
        return python if self.ttl is None else tuple[python, int]

    def same_as(self, other: StateDescriptor[Any]) -> bool:
        """Whether another descriptor is the same in every respect, so that one handle serves both."""
        return type(self) is type(other) and vars(self) == vars(other)

    def stores_as(self, other: StateDescriptor[Any]) -> bool:
        """Whether another descriptor with its name stores the same."""
        alike = self.kind == other.kind and (self.ttl is None) == (other.ttl is None)
        return alike and bool(self.stored_type == other.stored_type)

    def enable_time_to_live(self, ttl: StateTtlConfig) -> None:
        """PyFlink's way to set a descriptor's time to live."""
        self.ttl = _checked(self.name, ttl)


def _renewed(stored: Any) -> Any:
    """The type of stored pairs, or of a list or map of them, with `Renewed` for the pair."""
    kind, parts = get_origin(stored), get_args(stored)
    if kind is tuple:
        return Renewed[parts[0]]  # type: ignore[valid-type]
    return kind[(*parts[:-1], _renewed(parts[-1]))]


def _checked(name: str, ttl: StateTtlConfig | None) -> StateTtlConfig | None:
    if ttl is not None and not isinstance(ttl, StateTtlConfig):
        raise PipelineError(
            f"state '{name}': its time to live is a StateTtlConfig, such as StateTtlConfig(timedelta(hours=1)), not"
            f" {shorten(ttl)}"
        )
    return ttl


def _check_type(name: str, python: Any) -> None:
    if isinstance(python, str):
        raise PipelineError(f"state '{name}': the type is the text {python!r}; give the type itself, without quotes")
    try:
        info = mi.type_info(python)
        if is_model(info):
            raise PipelineError(f"state '{name}': {instead_of_model(info)}")
        if isinstance(info, (mi.AnyType, mi.CustomType)):
            raise TypeError(f"{type_name(python)} does not say what it holds")
    except (TypeError, NameError) as error:
        raise PipelineError(
            f"state '{name}': {error}; state is stored typed, so give a type such as int, list[str] or a NamedTuple"
        ) from error


class OneTypeDescriptor(StateDescriptor[R]):
    """A state of values of one type."""

    def __init__(self, name: str, type: Any, ttl: StateTtlConfig | None) -> None:  # noqa: A002 - Flink's name
        super().__init__(name, (type,), ttl)
        self.type = type

    @property
    def stored_type(self) -> Any:
        return self._timed(self.type)
