"""`python -m dagster_unified.cli`."""

from dagster_unified.cli import main

main()
