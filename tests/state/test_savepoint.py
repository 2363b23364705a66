"""Savepoints as tables, read, changed and written without an engine."""

import json
import math
import random
from datetime import datetime, timezone
from enum import Enum, IntEnum
from typing import NamedTuple

import pyarrow as pa
import pytest

from dagster_unified.api import KeyedProcessFunction, MapStateDescriptor, Pipeline, RuntimeContext, ValueStateDescriptor
from dagster_unified.errors import StateError
from dagster_unified.operators.state.columns import TypedColumn
from dagster_unified.operators.state.pages import Content
from dagster_unified.operators.state.table import ENCODED, EVENT_TIMERS, KeyShape, StateTable
from dagster_unified.state import EverythingRead, Savepoint, Unread, manifest
from dagster_unified.state.manifest import from_spark, to_spark
from tests.depth import SEED


class Count(KeyedProcessFunction):
    def open(self, runtime_context: RuntimeContext) -> None:
        self.count = runtime_context.get_state(ValueStateDescriptor("count", int))

    def process_element(self, value, ctx):
        self.count.update((self.count.value() or 0) + 1)
        yield ctx.get_current_key(), self.count.value()


def shops():
    pipeline = Pipeline("shops")
    sales = pipeline.from_collection([("north", 1)], name="sales")
    sales.key_by("f0").process(Count(), output_type=tuple[str, int]).uid("counts").print("out")
    return pipeline


COUNTS = pa.table({"f0": ["north", "south"], "count": [3, 4]})
TIMERS = pa.table({"f0": ["south", "east", "south"], "timestamp": [30, 10, 20], "domain": ["event"] * 3})


def table_of(record, states, content):
    """A table as a run writes it."""
    table = StateTable("p: operator 'o'", KeyShape(("key",), str), record, states, {})
    return pa.Table.from_batches([table.rows(content)])


@pytest.fixture
def written(tmp_path):
    made = Savepoint.new(shops()).with_state("counts", COUNTS, key="f0", timers=TIMERS)
    return made.with_watermark("counts", 7).write(f"{tmp_path}/one")


def test_a_savepoint_says_what_is_in_it(written):
    assert (written.pipeline, written.mode, written.watermarks) == ("shops", "", {"counts": 7})
    (counts,) = written.operators
    assert (counts.uid, counts.name, counts.rows, counts.key) == ("counts", "Count", 3, ("f0",))
    assert [(column.state, column.type) for column in counts.states] == [("count", "int64")]
    assert counts.bytes > 0
    assert {uid: position.describe() for uid, position in written.positions.items()} == {"sales": "nothing"}
    assert abs((datetime.now(timezone.utc) - written.taken).total_seconds()) < 600


def test_rows_are_keys_with_their_states_and_timers(written):
    timer = {"generation": 0}
    assert list(written.rows("counts")) == [
        {"f0": "north", "count": 3},
        {"f0": "south", "count": 4, EVENT_TIMERS: [timer | {"timestamp": 30}, timer | {"timestamp": 20}]},
        {"f0": "east", EVENT_TIMERS: [timer | {"timestamp": 10}]},
    ]
    assert written.keyed_state("counts").select(["f0", "count"]).to_pylist()[:2] == COUNTS.to_pylist()


def test_timers_have_a_row_each(written):
    assert written.timers("counts").to_pylist() == [
        {"f0": "south", "domain": "event", "timestamp": 30, "generation": 0},
        {"f0": "south", "domain": "event", "timestamp": 20, "generation": 0},
        {"f0": "east", "domain": "event", "timestamp": 10, "generation": 0},
    ]
    assert written.held_back("counts").num_rows == 0


def test_timers_may_be_given_as_times_and_of_the_processing_clock(tmp_path):
    moment = datetime(2026, 1, 1, 0, 0, 0, 5000, tzinfo=timezone.utc)
    timers = pa.table({"f0": ["north"], "timestamp": [moment], "domain": ["processing"]})
    made = Savepoint.new(shops()).with_state("counts", COUNTS, timers=timers).write(f"{tmp_path}/one")
    (timer,) = made.timers("counts").to_pylist()
    assert (timer["domain"], timer["timestamp"]) == ("processing", 1767225600005)


def test_a_time_with_a_part_of_a_millisecond_is_rounded_down_as_in_a_dataframe():
    moments = [datetime(1969, 12, 31, 23, 59, 59, 999_999, timezone.utc), datetime(1987, 3, 1, 0, 0, 0, 4_000)]
    timers = pa.table({"f0": ["a", "b"], "timestamp": pa.array(moments, pa.timestamp("us"))})
    made = Savepoint.new(shops()).with_state("counts", COUNTS, timers=timers)
    assert {timer["timestamp"] for timer in made.timers("counts").to_pylist()} == {-1, 541_555_200_004}


def test_the_state_of_an_operator_is_replaced_dropped_and_renamed(written, tmp_path):
    table = written.keyed_state("counts")
    more = table.set_column(table.schema.get_field_index("count"), "count", pa.array([5, None, None], pa.int64()))
    two = written.with_state("counts", more).write(f"{tmp_path}/two")
    assert [row.get("count") for row in two.rows("counts")] == [5, None, None]
    assert two.timers("counts") == written.timers("counts")
    three = two.renamed("counts", "totals").with_position("sales", EverythingRead(4)).write(f"{tmp_path}/three")
    assert three.keyed_state("totals") == two.keyed_state("counts")
    assert (three.watermarks, three.positions) == ({"totals": 7}, {"sales": EverythingRead(4)})
    assert three.without("totals").write(f"{tmp_path}/four").operators == ()
    assert [row.get("count") for row in written.rows("counts")] == [3, 4, None]


def test_what_arrow_has_no_type_for_is_decoded_where_rows_are_asked_for(tmp_path):
    states = {"any": ValueStateDescriptor("any", int | str), "n": ValueStateDescriptor("n", int)}
    content = Content({"a": {"any": "x", "n": 2**63}, "b": {"any": 1, "n": 1}})
    made = Savepoint.new("p").with_state("u", table_of(int, states, content)).write(f"{tmp_path}/one")
    assert list(made.rows("u")) == [{"key": "a", "any": "x", "n": 2**63}, {"key": "b", "n": 1, "any": 1}]
    assert made.keyed_state("u")["n"].to_pylist() == [None, 1]


@pytest.mark.parametrize(
    ("record", "first", "second"),
    [(int, {"record": 1}, {"record": 2}), (int | str, {"encoded": b"\x01"}, {"encoded": b"\xa1x"})],
    ids=["typed", "msgpack"],
)
def test_elements_that_are_held_back_have_a_row_each(tmp_path, record, first, second):
    held = [(5, "a", 1), (6, "b", "x" if "encoded" in second else 2)]
    made = Savepoint.new("p").with_state("u", table_of(record, {}, Content(held_back=held))).write(f"{tmp_path}/one")
    found = sorted(made.held_back("u").to_pylist(), key=lambda row: row["key"])
    assert found == [{"key": "a", "timestamp": 5} | first, {"key": "b", "timestamp": 6} | second]
    rows = sorted(made.rows("u"), key=lambda row: row["key"])
    assert [row["__held_back"] for row in rows] == [[{"timestamp": t, "record": r}] for t, _, r in held]


def test_broadcast_state_goes_into_a_savepoint_and_out_of_it(tmp_path):
    broadcast = {"rules": MapStateDescriptor("rules", str, int)}
    table = StateTable("p: operator 'o'", KeyShape(("key",), str), int, {}, broadcast)
    row = pa.Table.from_batches([table.broadcast_row({"rules": {"a": 1}})])
    made = Savepoint.new("p").with_state("u", row).write(f"{tmp_path}/one")
    assert [(column.role, column.state) for column in made.operator("u").states] == [("broadcast", "rules")]
    assert list(made.rows("u")) == [{"rules": {"a": 1}}]


def test_a_savepoint_is_not_written_over_another(written, tmp_path):
    with pytest.raises(StateError, match=r"there is a savepoint in .*one already; give another path, or remove it"):
        written.write(f"{tmp_path}/one")


def test_a_damaged_file_is_an_error_that_names_it(written, tmp_path):
    (file,) = (tmp_path / "one").rglob("*.parquet")
    data = bytearray(file.read_bytes())
    place = data.index(b"north")
    data[place] ^= 1
    file.write_bytes(data)
    with pytest.raises(StateError, match=rf"^{file} is damaged: .*; copy the savepoint again, or take it again$"):
        Savepoint.read(written.path).keyed_state("counts")


def flipped(data):
    """The bytes of a file with one bit that is another, at each place."""
    chance = random.Random(SEED)
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << chance.randrange(8)
        yield damaged


def test_wherever_a_file_is_damaged_the_error_names_it_or_nothing_is_changed(written, tmp_path):
    (file,) = (tmp_path / "one").rglob("*.parquet")
    held, manifest = list(written.rows("counts")), tmp_path / "one/manifest.json"
    whole_manifest = Savepoint.read(written.path).manifest
    for damaged, whole in ((file, file.read_bytes()), (manifest, manifest.read_bytes())):
        said: list[str] = []
        for data in flipped(whole):
            damaged.write_bytes(data)
            try:
                found = Savepoint.read(written.path)
                read = list(found.rows("counts")), found.manifest
            except StateError as error:
                said.append(str(error))
            else:
                assert read == (held, whole_manifest)
        assert len(said) > 200
        assert all(str(damaged) in one for one in said)
        damaged.write_bytes(whole)


def test_a_missing_file_is_an_error_that_names_it(written, tmp_path):
    (file,) = (tmp_path / "one").rglob("*.parquet")
    file.unlink()
    with pytest.raises(StateError, match=rf"^{file} is missing, which the savepoint's manifest names"):
        written.keyed_state("counts")
    with pytest.raises(StateError, match=rf"^{file} is missing, which the savepoint's manifest names"):
        Savepoint.read(written.path)


def test_a_copy_of_a_checkpoint_without_tables_is_an_error_that_says_so(tmp_path):
    (tmp_path / "savepoint.json").write_text("{}")
    with pytest.raises(StateError, match=r"is a copy of a checkpoint, without tables: .*; only `dagster-unified"):
        Savepoint.read(str(tmp_path))


def with_timers(**columns):
    return {"table": COUNTS, "timers": pa.table({"f0": ["a"], **columns})}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"table": COUNTS, "key": "shop"},
            " is keyed by f0, and the table by shop; name the columns as the operator does",
        ),
        (
            {"table": COUNTS.rename_columns(["shop", "count"])},
            ": there is no column 'f0' for its key; there are shop, count",
        ),
        (
            {"table": pa.table({"f0": [1], "count": [1]})},
            ": key 'f0' is declared str, and the savepoint has int64; fields may be added with a default, dropped,"
            " widened or made optional; otherwise keep the type as it was",
        ),
        ({"table": pa.table({"f0": ["a", "b", "a"]})}, ": several rows have the key 'a'; give each key one row"),
        ({"table": pa.table({"f0": ["a", None]})}, ": a row has no key; fill in f0, or leave the row out"),
        (
            {"table": pa.table({"f0": ["a"], "count": pa.array([2**63], pa.uint64())})},
            ": a value does not fit the state's column: Integer value 9223372036854775808 not in range: 0 to"
            " 9223372036854775807",
        ),
        (
            {"table": COUNTS.append_column("count", COUNTS["count"])},
            ": several columns have the name 'count'; give each another",
        ),
        ({"table": [1]}, ": expected an Arrow table or a DataFrame, and was given list"),
        (
            {"table": COUNTS.append_column("__encoded", pa.array(["x"] * len(COUNTS)))},
            ": column '__encoded' is of type string, and its name is one of the library's own; give it another",
        ),
        (
            with_timers(),
            ": its timers have no column 'timestamp'; give f0 and timestamp, and where it is not event time a domain,"
            " 'event' or 'processing'",
        ),
        (
            with_timers(timestamp=["noon"]),
            ": the timestamp of a timer is of type string; give a timestamp, or whole milliseconds since the epoch",
        ),
        (
            with_timers(timestamp=pa.array([None], pa.int64())),
            ": the timestamp of a timer is None; give a timestamp, or whole milliseconds since the epoch",
        ),
        (
            with_timers(timestamp=pa.array([2**63], pa.uint64())),
            ": the timestamp of a timer is no int of 64 bits: Integer value 9223372036854775808 not in range: 0 to"
            " 9223372036854775807",
        ),
        (
            with_timers(f0=pa.array([None], pa.string()), timestamp=[1]),
            ": a timer has no key; fill in f0, or leave the timer out",
        ),
        *(
            (
                with_timers(timestamp=[1], generation=generation),
                ": the generation of a timer is a whole number of at least 0; leave the column out, or give it one",
            )
            for generation in (["x"], [-1], pa.array([None], pa.int64()))
        ),
    ],
)
def test_what_is_no_state_of_an_operator_is_an_error_when_it_is_given(given, message):
    with pytest.raises(StateError) as raised:
        Savepoint.new(shops()).with_state("counts", **given)
    assert str(raised.value) == f"shops: operator 'counts'{message}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda new: new.with_state("count", COUNTS),
            "no operator with state has the uid 'count': there are counts; did you mean 'counts'?",
        ),
        (
            lambda new: new.with_position("sale", Unread()),
            "no source has the uid 'sale': there are sales; did you mean 'sales'?",
        ),
        (
            lambda new: new.with_position("sales", 5),
            "the position of source 'sales' is one of Unread, EverythingRead, PartitionsRead, FilesRead,"
            " OffsetsRead, SparkOffset (dagster_unified.state), and not 5",
        ),
        (lambda new: new.without("counts"), "the savepoint has no state of 'counts': there is state of none"),
    ],
)
def test_what_the_pipeline_does_not_have_is_an_error_when_it_is_given(change, message):
    with pytest.raises(StateError) as raised:
        change(Savepoint.new(shops()))
    assert str(raised.value) == f"shops: {message}"


def test_keys_are_those_that_records_have():
    state = pa.table({"k": [-0.0, 1.0], "v": [1, 2]})
    table = Savepoint.new("p").with_state("o", state, "k").keyed_state("o")
    assert [math.copysign(1, key) for key in table["k"].to_pylist()] == [1, 1]
    with pytest.raises(StateError, match="the key 'k' of a row is nan, which equals nothing; leave the row out"):
        Savepoint.new("p").with_state("o", pa.table({"k": [math.nan], "v": [1]}), "k")


class Place(NamedTuple):
    city: str


class Street(NamedTuple):
    city: str
    number: int


@pytest.mark.parametrize(
    ("stored", "declared", "message"),
    [
        (int, float, "is keyed by 'key' of type float, and the savepoint by int64; key it as it was"),
        (Street, Place, "is keyed by 'key' of type Place, and the savepoint by struct<city: string"),
    ],
)
def test_a_key_is_not_migrated_since_equal_ones_would_not_be_found(stored, declared, message):
    before, after = (StateTable("p: operator 'o'", KeyShape(("key",), key), str, {}, {}) for key in (stored, declared))
    with pytest.raises(StateError, match=message):
        after.check(before.schema)


class Old(NamedTuple):
    bought: int
    sold: int
    at: datetime


class New(NamedTuple):
    sold: int
    bought: int
    at: datetime


def test_values_that_arrow_cannot_hold_do_not_change_their_fields_without_a_word():
    old, new = TypedColumn("state 'v'", Old), TypedColumn("state 'v'", New)
    aware, naive = (Old(1, 2, datetime(2026, 1, 1, tzinfo=zone)) for zone in (timezone.utc, None))
    assert new.decode(*old.encode([aware])) == [New(2, 1, aware.at)]
    with pytest.raises(StateError, match=r"state 'v': it is declared New, .* with 1 values that Arrow cannot hold"):
        new.decode(*old.encode([aware, naive]))


def test_a_number_that_is_no_float_is_not_widened():
    stored, declared = TypedColumn("state 'v'", dict[int, int]), TypedColumn("state 'v'", dict[float, float])
    assert declared.decode(*stored.encode([{1: 2}])) == [{1.0: 2.0}]
    with pytest.raises(StateError, match="state 'v': 9007199254740993 is not a float, and the nearest is another"):
        declared.decode(*stored.encode([{2**53: 1, 2**53 + 1: 2}]))


class Color(Enum):
    RED = "red"


class Size(IntEnum):
    SMALL = 1


def test_what_is_no_member_of_an_enum_names_the_state():
    texts = TypedColumn("state 'v'", str)
    with pytest.raises(StateError, match="state 'v': 'blue' is not a value of Color"):
        TypedColumn("state 'v'", Color).decode(*texts.encode(["blue"]))
    with pytest.raises(StateError, match="state 'v' is declared Size, and the savepoint has string"):
        TypedColumn("state 'v'", Size).check(pa.string())


def test_a_savepoint_is_written_to_a_url_of_a_local_file(tmp_path):
    made = Savepoint.new("p").with_state("o", pa.table({"k": ["a"], "v": [1]}), "k").write(f"file://{tmp_path}/one")
    assert made.keyed_state("o").to_pylist() == Savepoint.read(f"{tmp_path}/one").keyed_state("o").to_pylist()


def test_of_two_writers_to_one_path_the_second_is_told(tmp_path, monkeypatch):
    made = Savepoint.new("p").with_state("o", pa.table({"k": ["a"], "v": [1]}), "k")
    commit = manifest.commit

    def behind_another(folder, found):
        monkeypatch.setattr(manifest, "commit", commit)
        made.write(f"{tmp_path}/one")
        commit(folder, found)

    monkeypatch.setattr(manifest, "commit", behind_another)
    with pytest.raises(StateError, match=r"there is a savepoint in .*/one already"):
        Savepoint.new("p").with_state("o", pa.table({"k": ["a"], "v": [2]}), "k").write(f"{tmp_path}/one")
    assert Savepoint.read(f"{tmp_path}/one").keyed_state("o")["v"].to_pylist() == [1]


def test_a_later_format_says_which_version_reads_it(tmp_path):
    (tmp_path / "manifest.json").write_text('{"format": 2, "library": "9.9"}')
    with pytest.raises(StateError, match=r"in format 2, and this version reads 1; use the version that wrote it, 9\.9"):
        Savepoint.read(str(tmp_path))


def test_without_the_pipeline_the_key_has_to_be_said():
    with pytest.raises(StateError, match="operator 'counts': say which columns are its key, with key=, or give"):
        Savepoint.new("shops").with_state("counts", COUNTS)


def test_any_table_is_written_in_the_types_of_the_library(tmp_path):
    import pandas

    frame = pandas.DataFrame({"f0": pandas.Categorical(["north"]), "count": pandas.array([3], "int32")})
    made = Savepoint.new(shops()).with_state("counts", frame).write(f"{tmp_path}/one")
    schema = made.keyed_state("counts").schema
    assert {field.name: str(field.type) for field in schema} == {"f0": "string", "count": "int64"}
    assert ENCODED not in schema.names


def test_schemas_are_those_that_spark_writes():
    from dagster_unified.connectors.protocol.frame import spark_schema

    columns = {
        "text": pa.string(),
        "number": pa.int64(),
        "float": pa.float64(),
        "yes": pa.bool_(),
        "bytes": pa.binary(),
        "day": pa.date32(),
        "money": pa.decimal128(38, 18),
        "span": pa.duration("us"),
        "at": pa.timestamp("us", "UTC"),
        "wall": pa.timestamp("us"),
        "list": pa.list_(pa.field("element", pa.struct([("x", pa.int64())]))),
        "map": pa.map_(pa.struct([("start", pa.int64())]), pa.list_(pa.field("element", pa.string()))),
    }
    schema = pa.schema(columns.items())
    assert spark_schema(schema).fromJson(json.loads(to_spark(schema))) == spark_schema(schema)
    assert from_spark(spark_schema(schema).json()) == schema
