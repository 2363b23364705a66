"""`record`: writes the record class for a file, a table, or a topic's schema in a registry."""

from __future__ import annotations

import keyword
from typing import Annotated, Literal

from cyclopts import Parameter, validators

from dagster_unified.cli.terminal import write
from dagster_unified.errors import ConfigurationError, nearest


def record(
    where: str,
    /,
    *,
    name: str | None = None,
    format: Literal["csv", "json", "parquet"] | None = None,  # noqa: A002
    postgres: str | None = None,
    registry: str | None = None,
    without: Annotated[list[str], Parameter(negative="")] = [],
    delimiter: str | None = None,
    null_value: str = "",
    rows: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 10_000,
) -> int:
    """Write the record class for a file, a table, or a topic whose values have a schema, ready to paste.

    Parameters
    ----------
    where
        Files of CSV, JSON or Parquet (a file, a folder or a pattern, on a disk or in a bucket); the folder of a Delta
        table; with --postgres a table or a query, and with --registry a topic; or a generated class of Protobuf, such
        as sales_pb2:Sale.
    name
        The class's name; by default made of that of the file, the table or the topic.
    format
        What the files are, where their names do not say it.
    postgres
        The server of the table, such as postgresql://etl@db.example/shop. Its password is taken from PGPASSWORD, or
        from where else libpq finds it.
    registry
        The URL of the schema registry. A login is taken from SCHEMA_REGISTRY_LOGIN, as user:password.
    without
        A column that is left out. May be repeated.
    delimiter
        Of CSV.
    null_value
        The text of CSV that stands for a missing value, besides none at all.
    rows
        Of how many rows of CSV or JSON the types of columns are taken.
    """
    if postgres is not None and registry is not None:
        raise ConfigurationError("record: give --postgres for a table, or --registry for a topic, and not both")
    from dagster_unified.cli.record.classes import class_name, record_class
    from dagster_unified.cli.record.files import Sample
    from dagster_unified.cli.record.places import place_of

    place = place_of(where, format, postgres, registry, Sample(rows, delimiter, null_value))
    schema = place.schema
    for column in without:
        if column not in schema.names:
            raise ConfigurationError(
                f"record: {place.shown} has no column '{column}' to leave out{nearest(column, schema.names)}"
            )
        if place.whole:
            raise ConfigurationError(
                f"record: column '{column}' cannot be left out, since a record of CSV has all columns of its files"
            )
        schema = schema.remove(schema.get_field_index(column))
    chosen = name or class_name(place.stem)
    if not chosen.isidentifier() or keyword.iskeyword(chosen):
        raise ConfigurationError(f"record: {chosen!r} is not the name of a class; give one such as --name Order")
    doc = f"A row of {place.shown}."
    write(record_class(schema, chosen, doc, f"record: {place.shown}", place.names).rstrip("\n"))
    return 0
