"""The installed version of this library."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def library_version() -> str:
    """Return the installed version; "unknown" where the package is there without its metadata."""
    try:
        return version("dagster-unified")
    except PackageNotFoundError:
        return "unknown"
