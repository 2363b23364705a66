"""Intermediates: the materialized output of stages, stored, read back and freed."""
