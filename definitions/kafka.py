"""A code location of its own for the pipelines that need Kafka and PostgreSQL: `make demo-kafka` loads it."""

from datetime import timedelta

from dagster_unified.orchestration import StreamingDeployment, unified_definitions
from jobs.kafka_flights import past, stream
from resources import resources

defs = unified_definitions(past, StreamingDeployment(stream, tick_every=timedelta(seconds=5)), resources=resources())
