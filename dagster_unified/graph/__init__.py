"""The logical graph and everything that is decided from it alone: boundedness, mode, chaining, regions, lint, explain.

Imports neither pyspark nor dagster, so that it runs anywhere at once. Each file holds one decision, as a pure function.
"""
