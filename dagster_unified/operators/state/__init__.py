"""Keyed state: what an author declares, the handles that read and write it, and how it is stored."""
