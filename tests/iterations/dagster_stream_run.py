"""What Dagster's daemon does for `dagster_stream`, in a process of its own: `dagster_stream_run FOLDER`.

FOLDER is the Dagster instance's. It runs what the sensor asks for, until there is nothing more to run.
"""

import sys
import time

from dagster import DagsterInstance, RunRequest, build_sensor_context, execute_job, reconstructable

from tests.iterations.dagster_stream import defs, job, sensor
from tests.orchestration.support import ticked


def main(folder: str) -> None:
    with DagsterInstance.local_temp(folder) as instance:
        for run in instance.get_runs()[:1]:
            if not run.is_finished:
                instance.report_run_failed(run)  # as the sensor for dead runs does
        context = build_sensor_context(instance, repository_def=defs.get_repository_def())
        while True:
            asked = ticked(sensor(), context)
            if isinstance(asked, RunRequest):
                print(asked.tags["dagster-unified/reason"], flush=True)
                with execute_job(reconstructable(job), instance, tags=asked.tags):
                    pass
            elif "; attempt" in asked.skip_message:
                time.sleep(0.1)
            else:
                print(asked.skip_message, flush=True)
                break


if __name__ == "__main__":
    main(sys.argv[1])
