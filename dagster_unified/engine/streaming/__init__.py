"""STREAMING on Spark: key groups, lanes, the control stream, epochs, checkpoints."""
