"""Files: CSV, JSON and Parquet, read once or as they appear, and written in folders."""
