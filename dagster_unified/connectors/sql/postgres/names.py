"""Names in SQL: checked, and quoted so that they are taken as they are written. Needs no client."""

from __future__ import annotations

from dataclasses import dataclass

from dagster_unified.connectors.secrets import check_is_no_url
from dagster_unified.errors import PipelineError

_LONGEST = 63
"""Bytes of a name; PostgreSQL would cut off the rest without a word."""


def quoted(name: str) -> str:
    """A name as SQL has it; raises `PipelineError` for what cannot be one."""
    if not name or len(name.encode()) > _LONGEST or any(c in '"%\0' for c in name):
        raise PipelineError(
            f"{name!r} cannot be the name of something in PostgreSQL: expected 1 to {_LONGEST} bytes, without quotes,"
            " % and NUL"
        )
    return f'"{name}"'


@dataclass(frozen=True)
class TableName:
    """A table's name, and its schema's where it is given."""

    schema: str | None
    table: str

    @classmethod
    def of(cls, written: str) -> TableName:
        """`table` or `schema.table`, each as it is called, in its case; raises `PipelineError` for anything else."""
        check_is_no_url(written)
        parts = written.split(".") if isinstance(written, str) else []
        if len(parts) not in (1, 2):
            raise PipelineError(f"{written!r} is no table of PostgreSQL: write 'table' or 'schema.table'")
        for part in parts:
            quoted(part)
        return cls(parts[0] if len(parts) == 2 else None, parts[-1])

    @property
    def sql(self) -> str:
        """The name in SQL."""
        return quoted(self.table) if self.schema is None else f"{quoted(self.schema)}.{quoted(self.table)}"

    def __str__(self) -> str:
        return self.table if self.schema is None else f"{self.schema}.{self.table}"
