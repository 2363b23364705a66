"""The code location: puts this deployment's jobs and resources together. `workspace.yaml` points here."""

from dagster_unified.orchestration import unified_definitions
from jobs.flight_delays import pipeline as flight_delays
from resources import local

defs = unified_definitions([flight_delays], resources=local())
