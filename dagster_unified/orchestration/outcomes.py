"""How a step ends: what is tried again and what is not, and how it ends where the process was asked to stop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dagster import DagsterInstance, DagsterRunStatus, Failure, MetadataValue

from dagster_unified.engine import interrupts
from dagster_unified.engine.interrupts import Interrupts
from dagster_unified.errors import CancelledError, UnifiedError
from dagster_unified.orchestration._dagster_compat import DagsterExecutionInterruptedError, StepInterruptedError


@contextmanager
def as_failure() -> Iterator[None]:
    """An error as a failure with its sentence, that is tried again where its type says so.

    An error of the driver's memory is not: the next attempt would begin with less.
    """
    try:
        yield
    except CancelledError:
        raise
    except UnifiedError as error:
        raise Failure(
            str(error), metadata={"error": MetadataValue.text(type(error).__name__)}, allow_retries=error.retryable
        ) from error
    except MemoryError as error:
        raise Failure(
            "the driver ran out of memory; give the process more, or read less at once", allow_retries=False
        ) from error
    except SystemExit as error:
        raise Failure(f"something called sys.exit({error.code!r}) in the driver", allow_retries=False) from error


@contextmanager
def interruptible(instance: DagsterInstance, run_id: str) -> Iterator[Interrupts]:
    """Ends the step, and its run, where the process is asked to stop. No retry policy takes that for a failure."""
    with interrupts.listening() as asked:
        try:
            _check_run(instance, run_id)
            asked.check()
            yield asked
        except (Exception, KeyboardInterrupt, DagsterExecutionInterruptedError) as error:
            if not asked.received and isinstance(error, Exception):
                raise
            asked.stopping()
            raise StepInterruptedError("the process was asked to stop; what had not been committed is not") from error


def _check_run(instance: DagsterInstance, run_id: str) -> None:
    """Raises where somebody has terminated the run.

    Also while Dagster's own handler was installed and the step was to be retried.
    """
    run = instance.get_run_by_id(run_id)
    if run is not None and run.status is DagsterRunStatus.CANCELING:
        raise DagsterExecutionInterruptedError
