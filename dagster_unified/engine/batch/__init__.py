"""BATCH: one region as one Spark job, its output materialized in the intermediate store."""
