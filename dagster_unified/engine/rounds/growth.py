"""Whether an unbounded iteration multiplies its records by itself. Knows how many were fed back, and nothing else."""

from __future__ import annotations

from dagster_unified.errors import PipelineError

MOST_GROWING, MOST_TIMES = 10, 10
"""Rounds in a row, each with more feedback than the one before, and how far above the limit: then a loop multiplies."""


class Growth:
    """Watches the feedback of an iteration, of which `most` records may circulate while it takes new input."""

    def __init__(self, where: str, most: int, afterwards: str = "") -> None:
        """`afterwards` says what becomes of the iteration then."""
        self._where, self._most, self._afterwards = where, most, afterwards
        self._before = self._growing = 0  # fed back by the round before, and how many rounds in a row it has been more

    def check(self, feedback: int) -> None:
        """Takes the feedback of a round; raises `PipelineError` where the loop multiplies its records by itself."""
        self._growing = self._growing + 1 if feedback > self._before else 0
        self._before = feedback
        if self._growing >= MOST_GROWING and feedback > MOST_TIMES * self._most:
            raise PipelineError(
                f"{self._where}: its records multiply: each of its last {self._growing} rounds fed back more than the"
                f" one before, the last one {feedback:,}, where {self._most:,} may circulate while new input is taken"
                " (iteration.max-feedback-records). Let the body drop or combine records, or raise the option if they"
                f" become fewer by themselves{self._afterwards}"
            )
