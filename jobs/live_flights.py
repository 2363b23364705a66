"""The flights pipeline on files as they arrive: the same code as `flight_delays`, on a folder that is watched."""

from jobs.data import FOLDER, OUTPUT
from jobs.flight_delays import build

INCOMING = FOLDER / "incoming"
TABLES = OUTPUT.parent / "live_tables"

pipeline = build(str(INCOMING), str(TABLES), name="live_flights", live=True)
