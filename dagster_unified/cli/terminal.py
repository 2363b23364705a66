"""The terminal.

Rich is loaded by the first thing that is printed through it: explaining a pipeline needs none of it.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@cache
def out() -> Console:
    """Results."""
    from rich.console import Console

    return Console()


@cache
def err() -> Console:
    """Progress, warnings and errors."""
    from rich.console import Console

    return Console(stderr=True)
