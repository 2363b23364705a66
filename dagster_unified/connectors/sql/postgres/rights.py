"""What the user of a connection may do, and the statements that grant what is missing. Runs on the driver."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dagster_unified.connectors.sql.postgres.names import quoted
from dagster_unified.errors import ConfigurationError

if TYPE_CHECKING:
    import psycopg

    Client: TypeAlias = psycopg.Connection[tuple[Any, ...]]

_DENIED = re.compile(r'permission denied for (materialized view|foreign table|\w+) "?([^"]+)')
_ON: dict[str, tuple[str, str]] = {
    "database": ("CONNECT", "DATABASE"), "schema": ("USAGE", "SCHEMA"), "sequence": ("USAGE", "SEQUENCE"),
    "type": ("USAGE", "TYPE"), "function": ("EXECUTE", "FUNCTION"), "table": ("SELECT", "TABLE"),
    "view": ("SELECT", "TABLE"), "materialized view": ("SELECT", "TABLE"), "foreign table": ("SELECT", "TABLE"),
}  # fmt: skip
"""What a source needs of a thing, by what the server calls it, and what GRANT calls it."""


def check_rights(
    client: Client, where: str, kind: Literal["database", "schema", "table"], oid: int, name: str, rights: Sequence[str]
) -> None:
    """Raises `ConfigurationError`, with the statement that grants it, for what the user may not do.

    `name` is as SQL has it.
    """
    asked = ", ".join(f"has_{kind}_privilege(%s::oid, %s)" for _ in rights)
    parameters = [parameter for right in rights for parameter in (oid, right)]
    row = client.execute(f"SELECT current_user, {asked}".encode(), parameters).fetchone()
    assert row is not None
    missing = ", ".join(right for right, held in zip(rights, row[1:], strict=True) if not held)
    if missing:
        raise ConfigurationError(
            f"{where}: user '{row[0]}' has no right to {missing} on {kind} {name};"
            f" GRANT {missing} ON {kind.upper()} {name} TO {quoted(row[0])}"
        )


def grant_of(said: str, user: str | None) -> str:
    """What to do about what the server says that a user may not do."""
    to = "the user that the job connects as" if user is None else f'"{user}"'
    found = _DENIED.search(said)
    right, kind = _ON.get(found[1], ("", "")) if found else ("", "")
    return f"GRANT {right} ON {kind} {found[2]} TO {to}" if found and right else f"grant it to {to}"
