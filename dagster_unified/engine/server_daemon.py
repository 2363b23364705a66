"""The Python daemon of a Spark Connect server: as `daemon.py`, and it ends when nobody uses it.

A server has a daemon for each of its sessions, and never ends one: without this, each run would leave a process behind
for as long as the server runs. Spark ends workers that were idle for a minute, and starts another daemon where a
session needs one again.
"""

from dagster_unified.engine.daemon import main

IDLE = 120.0
"""Seconds without a worker after which a daemon ends."""

if __name__ == "__main__":
    main(IDLE)
