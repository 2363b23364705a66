"""What the mode-parity lint says: an operator, a rule, and what to do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing the lint found: its rule, its severity (`warning` or `note`), the operator, and what to do.

    `node` is None where the operator leads to no sink, and so is not in the plan.
    """

    rule: str
    severity: str
    node: int | None
    message: str
