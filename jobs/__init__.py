"""The example pipelines, one file each."""
