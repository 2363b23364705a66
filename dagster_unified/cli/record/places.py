"""The columns of the place that a record class is written for, and how its fields get their names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from dagster_unified.cli.record.classes import Names
from dagster_unified.cli.record.files import Sample, is_delta_table, of_delta_table, of_files
from dagster_unified.cli.record.tables import of_table
from dagster_unified.errors import ConfigurationError

if TYPE_CHECKING:
    import pyarrow as pa

    from dagster_unified.cli.record.files import Format
    from dagster_unified.connectors.sql.postgres import PostgresConnection

_WITHOUT = "leave it out with --without {column}"
_OF_FILES = Names(False, f"write the files anew with another name or type, times in microseconds, or {_WITHOUT}")
_OF_CSV = Names(False, "a field has the name of its column, and CSV is read whole: rename it in the header")
_OF_DELTA = Names(False, f"rename it in the table, or {_WITHOUT}")
_OF_POSTGRES = Names(False, f"give a query in place of the table, which casts or renames it, or {_WITHOUT}")
_OF_VALUES = Names(True, f"declare the class by hand, or {_WITHOUT}")

_GENERATED = re.compile(r"[\w.]*_pb2:\w+")


class Place(NamedTuple):
    """What a record class is written for."""

    shown: str
    """For people: `table public.orders`."""

    stem: str
    """What the class is named after."""

    schema: pa.Schema
    names: Names
    whole: bool = False
    """Whether a record has all of its columns."""


def place_of(where: str, format_: Format | None, postgres: str | None, registry: str | None, sample: Sample) -> Place:
    """Look into a place, as the arguments of the command name it."""
    from dagster_unified.storage.paths import name_of

    if postgres is not None:
        schema = of_table(where, _connection(postgres))
        if " " in where.strip():
            return Place("a query", "record", schema, _OF_POSTGRES)
        return Place(f"table {where}", where.rpartition(".")[2], schema, _OF_POSTGRES)
    if registry is not None:
        from dagster_unified.cli.record.subjects import of_subject

        return Place(f"topic {where}", where, of_subject(where, registry), _OF_VALUES)
    if _GENERATED.fullmatch(where):
        from dagster_unified.cli.record.subjects import of_generated_class

        return Place(where, where.rpartition(":")[2], of_generated_class(where), _OF_VALUES)
    if re.match("postgres(ql)?://", where):
        raise ConfigurationError(
            "record: give the table, and its server behind --postgres, such as record public.orders --postgres"
            " postgresql://etl@db.example/shop"
        )
    stem = name_of(re.sub(r"(\.\w+)+$", "", where) or where, "record")
    if format_ is None and "*" not in where and "{" not in where and is_delta_table(where):
        return Place(where, stem, of_delta_table(where), _OF_DELTA)
    found, schema = of_files(where, format_, sample)
    return Place(where, stem, schema, _OF_CSV if found == "csv" else _OF_FILES, whole=found == "csv")


def _connection(url: str) -> PostgresConnection:
    from dagster_unified.connectors.sql.postgres import PostgresConnection

    connection = PostgresConnection(url)
    if connection.password is not None:
        raise ConfigurationError(
            "record: the URL has a password, which others on this machine see in the list of processes; leave it out,"
            " and set PGPASSWORD"
        )
    return connection
