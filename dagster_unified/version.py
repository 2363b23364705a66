"""The installed version of this library."""

from importlib.metadata import PackageNotFoundError, version


def library_version() -> str:
    """Return the installed version; "unknown" where the package is there without its metadata."""
    try:
        return version("dagster-unified")
    except PackageNotFoundError:
        return "unknown"
