"""A source of the tests: logs in a folder, a file for each part. A line is a record, and its number the offset."""

from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from dagster_unified.connectors.protocol import Boundedness, Malformed, SplitSource
from dagster_unified.operators.time import to_millis
from dagster_unified.records import record_type


class Event(NamedTuple):
    key: str
    number: int
    at: int


class LogSource(SplitSource[Event]):
    kind = "log"
    finds_times = True

    def __init__(self, folder, name="log", bounded=True, until=None, most=None, on_malformed="fail", split=2):
        self.folder, self.name, self.until, self.split = str(folder), name, until, split
        self.max_records_per_trigger, self.on_malformed = most, on_malformed
        self.boundedness = Boundedness.BOUNDED if bounded else Boundedness.UNBOUNDED
        self.records = record_type(Event, f"source '{name}'")

    @property
    def origin(self):
        return f"logs in {self.folder}"

    def describe(self):
        return self.origin

    def lines(self, part):
        return (Path(self.folder) / f"{part}.log").read_text().splitlines()

    def parts(self):
        return sorted(file.stem for file in Path(self.folder).glob("*.log"))

    def oldest(self):
        return dict.fromkeys(self.parts(), 0)

    def newest(self):
        return {part: len(self.lines(part)) for part in self.parts()}

    def last(self):
        return self.until

    def at(self, moment: datetime):
        found = {}
        for part in self.parts():
            times = [msgspec.json.decode(line)[2] for line in self.lines(part)]
            later = (number for number, time in enumerate(times) if time >= to_millis(moment))
            found[part] = next(later, len(times))
        return found

    def splits(self, start, end):
        return [
            (part, begin, min(begin + self.split, last))
            for part, last in end.items()
            for begin in range(start[part], last, self.split)
        ]

    def read_split(self, split):
        part, begin, end = split
        events = []
        for number, line in enumerate(self.lines(part)[begin:end], begin):
            try:
                events.append(Event(*msgspec.json.decode(line, type=tuple[str, int, int])))
            except msgspec.DecodeError as error:
                yield Malformed(f"{part}@{number}", line, str(error))
        yield self.records.to_batch(events)


def append(folder, part, *events):
    """Adds events, or lines as they are, to a log."""
    folder.mkdir(exist_ok=True)
    with (folder / f"{part}.log").open("a") as file:
        for event in events:
            file.write(f"{event if isinstance(event, str) else msgspec.json.encode(event).decode()}\n")
