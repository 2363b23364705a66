"""An iteration on Spark: files that workers map, the journal that commits rounds, and the jobs that run levels."""
