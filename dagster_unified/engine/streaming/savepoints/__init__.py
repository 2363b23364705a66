"""Savepoints of STREAMING jobs: asked for, copied, exported as tables, and taken by a schedule."""
