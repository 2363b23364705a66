"""What both modes build alike on DataFrames: native operators, aggregates, exchanges, passes through Python."""
