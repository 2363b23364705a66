"""Savepoints as tables: what they are, and what reads, writes and compares them. Knows no engine."""
