"""The drivers pass records, keys and watermarks to operators: partitions in BATCH, key groups in STREAMING."""
