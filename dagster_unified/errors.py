"""Every error this library raises, by what a scheduler should do about it.

A leaf module: imports nothing but the standard library, so that workers, harnesses and engines raise the same classes.
An error is *terminal* (running the same thing again gives the same error) or *transient* (another attempt may succeed);
the orchestration layer turns that into `allow_retries`. All of them survive pickling, since workers raise them too.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class UnifiedError(Exception):
    """The root of the hierarchy: one sentence that says where, what, why, and what to do."""

    retryable = False


class PipelineError(UnifiedError):
    """The pipeline as written is not valid; raised while its graph is built or planned."""


class RecordTypeError(PipelineError):
    """A record type is missing, contradictory, or has a field that Arrow cannot express."""


class ConfigurationError(UnifiedError):
    """A setting is unknown, has a wrong value, or contradicts the mode."""


class UnsupportedError(UnifiedError):
    """The thing exists, but not in this mode or this engine; the message says what to use instead."""


class MissingRequirementError(UnifiedError):
    """The machine lacks something that is needed, such as Java."""


class UserFunctionError(UnifiedError):
    """A user's function raised. Terminal: the same record would make it raise again."""

    def __init__(self, message: str, *, operator: str = "", record: str = "", location: str = "") -> None:
        super().__init__(message)
        self.operator = operator
        self.record = record
        self.location = location

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_user_function_error, (str(self), self.operator, self.record, self.location))


def _rebuild_user_function_error(message: str, operator: str, record: str, location: str) -> UserFunctionError:
    return UserFunctionError(message, operator=operator, record=record, location=location)


class LoweringError(UnifiedError):
    """A stage that runs on columns met what only the functions themselves can say: it runs again, and calls them."""


class UnreachableError(MissingRequirementError):
    """Nobody answers at the address of Spark's master or Connect server.

    A step is not tried again, since the address may be wrong. A stream's sensor starts it again by its restart
    strategy, since a master may be away for a while.
    """


class MalformedInputError(UnifiedError):
    """A source held something that does not fit its declared schema."""


class StageError(UnifiedError):
    """A stage failed for a reason of its surroundings (a lost worker, a full disk): another attempt may succeed."""

    retryable = True


class UnavailableError(UnifiedError):
    """A system at one end of the pipeline is away, overloaded or starting: another attempt may succeed."""

    retryable = True


class SlowStartError(UnavailableError):
    """A Python process that Spark starts did not answer within a fixed wait of Spark's: mostly the machine is busy.

    A streaming job starts its queries again, with pauses, before it fails.
    """


class CancelledError(UnifiedError):
    """The process was asked to stop. Nobody's fault, and nothing to try again."""


class IntermediateLostError(UnifiedError):
    """An intermediate that a stage needs is gone or damaged, and nothing that could recompute it was given."""

    retryable = True


class CarriedStateError(UnifiedError):
    """The state that a partition goes on from is not there."""


class LeaseLostError(UnifiedError):
    """Another job may write to the checkpoint directory, and this one may not (any more)."""


class StateError(UnifiedError):
    """Keyed state cannot be stored, or what is stored no longer fits the operator; the message names both."""


class SourceError(UnifiedError):
    """A source cannot give what is asked of it, for instance because its records are gone."""


class SinkError(UnifiedError):
    """A sink refused what was written to it, for instance because the table has another schema."""


_LASTING = (
    PipelineError,
    ConfigurationError,
    UnsupportedError,
    MissingRequirementError,
    MalformedInputError,
    SourceError,
    SinkError,
    StateError,
    CarriedStateError,
)


def lasting(name: str) -> bool:
    """Whether an error of the class with this name comes again until somebody fixes its cause.

    The cause is in the pipeline, its input or its target. A `UserFunctionError` may not, in a job that is started again
    later: the function may have called a service that was away.
    """
    kind = globals().get(name)
    return isinstance(kind, type) and issubclass(kind, _LASTING) and kind is not UnreachableError


def may_pass(name: str) -> bool:
    """Whether an error of the class with this name is transient: another attempt may succeed."""
    kind = globals().get(name)
    return isinstance(kind, type) and issubclass(kind, UnifiedError) and kind.retryable


def nearest(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` where something known is close to `word`, else an empty string."""
    close = get_close_matches(word, list(known), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
