"""Execution on Spark, through the public DataFrame API only, so that a classic session and Spark Connect both serve."""
