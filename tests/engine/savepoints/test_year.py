"""The year of flights, cut at some days: no matter who reads which piece, the tables are those of one run."""

from zlib import crc32

import pytest

from jobs import aircraft_sessions, delay_totals, flight_delays
from jobs.data import daily, flights_csv, planes_csv
from tests.depth import NIGHTLY, SEED, chance, rotated
from tests.engine.savepoints.test_handover import Cut
from tests.support import table_rows

SHARE = 1 if NIGHTLY else 16
"""One of so many aircraft is followed, another one from day to day."""

CUTS = 5 if NIGHTLY else 2


def pieces(folder, cuts):
    """The lines of the flights before each cut, and after the last one."""
    found = [[] for _ in range(len(cuts) + 1)]
    for number, (_, (header, *lines)) in enumerate(daily(flights_csv(folder))):
        tail = header.split(",").index("tailnum")
        piece = sum(cut <= number for cut in cuts)
        found[piece] += [line for line in lines if crc32(line.split(",")[tail].encode()) % SHARE == SEED % SHARE]
    return [[header, *lines] for lines in found]


def sessions(folder, out):
    return aircraft_sessions.build(f"{folder}/in/*.csv", str(planes_csv(folder)), f"{folder}/{out}")


def totals(folder, out):
    return delay_totals.build(f"{folder}/in/*.csv", f"{folder}/{out}")


def delays(folder, out):
    return flight_delays.build(f"{folder}/in/*.csv", f"{folder}/{out}")


@pytest.mark.rotates("stories")
@pytest.mark.parametrize("build", rotated([sessions, totals, delays], 1))
def test_the_year_is_read_in_pieces_each_in_any_mode_and_the_tables_are_those_of_one_run(spark, tmp_path, build):
    random = chance("the year of flights")
    cuts = sorted(random.sample(range(1, 365), CUTS))
    parts, cut, before = pieces(tmp_path, cuts), Cut(spark, tmp_path), None
    (tmp_path / "in").mkdir()
    for number, lines in enumerate(parts):
        (tmp_path / "in" / f"{number}.csv").write_text("\n".join(lines) + "\n")
        options = {"pipeline.max-parallelism": random.randint(1, 6)}
        if before is not None:
            options["execution.state-recovery.path"] = before
        if number < len(parts) - 1:
            before = options["execution.savepoint.path"] = f"{tmp_path}/savepoint {number}"
        cut.run(build(tmp_path, "in pieces"), random.choice(["BATCH", "STREAMING"]), options)
    cut.run(build(tmp_path, "at once"), "BATCH")
    tables = [table.name for table in (tmp_path / "at once").iterdir()]
    assert tables
    for table in tables:
        assert table_rows(tmp_path / "in pieces" / table) == table_rows(tmp_path / "at once" / table) != []
