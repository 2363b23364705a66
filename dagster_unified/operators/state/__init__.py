"""Keyed state: what an author declares, the handles that read and write it, and how it is stored.

The kinds of state are in `handles.py`, each with its descriptor and its handle. Everything else asks the descriptor: a
new kind is two classes there, or in a file of their own, and their names in `api/__init__.py`.
"""
