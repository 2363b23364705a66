"""Runs on records: the one implementation of every operator, in plain Python.

Ships to Spark workers and runs in a harness with no JVM, so it imports nothing but the standard library, pyarrow,
msgspec and the library's own leaf modules. An operator sees a context (state, timers, current key, watermark,
collector) and never knows which driver runs it: BATCH (`batch.py`), STREAMING, or the in-memory harness.
"""
