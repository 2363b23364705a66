"""The pipeline that a new project or a new component begins with, as text."""

_PIPELINE = '''"""Totals of sales, by shop."""

from typing import NamedTuple

{imports}


class Sale(NamedTuple):
    shop: str
    amount: int


def add(a: Sale, b: Sale) -> Sale:
    return Sale(a.shop, a.amount + b.amount)


pipeline = Pipeline("{name}")
sales = {source}
totals = sales.key_by("shop").reduce(add).name("totals")
totals.{sink}
'''


def over_files(name: str) -> str:
    """From CSV files in `data/sales` to a Delta table."""
    return _PIPELINE.format(
        name=name,
        imports="from dagster_unified.api import Pipeline\nfrom dagster_unified.connectors import CsvSource, DeltaSink",
        source='pipeline.from_source(CsvSource("data/sales", Sale, name="sales"))',
        sink='sink_to(DeltaSink("data/totals", mode="upsert", key="shop", name="totals"))',
    )


def over_literals(name: str) -> str:
    """From records in the program to standard output: it needs no data."""
    return _PIPELINE.format(
        name=name,
        imports="from dagster_unified.api import Pipeline",
        source='pipeline.from_collection([Sale("north", 3), Sale("south", 5), Sale("north", 4)])',
        sink="print()",
    )
