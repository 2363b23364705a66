"""Databases: one protocol for what is written exactly once, one planning of reads; each database says how it differs.

`postgres/` speaks to PostgreSQL with its own clients, `generic/` to what SQLAlchemy has a dialect for.
"""
