"""Measurements, kept apart from the tests.

`python -m benchmarks [--only FAMILY]`; peers are measured in the same run.
"""
