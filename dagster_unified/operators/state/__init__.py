"""Keyed state: what an author declares, the handles that read and write it, and how it is stored.

Each kind of state is one file, with its descriptor and its handle: `value.py`, `list.py`, `map.py`, `reducing.py`,
`aggregating.py`. Everything else asks the descriptor: a new kind is a new file, and its names in `api/__init__.py`.
"""
