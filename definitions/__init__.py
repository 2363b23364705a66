"""The code location: puts this deployment's jobs and resources together. `workspace.yaml` points here."""

from datetime import timedelta

from dagster import Definitions, RunFailureSensorContext, run_failure_sensor

from dagster_unified.orchestration import BatchDeployment, StreamingDeployment, unified_definitions
from jobs.aircraft_profiles import pipeline as aircraft_profiles
from jobs.aircraft_sessions import pipeline as aircraft_sessions
from jobs.airport_communities import pipeline as airport_communities
from jobs.airport_ranks import pipeline as airport_ranks
from jobs.daily_flights import DAYS
from jobs.daily_flights import pipeline as daily_flights
from jobs.delay_rules import pipeline as delay_rules
from jobs.destinations import pipeline as destinations
from jobs.flight_delays import pipeline as flight_delays
from jobs.graph_components import pipeline as graph_components
from jobs.late_flights import live as live_lateness
from jobs.late_flights import pipeline as late_flights
from jobs.live_flights import pipeline as live_flights
from jobs.ongoing_delays import HISTORY, SAVEPOINT
from jobs.ongoing_delays import pipeline as ongoing_delays
from jobs.weather_delays import pipeline as weather_delays
from resources import resources


@run_failure_sensor
def alert(context: RunFailureSensorContext) -> None:
    """Where an alert would go out: a failed run, with its reason.

    The streaming sensor restarts what it can by itself.
    """
    context.log.error(f"{context.dagster_run.job_name} failed: {context.failure_event.message}")


defs = Definitions.merge(
    unified_definitions(
        flight_delays,
        weather_delays,
        aircraft_sessions,
        delay_rules,
        destinations,
        airport_ranks,
        airport_communities,
        aircraft_profiles,
        graph_components,
        late_flights,
        BatchDeployment(daily_flights, partitions=DAYS, carry_state=True),
        StreamingDeployment(live_flights, tick_every=timedelta(seconds=5)),
        StreamingDeployment(live_lateness, tick_every=timedelta(seconds=5)),
        BatchDeployment(
            ongoing_delays,
            partitions=HISTORY,
            carry_state=True,
            options={"execution.savepoint.path": str(SAVEPOINT)},
        ),
        StreamingDeployment(ongoing_delays, from_savepoint=str(SAVEPOINT), tick_every=timedelta(seconds=5)),
        resources=resources(),
    ),
    Definitions(sensors=[alert]),
)
