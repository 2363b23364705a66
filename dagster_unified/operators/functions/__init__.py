"""The functions that an author writes, and their contexts."""
