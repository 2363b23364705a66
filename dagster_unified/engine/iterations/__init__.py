"""An iteration on Spark: files that workers map, the log that commits epochs, and the jobs that run levels."""
