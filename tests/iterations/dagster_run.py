"""A run of the job of `dagster_job` in a process of its own: `python -m tests.iterations.dagster_run FOLDER`.

FOLDER is the Dagster instance's. A run that is there already is re-executed from failure.
"""

import sys

from dagster import DagsterInstance, ReexecutionOptions, execute_job, reconstructable

from tests.iterations.dagster_job import job


def main(folder: str) -> bool:
    with DagsterInstance.local_temp(folder) as instance:
        before = instance.get_runs()
        if before and not before[0].is_finished:
            instance.report_run_failed(before[0])  # as the sensor for dead runs does
        options = ReexecutionOptions.from_failure(before[0].run_id, instance) if before else None
        with execute_job(reconstructable(job), instance, reexecution_options=options) as result:
            return result.success


if __name__ == "__main__":
    sys.exit(0 if main(sys.argv[1]) else 1)
