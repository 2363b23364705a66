"""A path is a path, whatever characters it has; only `*` stands for others, and `[*]` for a star."""

import logging
import re
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import example, given
from hypothesis import strategies as st
from upath import UPath

from dagster_unified.api import Pipeline
from dagster_unified.connectors import CsvSource, DeltaSink, FileSink, JsonSource, ParquetSource
from dagster_unified.connectors.files.folder import Folder, as_regex
from dagster_unified.connectors.protocol.positions import FilesRead
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.batch.run import Run
from dagster_unified.engine.batch.savepoint import run_all
from dagster_unified.errors import ConfigurationError, PipelineError, SourceError
from dagster_unified.storage import paths
from tests.connectors.support import Query, read_batch


class Sale(NamedTuple):
    amount: int


ODD = ["a[1]", "a?", "a*", "{a,b}", "a\\", "a b", "a%41", "a#b", "aü", "a\nb", "a[*]", "a+'\"&=;"]
"""Each would also be a pattern or a code of another name."""

NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1).filter(
    lambda name: not name.startswith((".", "_")) and not name.endswith("._COPYING_") and len(name.encode()) < 100
)


def as_path(name):
    """How an author writes a name in a path."""
    return name.replace("*", "[*]").replace("{", "{{").replace("}", "}}")


def write(folder, format, amounts):
    folder.mkdir(parents=True)
    for name, amount in amounts.items():
        file = folder / f"{name}.{format}"
        if format == "parquet":
            pq.write_table(pa.table({"amount": [amount]}), file)
        else:
            file.write_text(f'{{"amount": {amount}}}\n' if format == "json" else f"amount\n{amount}\n")


@given(st.lists(NAMES, min_size=1, max_size=4, unique=True), st.data())
@example(["a*", "ab"], None)
def test_a_path_lists_its_own_file_and_a_star_those_that_match(tmp_path_factory, names, data):
    folder = tmp_path_factory.mktemp("names")
    for name in names:
        (folder / name).touch()
    for name in names:
        found = Folder(UPath(folder / name.replace("*", "[*]")))
        assert [file.name for file in found.files()] == [name]
        assert found.paths() == [str(folder / name)]
    first = names[0]
    cut = len(first) if data is None else data.draw(st.integers(0, len(first)))
    begin = first[:cut]
    found = Folder(UPath(folder / f"{begin.replace('*', '[*]')}*"))
    assert {file.name for file in found.files()} == {name for name in names if name.startswith(begin)}


@given(NAMES)
def test_a_name_is_found_in_the_time_of_a_template(name):
    assert re.fullmatch(as_regex(name.replace("*", "[*]")), name)


@pytest.mark.a_day(1)
@pytest.mark.parametrize(("format", "source"), [("csv", CsvSource), ("json", JsonSource), ("parquet", ParquetSource)])
def test_a_file_is_read_by_its_name_and_no_other_one(spark, tmp_path, format, source):
    folder = tmp_path / "in"
    write(folder, format, dict.fromkeys(ODD, 1) | {"a1": 2, "ab": 2, "aA": 2, "a": 2, "b": 2})
    for name in ODD:
        read = source(f"{folder}/{as_path(name)}.{format}", Sale, name="sales")
        assert read_batch(spark, read) == [1], name
    starred = source(f"{folder}/a?*.{format}", Sale, name="sales")
    assert read_batch(spark, starred) == [1]
    root = FilesRead.of(str(folder), [f"{name}.{format}" for name in ODD[1:]])
    rest = source(str(folder), Sale, name="sales").after(root)
    assert read_batch(spark, rest) == [1, 2, 2, 2, 2, 2]
    pattern = source(f"{folder}/*.{format}", Sale, name="sales").after(root)
    assert read_batch(spark, pattern) == [1, 2, 2, 2, 2, 2]


class ConnectReader:
    """Notes what a reader of Spark Connect's is asked for, whose server is not told of the option for patterns."""

    __module__ = "pyspark.sql.connect.readwriter"

    def __init__(self):
        self.asked = {}

    def options(self, **options):
        self.asked.update(options)
        return self

    def load(self, path):
        self.asked["path"] = path
        return self


@pytest.mark.parametrize("name", ODD)
def test_through_connect_a_path_is_told_as_a_pattern_of_itself(tmp_path, name):
    asked = paths.load(ConnectReader(), [UPath(tmp_path / name)]).asked
    assert "__globPaths__" not in asked
    assert asked["path"] == f"file://{tmp_path}/" + re.sub(r"([\\{}\[\]*?])", r"\\\1", name)


def test_through_connect_a_colon_beside_what_would_be_a_pattern_is_refused():
    with pytest.raises(SourceError, match=r"/in/a:\[1\] has a colon .* nor through Spark Connect"):
        paths.load(ConnectReader(), [UPath("/in/a:[1]")])
    assert paths.load(ConnectReader(), [UPath("/in/a:1")]).asked["path"] == "file:///in/a:1"


def test_a_stream_reads_a_file_by_its_name(spark, tmp_path):
    folder = tmp_path / "in [1]?"
    write(folder, "csv", dict.fromkeys(ODD, 1))
    for number, name in enumerate(ODD):
        source = CsvSource(f"{folder}/{as_path(name)}.csv", Sale, name="sales")
        assert Query(spark, source, tmp_path / f"job{number}").run() == [1], name


ROOM = "room [1]{b}?*\\ %41#ü:1"
"""A folder in which everything of a run is."""


@pytest.mark.a_day(1)
@pytest.mark.parametrize("mode", ["BATCH", "STREAMING"])
def test_a_run_whose_folders_have_odd_names_ends_as_any(spark, run_streaming, tmp_path, mode):
    room = tmp_path / ROOM
    write(room / "in", "csv", {"a": 1, "b": 2})
    write(tmp_path / "room 1b!!\\ %41#ü:1" / "in", "csv", {"a": 100})
    pipeline = Pipeline("rooms")
    sales = pipeline.from_source(CsvSource(f"{as_path(str(room))}/in", Sale, name="sales"))
    shops = CsvSource(f"{as_path(str(room))}/in/b.csv", Sale, name="shops")
    known = sales.lookup_join(shops, "amount", {"known": "amount"}, Known)
    doubled = known.key_by("amount").reduce(lambda a, b: a)
    doubled.sink_to(FileSink(str(room / "out"), name="out"))
    if mode == "BATCH":
        plan = pipeline.plan({"execution.runtime-mode": "BATCH"})
        run_all(Run(plan, spark, IntermediateStore(str(room / "store")), "run", "run"))
    else:
        run_streaming(pipeline, {"execution.checkpointing.dir": str(room / "job")})
    found = pa.concat_tables(pq.read_table(file) for file in Path(room / "out").glob("*.parquet"))
    assert sorted(map(tuple, (row.values() for row in found.to_pylist()))) == [(1, None), (2, 2)]


class Known(NamedTuple):
    amount: int
    known: int | None


def test_braces_that_are_no_field_of_a_template_are_refused(tmp_path):
    with pytest.raises(PipelineError, match=r"has \{b,c\}, which no partition has; write \{\{ and \}\} for braces"):
        CsvSource(f"{tmp_path}/a{{b,c}}.csv", Sale)
    assert CsvSource(f"{tmp_path}/a{{{{b}}}}.csv", Sale).path.name == "a{b}.csv"


@pytest.mark.a_day(1)
@pytest.mark.parametrize("path", ["in", "in/10:00.csv", "in/*.csv", "i*/*"])
def test_a_colon_in_the_name_of_a_file_is_an_error_that_names_it(spark, tmp_path, path):
    write(tmp_path / "in", "csv", {"10:00": 1})
    source = CsvSource(f"{tmp_path}/{path}", Sale, name="sales")
    said = rf"source 'sales': the name of {tmp_path}/in/10:00.csv has a colon, which Hadoop does not read on a disk"
    with pytest.raises(SourceError, match=said):
        source.read(spark)
    with pytest.raises(SourceError, match=said):
        source.read_stream(spark, UPath(tmp_path / "job" / "sources" / "sales"))


def test_a_colon_in_the_name_of_a_folder_is_none_of_the_files(spark, tmp_path):
    write(tmp_path / "2024-01-01-10:00" / "b=1", "csv", {"a": 1})
    for path in ("2024-01-01-10:00", "2024-01-01-10:00/*/*.csv", "2024-01-01-*/*", "2024-01-01-10:00/b=1/a.csv"):
        assert read_batch(spark, CsvSource(f"{tmp_path}/{path}", Sale, name="sales")) == [1]


def test_hidden_files_that_may_be_data_are_named(tmp_path, caplog):
    write(tmp_path / "in", "csv", {"a": 1, "_b": 2, ".c": 3})
    (tmp_path / "in" / "_SUCCESS").touch()
    (tmp_path / "in" / ".a.csv.crc").touch()
    source = CsvSource(str(tmp_path / "in"), Sale, name="sales")
    with caplog.at_level(logging.WARNING):
        assert [file.name for file in source._existing()] == ["a.csv"]
    assert "does not read all: names that begin with _ or . are hidden, as .c.csv, _b.csv" in caplog.text
    (tmp_path / "in" / "a.csv").unlink()
    with pytest.raises(
        PipelineError, match=r"there are no files at .*/in; names that begin with _ or . are hidden, as"
    ):
        source._existing()


REFUSED = re.compile(r"[\\\0-\x1f]|%[0-9A-Fa-f]{2}")


@pytest.mark.parametrize("name", [*"abc ?*{}#ü:+'\"&=;<>`~@!$(),[]|^\\\n", "%41", "%20", "%", "100% a b#[1]"])
def test_a_delta_table_is_where_its_path_says_or_refused(tmp_path, name):
    folder = tmp_path / f"a{name}b"
    if REFUSED.search(folder.name):
        with pytest.raises(
            ConfigurationError, match=r"(which readers of Delta take|deltalake does not reach).*rename "
        ):
            DeltaSink(str(folder), name="out")
        return
    sink = DeltaSink(str(folder), name="out")
    sink.committer(pa.schema([("amount", pa.int64())]))
    assert DeltaTable(str(folder)).version() == 0
    assert sink.dataset().to_table().num_rows == 0
    assert [place.name for place in tmp_path.iterdir()] == [folder.name]
