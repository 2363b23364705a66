"""A program: the connected Python operators of one task, run as one pass over Arrow batches."""
