"""Slips of a first use: what is given in the place of records or of a function is an error that leads on."""

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark import SparkContext
from pyspark.sql import functions as spark_functions

from dagster_unified import api
from dagster_unified.api import Pipeline
from dagster_unified.api import functions as F
from dagster_unified.connectors import (
    CollectionSource,
    DatabaseSink,
    DatabaseSource,
    FileSink,
    PostgresSink,
    PostgresSource,
)
from dagster_unified.errors import PipelineError, RecordTypeError, StateError, UserFunctionError
from dagster_unified.testing import assert_same_in_both_modes, run_pipeline
from tests.support import MODES, results


@pytest.fixture
def no_session(monkeypatch):
    """Another test's session may run in this process; functions of a harness meet none."""
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)


class Row(NamedTuple):
    a: int
    b: str = "x"


class Untyped(NamedTuple):
    a: dict


def frame(package, name, **attributes):
    """A table of a package that is not installed here: only its class is looked at."""
    return type(name, (), {"__module__": f"{package}.frame", "__iter__": lambda self: iter(["a"]), **attributes})()


NO_RECORDS = {
    "a frame of pandas": (
        pd.DataFrame({"a": [1]}),
        r"a DataFrame gives its columns.*Row\(\*values\).*itertuples\(index=F",
    ),
    "a frame of polars": (frame("polars.dataframe", "DataFrame"), r"gives its columns, not its rows; .*iter_rows\(\)"),
    "a lazy frame of polars": (frame("polars.lazyframe", "LazyFrame"), r"frame\.collect\(\)\.iter_rows\(\)"),
    "a frame of Spark": (
        frame("pyspark.sql.classic", "DataFrame"),
        r"values\.asDict\(\)\) for values in frame.collect",
    ),
    "a table of Arrow": (
        pa.table({"a": [1]}),
        r"a Table gives its columns.*\*\*values\) for values in table\.to_pylist",
    ),
    "a batch of Arrow": (pa.record_batch({"a": [1]}), r"batch\.to_pylist\(\)"),
    "an array of Arrow": (pa.array([1]), r"gives Arrow's values, not Python's; give array\.to_pylist\(\)"),
    "a dict": ({"a": 1}, r"a dict gives only its keys; give list\(given\.items\(\)\)"),
    "a text": ("abc", r"'abc' is one value, whose letters would be the records; give \[value\]"),
    "bytes": (b"abc", "whose bytes would be the records"),
    "a set": ({1, 2}, r"a set has no order.*give sorted\(given\)"),
    "one record": (Row(1, "a"), r"Row\(a=1, b='a'\) is one record, whose fields would be the records; give \[record\]"),
    "a number": (5, r"5 \(int\) is no collection; give a list of records"),
    "nothing": (None, r"None \(NoneType\) is no collection"),
    "a function": (lambda: [1], "is no collection; call it"),
}


@pytest.mark.parametrize("slip", NO_RECORDS)
@pytest.mark.parametrize("typed", [False, True])
def test_what_is_no_collection_of_records_is_refused_with_what_to_give(slip, typed):
    value, words = NO_RECORDS[slip]
    with pytest.raises(PipelineError, match=f"^p: source 'in': .*{words}"):
        Pipeline("p").from_collection(value, *([Row] if typed else []), name="in")
    with pytest.raises(PipelineError, match=f"source 'in': .*{words}"):
        CollectionSource(value, Row, name="in")


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"a": 1}, r"make it Row\(\*\*record\), with class Row\(NamedTuple\): a: int; or give type_info="),
        ({"a b": 1}, r"give type_info=, such as dict\[str, int\]"),
        ({"class": 1}, "make an annotated class of its keys"),
        ([1], r"a list, which says nothing about its columns; make it a tuple.*give type_info=, such as list\[int\]"),
        (pd.DataFrame({"a": [1]}), "its first record is a DataFrame, which says nothing about its columns"),
        (np.array([1, 2]), "its first record is a ndarray"),
        (None, "its first record is None, which stands for no record; leave it out"),
    ],
)
def test_a_record_without_a_type_is_refused_with_what_to_make_of_it(record, words):
    with pytest.raises(PipelineError, match=f"p: source 'in': .*{words}"):
        Pipeline("p").from_collection([record], name="in")


def test_a_dict_in_the_place_of_a_declared_record_is_refused_with_the_call_that_makes_one():
    with pytest.raises(RecordTypeError, match=r"got {'a': 1} \(dict\); make it Row\(\*\*record\), or change"):
        Pipeline("p").from_collection([{"a": 1}], Row)


def given_of(collection):
    made = Pipeline("p").from_collection(collection)
    return results(made, "BATCH")


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1))
def test_every_iterable_of_values_gives_these_values(numbers):
    for collection in (numbers, tuple(numbers), (n for n in numbers), pd.Series(numbers), np.array(numbers)):
        assert given_of(collection) == numbers


def test_a_field_without_the_types_of_its_items_says_what_to_write():
    with pytest.raises(RecordTypeError, match=r"field 'a' of Untyped: Any has no column type.*write dict\[str, int\]"):
        Pipeline("p").from_collection([Untyped({"a": 1})])


def test_a_decimal_with_more_digits_than_the_type_has_says_how_to_round_it():
    with pytest.raises(
        RecordTypeError, match=r"the value is declared Decimal.*0\.3333.*18 digits.*use quantize\(\.\.\.\)"
    ):
        Pipeline("p").from_collection([Decimal(1) / Decimal(3)])


def stream(records=(1, 2, 3)):
    return Pipeline("p").from_collection(records, name="in")


def run(made, mode="BATCH"):
    made.print("out")
    return run_pipeline(made._pipeline, mode).only()


def no_answer(n: int) -> bool:
    n > 1


def none_at_all(n: int) -> Iterator[int]:
    return None


def one_text(n: int) -> Iterator[str]:
    return "abc"


@MODES
@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda s: s.filter(no_answer),
            "'no_answer': TypeError: it returned None, and a filter returns True or False;",
        ),
        (lambda s: s.filter(lambda n: None), "'filter': TypeError: it returned None, and a filter returns"),
        (
            lambda s: s.flat_map(none_at_all),
            "'none_at_all': TypeError: it returned None, and a flat_map returns records",
        ),
        (lambda s: s.flat_map(one_text), "'one_text': TypeError: it returned the text 'abc', whose letters would be"),
        (lambda s: s.filter(lambda n: F.col("value") > 1), "'filter': TypeError: a column has no truth value"),
        (
            lambda s: s.map(lambda n: spark_functions.col("value"), int),
            "'map': it calls a function of pyspark.sql.functions, which makes an expression on columns, and",
        ),
        (
            lambda s: s.key_by(lambda n: spark_functions.upper("value"), key_type=str).reduce(max),
            r"key_by\(function\): it calls a function of pyspark.sql.functions, which makes an expression on columns",
        ),
        (
            lambda s: s.map(lambda n: n + 1, int).filter(lambda n: np.array([1, 2])),
            "'filter': ValueError: The truth val",
        ),
    ],
)
def test_a_result_that_is_none_or_no_answer_is_an_error_with_the_record(build, words, mode, no_session):
    with pytest.raises(UserFunctionError, match=rf"{words}.*, on [12]$"):
        run(build(stream()), mode)


@MODES
def test_a_key_that_is_an_expression_on_columns_is_an_error_that_says_what_to_do(mode):
    words = r"key_by\(function\): the key is .* for 1, which is an expression on columns; compute it from the record's"
    with pytest.raises(RecordTypeError, match=words):
        run(stream().key_by(lambda n: F.col("value"), key_type=int).reduce(max), mode)


def test_what_a_filter_gives_besides_none_counts_by_its_truth():
    kept = stream(["ab", "b", "aab"]).filter(lambda text: re.match("a+", text) is not None)
    assert run(kept) == ["ab", "aab"]
    for answer in (lambda n: n % 2, lambda n: np.bool_(n % 2), lambda n: [n] * (n % 2)):
        pipeline = Pipeline("p")
        pipeline.from_collection([1, 2, 3]).filter(answer).print("out")
        assert run_pipeline(pipeline, "BATCH").only() == [1, 3]
        assert_same_in_both_modes(pipeline)


def test_a_filter_in_a_chain_is_named_and_not_its_neighbours():
    chain = stream().map(lambda n: n + 1, int).filter(lambda n: n > 2).filter(lambda n: None if n > 3 else True)
    with pytest.raises(UserFunctionError, match=r"operator 'filter.*': TypeError: it returned None, .*, on 4$"):
        run(chain)


ON_COLUMNS = "on columns, and no function of a record; a condition goes into where, values into select"


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda s: s.filter(F.col("a") > 1), rf"operator 'filter': \(a > 1\) is an expression {ON_COLUMNS}"),
        (lambda s: s.map(F.col("a") + 1), f"operator 'map': .*{ON_COLUMNS}"),
        (lambda s: s.map(F.upper, str), f"operator 'map': 'upper' makes an expression {ON_COLUMNS}"),
        (lambda s: s.flat_map(F.explode("a"), int), f"operator 'flat_map': .*{ON_COLUMNS}"),
        (lambda s: s.key_by("b").reduce(F.sum("a")), f"operator 'reduce': .*{ON_COLUMNS}"),
        (lambda s: s.key_by(F.col("b")), f"operator 'key_by': .*{ON_COLUMNS}.*or give the names of fields"),
        (lambda s: s.key_by("b").sum(F.col("a")), r"operator 'sum': it takes the name of a field, .*F\.sum\('a'\)"),
        (lambda s: s.where(lambda row: row.a > 1), "operator 'where': it takes SQL text and expressions of dagster_un"),
        (lambda s: s.select(lambda row: row.a), "operator 'select': it takes SQL text and expressions"),
        (
            lambda s: s.filter("a > 1"),
            "operator 'filter': 'a > 1' is a text, and no function of a record; .* in SQL goes into where",
        ),
        (lambda s: s.map("a + 1", int), r"operator 'map': 'a \+ 1' is a text, and no function"),
    ],
)
def test_an_expression_on_columns_is_no_function_and_a_function_no_expression(build, words):
    with pytest.raises(PipelineError, match=f"^p: {words}"):
        build(stream([Row(1)]))


@pytest.mark.parametrize("given", [CollectionSource, [1], "in.csv", None])
def test_what_is_no_source_and_no_sink_is_refused_with_what_to_give(given):
    said = "CollectionSource is a class" if isinstance(given, type) else f"{re.escape(repr(given))} is no source"
    with pytest.raises(PipelineError, match=f"^p: from_source: {said}"):
        Pipeline("p").from_source(given)
    with pytest.raises(PipelineError, match=r"^p: operator 'sink_to': .* is no sink; .*DeltaSink\(path\)"):
        stream().sink_to(given)
    with pytest.raises(PipelineError, match=r"^p: operator 'sink_to': FileSink is a class; .*FileSink\(\.\.\.\)"):
        stream().sink_to(FileSink)


@pytest.mark.parametrize("host", ["127.0.0.1", "db.example", "db"])
@pytest.mark.parametrize(
    "build",
    [
        lambda url: PostgresSource(url, Row, "rows"),
        lambda url: PostgresSink(url, "rows"),
        lambda url: DatabaseSource(url, Row, "rows"),
        lambda url: DatabaseSink(url, "rows"),
    ],
)
def test_a_url_in_the_place_of_a_table_is_told_without_its_password(build, host):
    with pytest.raises(PipelineError, match=r"the table comes first, .* is a URL, postgresql://\.\.\.") as caught:
        build(f"postgresql://user:hidden@{host}/shop")
    assert "hidden" not in str(caught.value)


class Totals(NamedTuple):
    b: str
    total: int
    most: int


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ([F.sum("a"), F.max("a").alias("most")], r"sum\('a'\) has no name; .*such as 'total', with \.alias\(.*AS"),
        (["sum(a)", "max(a) AS most"], r"'sum\(a\)' has no name"),
        ([F.sum("a").alias("totl"), F.max("a").alias("most")], "'totl' is no field .*; did you mean 'total'"),
        ([F.sum("a").alias("total"), F.max("a").alias("b")], "'b' is no field of its own"),
        ([F.sum("a").alias("total"), F.max("a").alias("total")], "no aggregate is named 'most'"),
    ],
)
def test_an_aggregate_that_is_no_field_of_the_result_is_refused_where_it_is_written(columns, words):
    with pytest.raises(RecordTypeError, match=f"^p: operator 'agg': .*{words}"):
        stream([Row(1)]).key_by("b").agg(*columns, output_type=Totals)


def test_the_name_of_an_aggregate_is_found_as_spark_finds_it():
    named = [F.sum("a").alias("TOTAL"), "max(a) most"]
    assert run(stream([Row(1), Row(3)]).key_by("b").agg(*named, output_type=Totals)) == [Totals("x", 4, 3)]


class Adds(api.AggregateFunction):
    def create_accumulator(self) -> int:
        return 0

    def add(self, value: Row, accumulator: int) -> int:
        return f"{accumulator}{value.a}"

    def get_result(self, accumulator: int) -> int:
        return accumulator

    def merge(self, one: int, other: int) -> int:
        return one + other


@MODES
@pytest.mark.parametrize(
    "build",
    [
        lambda keyed: keyed.reduce(lambda one, other: one.a + other.a),
        lambda keyed: keyed.count_window(2).reduce(lambda one, other: one.a + other.a),
        lambda keyed: keyed.count_window(2).aggregate(Adds()),
    ],
)
def test_a_wrong_result_of_a_combination_names_what_it_was_computed_from(build, mode):
    with pytest.raises((RecordTypeError, StateError), match=r"computed from .*Row\(a=[12], b='x'\)") as caught:
        run(build(stream([Row(1), Row(2)]).key_by("b")), mode)
    assert "<fold>" not in str(caught.value)


def test_functions_of_pyspark_are_recognized_where_a_function_of_records_goes():
    from pyspark.sql import functions as of_spark

    with pytest.raises(PipelineError, match=f"p: operator 'map': 'upper' makes an expression {ON_COLUMNS}"):
        stream(["a"]).map(of_spark.upper, str)


def test_a_column_that_a_function_of_records_gives_is_told_where_it_goes():
    with pytest.raises(RecordTypeError, match="functions of columns go into select, where or agg"):
        run(stream(["a"]).map(lambda text: F.upper(text), str))


def test_importing_everything_of_the_api_shadows_no_name_of_collections():
    assert "Counter" not in api.__all__
    assert api.Counter is not None


class Order(NamedTuple):
    id: int


class Payment(NamedTuple):
    order: int


def test_two_connected_streams_are_shown_by_their_own_records_and_keys():
    pipeline = Pipeline("p")
    orders = pipeline.from_collection([Order(1)], name="orders").key_by("id")
    payments = pipeline.from_collection([Payment(1)], name="payments").key_by("order")

    class Both(api.KeyedCoProcessFunction):
        def process_element1(self, value, ctx):
            yield value.id

        def process_element2(self, value, ctx):
            yield value.order

    orders.connect(payments).process(Both(), int).print("out")
    text = pipeline.explain()
    assert "Either" not in text
    assert "Order | Payment" in text
    assert "through HASH by id | order" in text
