"""The flights pipeline on Kafka and PostgreSQL: the same code as `flight_delays`, between other systems.

Flights come from a topic. Totals and sums are upserted into tables of PostgreSQL, and aircraft that stand idle are
reported to a topic. FLIGHTS_KAFKA names the broker and FLIGHTS_POSTGRES the database, where it runs.

`stream` reads the topic as it grows; `past` reads what is there when it begins, and ends.
"""

from __future__ import annotations

from dagster import EnvVar

from dagster_unified.api import Pipeline
from dagster_unified.connectors import (
    KafkaConnection,
    KafkaOffsetsInitializer,
    KafkaSink,
    KafkaSource,
    PostgresConnection,
    PostgresSink,
)
from jobs.flight_delays import delays
from jobs.flights import RawFlight, clean

FLIGHTS = "flights"
"""The topic with the flights, one JSON object each."""

CLUSTER = KafkaConnection(EnvVar("FLIGHTS_KAFKA"))
DATABASE = PostgresConnection.of(EnvVar("FLIGHTS_POSTGRES"))


def build(name: str, suffix: str, ends: bool) -> Pipeline:
    """The pipeline. `suffix` tells the tables and the topic of idle aircraft from others'; `ends` bounds the source."""
    pipeline = Pipeline(name)
    bounded = KafkaOffsetsInitializer.latest() if ends else None
    source = KafkaSource(FLIGHTS, RawFlight, CLUSTER, name="flights", bounded=bounded, on_malformed="divert")
    totals, sums, alerts = delays(pipeline.from_source(source).flat_map(clean).name("clean").uid("clean"))
    totals.sink_to(PostgresSink(f"carrier_delays{suffix}", DATABASE, mode="upsert", key="carrier"))
    sums.sink_to(PostgresSink(f"delay_propagation{suffix}", DATABASE, mode="upsert", key=("carrier", "month")))
    alerts.sink_to(KafkaSink(f"idle_aircraft{suffix}", CLUSTER, key="tail"))
    return pipeline


stream = build("kafka_flights", "", ends=False)
past = build("past_kafka_flights", "_past", ends=True)
