"""dagster-unified: a data pipeline written once, run in BATCH or STREAMING on Spark under Dagster."""
