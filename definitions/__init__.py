"""The code location: puts this deployment's jobs and resources together. `workspace.yaml` points here."""

from jobs.flight_delays import pipeline as flight_delays

from dagster_unified.orchestration import unified_definitions
from resources import local

defs = unified_definitions([flight_delays], resources=local())
