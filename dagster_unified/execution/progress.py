"""What is running, while it runs, and what each stage emitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from dagster_unified.engine.events import (
    EpochCommitted,
    Event,
    QueriesStopped,
    RecordsWait,
    StageFinished,
    StageStarted,
)
from dagster_unified.graph.plan import Plan


def stages(finished: Sequence[StageFinished]) -> Table:
    """What each stage emitted."""
    table = Table("stage", "rows", "bytes", "seconds", "notes")
    for column in table.columns[1:4]:
        column.justify = "right"
    for event in finished:
        m = event.manifest
        notes = [f"{n:,} {name}" for name, n in m.counters.items()] + (["recomputed"] if event.reason else [])
        table.add_row(event.stage, f"{m.rows:,}", f"{m.bytes:,}", f"{m.seconds:.1f}", ", ".join(notes))
    return table


class ShownProgress:
    """What is running, while it runs: a live line on a terminal, plain lines otherwise."""

    def __init__(self, planned: Plan, console: Console) -> None:
        self._planned, self._console = planned, console
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._live = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._task: Any = None

    def __enter__(self) -> ShownProgress:
        streaming = self._planned.execution.mode == "STREAMING"
        work = "until its input ends, or Ctrl-C" if streaming else f"{len(self._planned.regions)} stages"
        start = f"{self._planned.name}: {self._planned.execution.mode}, {work}; starting Spark"
        if self._live is None:
            self._console.print(start, highlight=False)
        else:
            self._live.start()
            self._task = self._live.add_task(start)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, event: Event) -> None:
        """Shows an event."""
        if isinstance(event, EpochCommitted):
            text = (
                f"epoch {event.epoch} of {event.query}: {event.rows_in:,} rows read, {event.written_rows()}, committed"
                f" in {event.seconds:.1f} s"
            )
        elif isinstance(event, QueriesStopped):
            return
        elif not isinstance(event, (StageStarted, StageFinished)):
            text = event.describe()
        elif isinstance(event, StageFinished):
            place = f"stage {event.number} of {event.of}: {event.stage}"
            text = f"{place}: {event.manifest.rows:,} rows in {event.manifest.seconds:.1f} s"
        else:
            place = f"stage {event.number} of {event.of}: {event.stage}"
            text = place + (f" (recomputing: {event.reason})" if event.reason else "")
        if self._live is None:
            self._console.print(text, highlight=False)
        elif isinstance(event, StageFinished):
            self._live.console.print(f"[green]✓[/] {text}", highlight=False)
        elif isinstance(event, RecordsWait):
            self._live.console.print(text, highlight=False, markup=False)
        else:
            self._live.update(self._task, description=text)
