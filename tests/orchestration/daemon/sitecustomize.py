"""Lets a Dagster daemon look every two seconds.

By itself it looks for backfills every 30 and for sensors every 5 seconds, and has no setting for that. Python imports
this by itself where its folder is on PYTHONPATH.
"""

import sys

if "dagster._daemon" in sys.orig_argv:
    from dagster._daemon import controller, sensor

    controller.DEFAULT_DAEMON_INTERVAL_SECONDS = 2
    sensor.MIN_INTERVAL_LOOP_TIME = 1
