"""Runs a pipeline in this process, without Dagster: from a notebook, a script or a test.

Knows the API and the engine. Nothing schedules a job here and nothing starts it again.
"""
