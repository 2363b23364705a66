"""What is wrong with a program is said while it is built: where, what, and what to do."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import pytest

from dagster_unified.api import (
    AsyncRetryStrategy,
    ContinuousEventTimeTrigger,
    KeyedProcessFunction,
    KeySelector,
    MapFunction,
    OutputTag,
    Partitioner,
    Pipeline,
    ProcessFunction,
    StateTtlConfig,
    TimeEvictor,
    TumblingEventTimeWindows,
    WatermarkGenerator,
    WatermarkOutput,
    WatermarkStrategy,
)
from dagster_unified.api import functions as F
from dagster_unified.connectors import DatabaseSink, DeltaSink, FileSink, KafkaSink, PrintSink
from dagster_unified.errors import PipelineError, RecordTypeError, UnsupportedError
from dagster_unified.graph.nodes import SinkNode


class Row(NamedTuple):
    shop: str
    amount: int
    note: str | None


@dataclass
class Changing:
    shop: str


class Complete(WatermarkGenerator[Row]):
    def on_event(self, event: Row, event_timestamp: int, output: WatermarkOutput) -> None:
        output.emit_watermark(event_timestamp)


class Other(NamedTuple):
    shop: str


class Total(NamedTuple):
    shop: str
    amount: int


def rows(name="p"):
    return Pipeline(name).from_collection([Row("a", 1, None)])


class Opened(KeySelector[Row, str]):
    def open(self, runtime_context):
        self.length = 1

    def get_key(self, value: Row) -> str:
        return value.shop[: self.length]


class Closed(Partitioner[str]):
    def close(self):
        pass

    def partition(self, key: str, num_partitions: int) -> int:
        return 0


def may_be_none():
    return Pipeline("p").from_collection([1, None], int | None).key_by(lambda n: 0, key_type=int)


def unannotated(row):
    return row


def to_int(row) -> int:
    return 1


def to_text_key(row) -> str | None:
    return row.note or None


class Double(MapFunction):
    def map(self, value) -> int:
        return value


class Keyed(KeyedProcessFunction):
    def process_element(self, value, ctx) -> Iterable[int]:
        return []


class Plain(ProcessFunction):
    def process_element(self, value, ctx):
        return []


def two_pipelines():
    rows("p").union(rows("q"))


ERRORS = {
    "a type in quotes": (
        lambda: rows().map(unannotated, output_type="int").print()._pipeline.graph(),
        "p: operator 'unannotated': the type is the text 'int'; give the type itself, without quotes",
    ),
    "a key's type in quotes": (
        lambda: rows().key_by("shop", key_type="str"),
        "p: operator 'key_by': the type is the text 'str'; give the type itself, without quotes",
    ),
    "a computed key's type in quotes": (
        lambda: rows().key_by(lambda row: row.shop.upper(), key_type="str"),
        r"p: key_by\(function\): the type is the text 'str'; give the type itself, without quotes",
    ),
    "no output type": (
        lambda: rows().map(unannotated),
        "p: operator 'unannotated' has no output type; annotate what the function returns, or give output_type=",
    ),
    "lambda without output type": (lambda: rows().map(lambda r: r), "operator 'map' has no output type"),
    "flat_map of something not iterable": (lambda: rows().flat_map(to_int), "operator 'to_int'.*(Iterable|iterable)"),
    "contradictory output_type": (
        lambda: rows().map(to_int, output_type=str),
        "'to_int': output_type is str, but the function is annotated to give int; make them the same",
    ),
    "None as output": (lambda: rows().map(unannotated, output_type=type(None)), "None is not a record type"),
    "not a function, map": (lambda: rows().map(3, int), "expected a function.*, got 3"),
    "not a function, filter": (lambda: rows().filter("amount > 1"), "no function of a record"),
    "not a function, reduce": (lambda: rows().key_by("shop").reduce(3), "expected a function"),
    "not a function, map_batches": (lambda: rows().map_batches(3, Row), "expected a function"),
    "a class instead of an instance": (lambda: rows().map(Double), r"Double.*(instance|Double\(\))"),
    "unknown key field": (
        lambda: rows().key_by("shopp"),
        r"operator 'key_by': no field 'shopp' in Row\(.*\); did you mean 'shop'\?",
    ),
    "unknown key position": (lambda: rows().key_by(7), "no field '7'"),
    "no key": (lambda: rows().key_by(), "give a field's name or a function"),
    "field and function as key": (lambda: rows().key_by("shop", to_int), "either field names or one function"),
    "key type unknown": (
        lambda: rows().key_by(unannotated),
        "the key's type is not known; annotate the key function, or give key_type=",
    ),
    "key that may be None": (
        lambda: rows().key_by(to_text_key),
        r"key_by\(to_text_key\): a key of type str \| None may be None",
    ),
    "None as key type": (lambda: rows().key_by(unannotated, key_type=type(None)), "may be None"),
    "list as key": (lambda: rows().key_by(unannotated, key_type=list[int]), r"a list\[int\] cannot be a key"),
    "class that changes as key": (
        lambda: rows().key_by(unannotated, key_type=Changing),
        r"a Changing cannot be a key, since Changing can change",
    ),
    "reduce of what may be None": (
        lambda: may_be_none().reduce(lambda a, b: a),
        r"a record may be None \(int \| None\), which stands for no record",
    ),
    "sum of what may be None": (lambda: may_be_none().sum(), "operator 'sum': a record may be None"),
    "windowed reduce of what may be None": (
        lambda: may_be_none().count_window(2).reduce(lambda a, b: a),
        "operator 'reduce': a record may be None",
    ),
    "key selector that is opened": (
        lambda: rows().key_by(Opened()),
        r"operator 'key_by': Opened overrides open\(\), which is not called",
    ),
    "partitioner that is closed": (
        lambda: rows().partition_custom(Closed(), "shop"),
        r"operator 'partition_custom': Closed overrides close\(\)",
    ),
    "list in a key": (
        lambda: rows().key_by(unannotated, key_type=tuple[str, list[int]]),
        r"cannot be a key, since list\[int\]",
    ),
    "contradictory key_type": (lambda: rows().key_by(lambda r: r.amount, key_type=str), "key_type is str"),
    "sum of text": (
        lambda: rows().key_by("shop").sum("shop"),
        "operator 'sum': field 'shop' is a string, which has no sum",
    ),
    "max of what may be None": (
        lambda: rows().key_by("shop").max("note"),
        "field 'note' may be None, which max cannot combine",
    ),
    "unknown sum field": (lambda: rows().key_by("shop").sum("amuont"), "no field 'amuont'.*did you mean 'amount'"),
    "agg by function": (
        lambda: rows().key_by(lambda r: r.shop.upper(), key_type=str).agg(F.sum("amount"), output_type=Total),
        r"keyed by fields; use key_by\('field'\)",
    ),
    "agg over an unknown column": (
        lambda: rows().key_by("shop").agg(F.sum(F.col("amuont")).alias("x"), output_type=Total),
        "no column 'amuont'.*did you mean 'amount'",
    ),
    "agg without a column for the key": (
        lambda: rows().key_by("shop").agg(F.sum("amount").alias("amount"), output_type=int),
        "operator 'agg'.*shop",
    ),
    "more columns than fields": (
        lambda: rows().select("shop", "amount", output_type=Other),
        "operator 'select'.*2 columns",
    ),
    "a column that is not in the output": (
        lambda: rows().with_columns({"tax": F.col("amount") / 5}, output_type=Row),
        "operator 'with_columns'.*'tax'",
    ),
    "unknown column in where": (
        lambda: rows().where(F.col("amuont") > 1),
        "operator 'where': no column 'amuont'.*did you mean 'amount'",
    ),
    "unknown column in select": (lambda: rows().select("amuont"), "did you mean 'amount'"),
    "select of an expression": (
        lambda: rows().select("amount + 1"),
        "output_type is needed, since the type of 'amount . 1' is known to Spark only",
    ),
    "select of nothing": (lambda: rows().select(), "at least one column"),
    "unknown Spark function": (lambda: F.summ("amount"), "no function 'summ'; did you mean 'sum'"),
    "a keyed function on a stream": (
        lambda: rows().process(Keyed()),
        "operator 'Keyed': process needs a ProcessFunction; .* call key_by before it",
    ),
    "a function as process, keyed": (
        lambda: rows().key_by("shop").process(to_int),
        "a keyed stream needs a KeyedProcessFunction, not to_int",
    ),
    "process without output type": (lambda: rows().process(Plain()), "operator 'Plain' has no output type"),
    "side output of a map": (
        lambda: rows().map(to_int).get_side_output(OutputTag("t", int)),
        "'to_int' is a Map and has no side outputs; use process",
    ),
    "side output without type": (
        lambda: rows().process(Plain(), int).get_side_output(OutputTag("t", object)),
        "Plain, side output t.*says nothing about the columns",
    ),
    "union of two types": (
        lambda: (s := rows()).union(s.map(to_int)),
        "streams of different types cannot be united: Row.* and int.*map one to the other's type",
    ),
    "union of two pipelines": (two_pipelines, "the streams belong to different pipelines, 'p' and 'q'"),
    "parallelism 0": (
        lambda: rows().map(to_int).set_parallelism(0),
        "'to_int': parallelism must be a whole number of at least 1, not 0",
    ),
    "parallelism 2.5": (
        lambda: rows().map(to_int).set_parallelism(2.5),
        "parallelism must be a whole number of at least 1, not 2.5",
    ),
    "parallelism 0 of a sink": (
        lambda: rows().print().set_parallelism(0),
        "parallelism must be a whole number of at least 1, not 0",
    ),
    "name of a union": (
        lambda: (s := rows()).union(s).name("x"),
        (
            "a name belongs to an operator or a sink, and this stream is a union; call it on the operator before, or"
            " the one after"
        ),
    ),
    "name of a side output": (
        lambda: rows().process(Plain(), int).get_side_output(OutputTag("t", int)).name("x"),
        (
            r"p: a name belongs to an operator or a sink, and this stream is the side output 't' of 'Plain'; give it to"
            r" what reads the side output: .sink_to\(sink\).name"
        ),
    ),
    "uid of a keyed stream": (
        lambda: rows().key_by("shop").uid("x"),
        "a uid belongs to an operator or a sink, and this stream is keyed, behind 'collection'",
    ),
    "chaining of an exchange": (
        lambda: rows().rebalance().start_new_chain(),
        "chaining belongs to an operator or a sink, and this stream is an exchange behind",
    ),
    "side output by name": (
        lambda: rows().process(Plain(), int).get_side_output("t"),
        r"expected an OutputTag such as OutputTag\('late', Flight\), got 't'",
    ),
    "one tag with two types": (
        lambda: [
            (s := rows().process(Plain(), int)).get_side_output(OutputTag("t", int)),
            s.get_side_output(OutputTag("t", str)),
        ],
        (
            r"operator 'Plain': the side output 't' is declared as int\(value: int64\) and as str\(value: string\);"
            r" give one of them another name"
        ),
    ),
    "complex": (lambda: rows().map(unannotated, output_type=complex), "operator 'unannotated'.*complex"),
    "no timestamp assigner": (
        lambda: rows().assign_timestamps_and_watermarks(WatermarkStrategy.for_monotonous_timestamps()),
        "has no timestamp assigner; add with_timestamp_assigner",
    ),
    "unknown timestamp field": (
        lambda: rows().assign_timestamps_and_watermarks(
            WatermarkStrategy.no_watermarks().with_timestamp_assigner("amuont")
        ),
        "operator 'timestamps': no field 'amuont'.*did you mean 'amount'",
    ),
    "text as timestamp": (
        lambda: rows().assign_timestamps_and_watermarks(
            WatermarkStrategy.no_watermarks().with_timestamp_assigner("shop")
        ),
        "'shop' is a string; a timestamp is",
    ),
    "negative out-of-orderness": (
        lambda: WatermarkStrategy.for_bounded_out_of_orderness(timedelta(-1)),
        "must be a timedelta that is not negative",
    ),
    "a watermark generator that each task would share": (
        lambda: WatermarkStrategy.for_generator(Complete()),
        r"for_generator needs what creates a watermark generator.*: the class, or a function such as `lambda: Comp",
    ),
    "empty collection": (
        lambda: Pipeline("p").from_collection([]),
        "an empty collection has no type; give type_info=",
    ),
    "list in a collection": (
        lambda: Pipeline("p").from_collection([[1]]),
        "a list, which says nothing about its columns; make it a tuple, .* or give type_info=",
    ),
    "pipeline name": (
        lambda: Pipeline("my pipeline"),
        "'my pipeline' is not a pipeline name; use letters, digits and _",
    ),
    "no sink": (
        lambda: Pipeline("p").graph(),
        r"p: nothing is written anywhere; end a stream with sink_to\(...\) or print\(\)",
    ),
}


def complete(stream):
    """Mistakes in output types are reported together, when the graph is complete."""
    stream._pipeline.graph()


@pytest.mark.parametrize("mistake", ERRORS)
def test_a_mistake_is_an_error_that_says_where_and_what_to_do(mistake):
    build, words = ERRORS[mistake]
    with pytest.raises(PipelineError, match=words):
        complete(build())


def test_all_mistakes_in_output_types_are_reported_at_once():
    pipeline = Pipeline("p")
    numbers = pipeline.from_collection([1])
    broken = (
        numbers.map(unannotated)
        .name("first")
        .filter(lambda r: r.odd)
        .key_by("odd")
        .process(Keyed())
        .map(to_int, output_type=str)
    )
    broken.union(numbers.map(lambda n: n, complex)).key_by("x").window(None).aggregate(None).print().name("x")
    numbers.union(broken).connect(broken).apply(None)
    numbers.map(to_int).print("fine")
    with pytest.raises(RecordTypeError) as raised:
        pipeline.graph()
    assert [
        line.split(" (")[0] for line in re.sub(r"\(.*test_build_errors\.py:\d+\)", "", str(raised.value)).splitlines()
    ] == [
        "p: 3 operators have no usable output type:",
        "  1. operator 'unannotated' has no output type; annotate what the function returns, or give output_type= ",
        "  2. operator 'to_int': output_type is str, but the function is annotated to give int; make them the same ",
        (
            "  3. operator 'map': complex says nothing about the columns; use a NamedTuple or another annotated class,"
            " or a plain type such as int or tuple[str, int] "
        ),
    ]
    assert str(raised.value).count("test_build_errors.py:") == 3


def test_two_equal_uids_name_both_operators_and_their_lines():
    pipeline = Pipeline("p")
    stream = pipeline.from_collection([1])
    stream.map(to_int).name("first").uid("same").print()
    stream.map(to_int).name("second").uid("same").print()
    with pytest.raises(
        PipelineError,
        match=(
            r"'first' \(.*test_build_errors\.py:\d+\) and 'second' \(.*test_build_errors\.py:\d+\) both have the uid"
            r" 'same'"
        ),
    ):
        pipeline.graph()


def test_uids_that_are_not_given_are_unique_and_follow_the_names():
    pipeline = Pipeline("p")
    pipeline.from_collection([1], name="in").map(to_int).map(to_int).print("out")
    assert [n.uid for n in pipeline.graph().nodes] == ["in", "to_int", "to_int-2", "sink-out"]


def test_what_operators_are_called_changes_no_uid_of_a_sink():
    pipeline = Pipeline("p")
    stream = pipeline.from_collection([1], name="in")
    for name in ("out", "sink-out", "sink out-2"):
        stream.map(to_int).name(name).print("out")
    nodes = [node for node in pipeline.graph().nodes if isinstance(node, SinkNode)]
    assert [(n.name, n.uid) for n in nodes] == [("out", "sink-out"), ("out-2", "sink-out-2"), ("out-3", "sink-out-3")]


def test_operators_of_a_plain_stream_may_follow_key_by():
    pipeline = Pipeline("p")
    pipeline.from_collection([1]).key_by(to_int).map(to_int).filter(lambda v: True).print()
    assert [e.kind.value for e in pipeline.plan().exchanges] == ["HASH"]


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (DeltaSink("/data/a", name="one"), DeltaSink("/data/a/", name="two"), "one place, /data/a,"),
        (
            DeltaSink("/data/a", name="one", mode="upsert", key="shop"),
            FileSink("file:///data/b/../a", name="two"),
            "one place, /data/a,",
        ),
        (DeltaSink("/data/a", name="one", mode="append"), DeltaSink("/data/a", name="two"), "one place, /data/a,"),
        (
            KafkaSink("counts", "host:9092", name="one", key="shop", mode="upsert"),
            KafkaSink("counts", "host:9092", name="two"),
            "one place, kafka://host:9092/counts,",
        ),
        (
            FileSink("/data/a", name="one"),
            DeltaSink("/data/a/b", name="two"),
            "/data/a/b, inside the folder of sink 'one' of p",
        ),
        (DeltaSink("out", name="one"), FileSink(f"{os.getcwd()}/out", name="two"), f"one place, {os.getcwd()}/out"),
        *(
            (
                DatabaseSink("t", "sqlite:////d/q.db", "overwrite", name="one"),
                other,
                "one place, sqlite:////d/q.db/main.t,",
            )
            for other in (
                DatabaseSink("T", "sqlite+pysqlite:////d/./q.db", name="two"),
                DatabaseSink("t", f"sqlite:///{os.path.relpath('/d/q.db')}", name="two", schema="main"),
            )
        ),
        (DeltaSink("s3://bucket/a", name="one"), DeltaSink("s3a://bucket/a/", name="two"), "one place, s3://bucket/a,"),
    ],
)
def test_two_sinks_that_would_take_away_each_others_rows_are_an_error_that_names_both(first, second, said):
    stream = rows()
    stream.sink_to(first)
    stream.sink_to(second)
    with pytest.raises(PipelineError) as raised:
        stream._pipeline.plan()
    assert said in str(raised.value)
    assert "sink 'one' of p (tests/api/test_build_errors.py:" in str(raised.value)
    assert "sink 'two' of p" in str(raised.value)
    assert "a path of its own" in str(raised.value) or "outside the other's" in str(raised.value)


@pytest.mark.parametrize("path", ["s3://lake/sales", "s3a://lake/sales", "gs://lake/sales", "abfss://lake/sales"])
def test_a_directory_of_files_is_refused_where_nothing_can_be_renamed(path):
    with pytest.raises(PipelineError, match=f"sink 'sales': {path} is in an object store.* use DeltaSink"):
        FileSink(path)


def test_sinks_that_append_may_share_a_place_and_neighbours_are_no_conflict():
    stream = rows()
    for sink in (
        DeltaSink("/data/a", mode="append"),
        DeltaSink("/data/a", mode="append"),
        DeltaSink("/data/ab"),
        FileSink("/data/b"),
    ):
        stream.sink_to(sink)
    assert [n.name for n in stream._pipeline.plan().graph.nodes if isinstance(n, SinkNode)] == ["a", "a-2", "ab", "b"]


@pytest.mark.parametrize(
    "build",
    [
        lambda r: r.where("amout > 0"),
        lambda r: r.where(F.col("amout") > 0),
        lambda r: r.where(F.expr("amout > 0 AND shop <> 'amount'")),
        lambda r: r.select("shop", "amout * 2 AS amount", output_type=Total),
        lambda r: r.with_columns({"amount": "CASE WHEN amout > 3 THEN 1 ELSE 0 END"}, output_type=Row),
        lambda r: r.key_by("shop").agg("sum(amout) AS amount", output_type=Total),
        lambda r: r.key_by("shop").agg(F.sum("amout").alias("amount"), output_type=Total),
        lambda r: r.key_by("shop").agg(F.coalesce(F.sum("amount"), F.max("amout")).alias("amount"), output_type=Total),
    ],
)
def test_an_expression_that_reads_a_column_which_is_not_there_is_an_error_with_the_nearest_name(build):
    with pytest.raises(
        PipelineError, match=r"p: operator '\w+': no column 'amout'.* in Row\(.*; did you mean 'amount'\?"
    ):
        build(rows())


@pytest.mark.parametrize(
    "condition",
    [
        "Amount > 0 AND `shop` IS NOT NULL",
        "shop IN ('amout') AND current_date > DATE '2024-01-01'",
        "exists(array(amount), x -> x > amount)",
        "amount IN (SELECT other FROM elsewhere)",
        "row_number() OVER (PARTITION BY shop ORDER BY amount) = 1",
        "date_add(DAY, amount, current_timestamp) > current_timestamp()",
        "amount ~~ nothing that a parser knows",
    ],
)
def test_an_expression_that_reads_only_what_is_there_is_none(condition):
    rows().where(condition)


def test_a_column_may_be_read_that_an_expression_before_it_names():
    rows().select("shop", "amount * 2 AS twice", "twice + 1 AS amount", output_type=tuple[str, int, int])
    rows().select("shop", F.format_string("%s amout", "shop"), F.count("*"), output_type=tuple[str, str, int])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: F.count(), r"functions.count: missing a required argument: 'col'; its arguments are \(col"),
        (lambda: F.sum("amount", "shop"), "functions.sum: too many positional arguments"),
        (lambda: F.round("amount", decimals=2), "functions.round: got an unexpected keyword argument 'decimals'"),
    ],
)
def test_a_column_function_is_called_as_sparks_can_be(call, message):
    with pytest.raises(PipelineError, match=message):
        call()


def test_names_are_checked_without_a_parser_where_there_is_no_sql():
    code = (
        "import sys; from tests.api.test_build_errors import rows, F; rows().where(F.col('amount') > 0).select('shop');"
        " assert 'sqlglot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_sink_object_takes_two_streams_of_different_types():
    pipeline, sink = Pipeline("two"), PrintSink()
    pipeline.from_collection([1], int, name="numbers").sink_to(sink)
    pipeline.from_collection(["a"], str, name="texts").sink_to(sink).name("texts")
    assert [n.sink.records.python for n in pipeline.graph().nodes if isinstance(n, SinkNode)] == [int, str]
    assert not hasattr(sink, "records")


@pytest.mark.parametrize("drift", [timedelta(seconds=-1), 20])
def test_the_drift_of_watermarks_is_a_length_of_time(drift):
    with pytest.raises(PipelineError, match=r"group 'g': the drift must be a timedelta that is not negative, not"):
        WatermarkStrategy.for_monotonous_timestamps().with_watermark_alignment("g", drift)


@pytest.mark.parametrize("timeout", [timedelta(0), timedelta(seconds=-1), 5, "10 s"])
def test_an_idle_timeout_is_a_length_of_time(timeout):
    with pytest.raises(PipelineError, match=r"the idle timeout (is a timedelta, not|has to be at least 1 ms, and is)"):
        WatermarkStrategy.for_monotonous_timestamps().with_idleness(timeout)


class Late(NamedTuple):
    key: str
    at: int


def windowed(of=tuple[str, int]):
    strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(lambda late: late[1])
    timed = Pipeline("p").from_collection([], of, name="in").assign_timestamps_and_watermarks(strategy)
    return timed.key_by(lambda late: late[0]).window(TumblingEventTimeWindows.of(timedelta(seconds=10)))


def intervals():
    strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
    timed = Pipeline("p").from_collection([], Late, name="in").assign_timestamps_and_watermarks(strategy)
    return timed.key_by("key").interval_join(timed.key_by("key"))


@pytest.mark.parametrize(
    "build",
    [
        lambda: windowed().allowed_lateness(5000),
        lambda: intervals().between(-1, timedelta(seconds=1)),
        lambda: intervals().between(timedelta(0), 1),
        lambda: StateTtlConfig.new_builder(5),
        lambda: TimeEvictor.of(5),
        lambda: ContinuousEventTimeTrigger.of(5),
        lambda: AsyncRetryStrategy.fixed_delay(3, 5),
    ],
)
def test_a_number_in_the_place_of_a_length_of_time_is_an_error_that_names_it(build):
    with pytest.raises(PipelineError, match=r".*: the [a-z ]+ is a timedelta, not -?\d+; import it from datetime"):
        build()


@pytest.mark.parametrize(
    "build",
    [
        lambda tag: windowed(Late).side_output_late_data(tag),
        lambda tag: intervals().side_output_left_late_data(tag),
        lambda tag: intervals().side_output_right_late_data(tag),
    ],
)
def test_late_data_of_another_type_than_its_side_output_is_an_error(build):
    build(OutputTag("late", Late))
    with pytest.raises(RecordTypeError, match=r"late records are of Late.*, and side output 'late' is declared int"):
        build(OutputTag("late", int))
    with pytest.raises(PipelineError, match="expected an OutputTag for late data, got 'late'"):
        build("late")


def test_only_watermarks_that_are_known_by_part_are_aligned():
    with pytest.raises(UnsupportedError, match=r"group 'g': the watermark of each part has to be known"):
        WatermarkStrategy.no_watermarks().with_watermark_alignment("g", timedelta(seconds=20))
