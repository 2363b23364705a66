"""The folders in which `deltalake` finds tables, and requests to their stores."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from dagster_unified.errors import ConfigurationError
from dagster_unified.storage.paths import is_in_object_store, is_local, storage_path

if TYPE_CHECKING:
    from upath import UPath

_ATTEMPTS = 5
"""Requests to a store whose answer breaks off each time."""

T = TypeVar("T")


def table_folder(path: str, what: str) -> UPath:
    """A table's folder; raises `ConfigurationError` naming `what` for one that readers of Delta do not find."""
    folder = storage_path(path, what)
    if re.search(r"%[0-9A-Fa-f]{2}|\\", folder.path):
        raise ConfigurationError(
            f"{what}: {folder} has a backslash, or a % before two hexadecimal digits, which readers of Delta take"
            " for other characters; rename the folder"
        )
    if is_local(folder) and re.search(r"[\x00-\x1f]", folder.path):
        raise ConfigurationError(
            f"{what}: {str(folder)!r} has a control character in it, and deltalake does not reach such a folder;"
            " rename it"
        )
    return folder


def ask_store(path: UPath, ask: Callable[[], T]) -> T:
    """Ask a table's store; ask again where its answer breaks off, which `deltalake` does not do by itself.

    It does repeat requests that nobody answers, for minutes; these are not repeated here.
    """
    for attempt in range(1, _ATTEMPTS):
        try:
            return ask()
        except OSError as error:
            if not is_in_object_store(path) or "body" not in str(error):
                raise
            time.sleep(0.05 * 2**attempt)
    return ask()
