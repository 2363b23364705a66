"""Keyed state as typed tables on Spark: from the pages of key groups to rows of a savepoint, and back."""
