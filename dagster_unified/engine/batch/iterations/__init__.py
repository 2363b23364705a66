"""Iterations in BATCH: rounds that are committed, as Spark jobs that carry control only; data and state are files."""
