"""The functions that an author writes, and the contexts that they are given."""
