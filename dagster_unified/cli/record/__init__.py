"""The record class for a file, a table, or a topic's schema in a registry. `command.py` is what is called."""
