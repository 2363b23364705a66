"""A pipeline with side outputs, a union, columns and a rolling sum, for golden texts.

Lines are part of them: edit both together.
"""

from typing import NamedTuple

from dagster_unified.api import OutputTag, Pipeline, ProcessFunction, WatermarkStrategy
from dagster_unified.api import functions as F
from dagster_unified.connectors import FileSink

CITIES = frozenset({"Rome", "Bern", "Oslo"})


class Visit(NamedTuple):
    city: str
    at: int
    minutes: int


class Total(NamedTuple):
    city: str
    minutes: int


ODD = OutputTag("odd", Visit)


class Sort(ProcessFunction):
    def process_element(self, value, ctx):
        yield value if value.city in CITIES else (ODD, value)


def build() -> Pipeline:
    pipeline = Pipeline("visits")
    by_at = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
    one = pipeline.from_collection([Visit("Rome", 1, 5)], name="one").assign_timestamps_and_watermarks(by_at)
    two = pipeline.from_collection([Visit("Bern", 2, 6)], name="two").assign_timestamps_and_watermarks(by_at)
    known = one.union(two).process(Sort(), output_type=Visit).name("sort").uid("sort")
    known.key_by("city").agg(F.sum("minutes").alias("minutes"), output_type=Total).name("totals").sink_to(
        FileSink("/tables/totals")
    )
    known.key_by("city").sum("minutes").name("rolled").rescale().filter(lambda v: v.minutes > 3).name("long").sink_to(
        FileSink("/tables/rolled")
    )
    known.get_side_output(ODD).where(F.col("minutes") > 1).name("odd").sink_to(FileSink("/tables/odd"))
    return pipeline
