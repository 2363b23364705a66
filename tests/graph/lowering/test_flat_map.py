"""Functions that emit any number of records: which are read, and that they emit the same on columns."""

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.api import FilterFunction, FlatMapFunction, MapFunction, Pipeline, WatermarkStrategy
from dagster_unified.errors import UnifiedError
from dagster_unified.graph.lowering.inlining import inlined_flat_map
from dagster_unified.graph.lowering.source import UnreadableError
from dagster_unified.operators.program.inlined import InlinedChain
from dagster_unified.records import record_type
from dagster_unified.testing import run_pipeline
from tests.support import MODES


class Line(NamedTuple):
    text: str
    number: int
    maybe: str | None


class Word(NamedTuple):
    word: str
    count: int


LINES, WORDS, TEXTS = record_type(Line), record_type(Word), record_type(str)


def words(line: Line):
    for word in line.text.split():
        yield Word(word, 1)


def some_words(line: Line):
    """Some."""
    if not line.text:
        return
    text = line.text.lower()
    for word in text.split(","):
        word = word.strip()
        if word == "skip":
            continue
        if len(word) > 1:
            yield Word(word, len(word) + line.number)


def once(line: Line):
    if line.number % 2 == 0:
        yield Word(line.text, line.number)


def fails(line: Line):
    for word in line.text.split(" "):
        yield Word(word, 10 // len(word))


def listed(line: Line) -> list[Word]:
    found = line.text.upper()
    return [Word(word, len(word)) for word in found.split(" ") if word if word != "A"]


def none_or_one(line: Line) -> list[Word]:
    if line.maybe is None:
        return []
    return [Word(line.maybe, line.number)]


def parts_of_none(line: Line):
    yield from (Word(part, 2) for part in line.maybe.split("-"))


class Split(FlatMapFunction[Line, Word]):
    def flat_map(self, value: Line):
        for word in value.text.split("a"):
            yield Word(word, 3)


READ = (words, some_words, once, fails, listed, none_or_one, parts_of_none, Split())


def two(line: Line):
    yield Word(line.text, 1)
    yield Word(line.text, 2)


def nested(line: Line):
    for part in line.text.split():
        for word in part.split(","):
            yield Word(word, 1)


def broken(line: Line):
    for word in line.text.split():
        if word == "end":
            break
        yield Word(word, 1)


def sent(line: Line):
    back = yield Word(line.text, 1)
    print(back)


def other_branches(line: Line):
    if line.number:
        yield Word(line.text, 1)
    else:
        yield Word(line.text, 2)


def counts(line: Line):
    n = 0
    for word in line.text.split():
        n = n + 1
        yield Word(word, n)


def repeats(line: Line):
    before = ""
    for word in line.text.split():
        is_same = before == word
        before = word
        if not is_same:
            yield Word(word, 1)


def rebinds(line: Line):
    for word in line.text.split():
        line = Line(word + line.text, 1, None)
        yield Word(line.text, 1)


def fails_for_nothing(line: Line):
    if line.number > 5:
        yield Word(line.text, 1)
    elif int(line.text) > 3:
        return


def fails_for_no_word(line: Line):
    for word in line.text.split():
        if word == "a":
            yield Word(word, 1)
        elif int(word) > 3:
            continue


def fails_for_no_list(line: Line):
    if line.number > 5:
        return [Word(line.text, 1)]
    if int(line.text) > 3:
        return []
    return []


class Opened(FlatMapFunction[Line, Word]):
    def open(self, context):
        self.flat_map = listed

    def flat_map(self, value: Line):
        yield Word(value.text, 3)


def by_default(value: Line, other: Line = None):
    yield Word(value.text, 3)


class Static(FlatMapFunction[Line, Word]):
    flat_map = staticmethod(by_default)


class Shipped(FlatMapFunction[Line, Word]):
    def __reduce__(self):
        return (Split, ())

    def flat_map(self, value: Line):
        yield Word(value.text, 3)


CALLED = (
    two,
    nested,
    broken,
    sent,
    other_branches,
    lambda line: line.text,
    counts,
    repeats,
    rebinds,
    fails_for_nothing,
    fails_for_no_word,
    fails_for_no_list,
    Opened(),
    Static(),
    Shipped(),
)


@pytest.mark.parametrize("function", READ, ids=lambda f: getattr(f, "__name__", "object"))
def test_functions_that_are_read(function):
    inlined_flat_map(function, LINES, WORDS)


def test_a_list_of_texts_is_emitted_text_by_text():
    assert InlinedChain([inlined_flat_map(lambda line: line.split(), TEXTS, TEXTS)], TEXTS, TEXTS)


@pytest.mark.parametrize("function", CALLED, ids=lambda f: getattr(f, "__name__", type(f).__name__))
def test_functions_that_are_called(function):
    with pytest.raises(UnreadableError):
        inlined_flat_map(function, LINES, WORDS)


def outcome(build, lines, mode, lowering):
    pipeline = Pipeline("p")
    build(pipeline.from_collection(lines, Line)).print()
    try:
        return run_pipeline(pipeline, mode, options={"execution.lowering": lowering}, micro_batch=3, seed=5).only()
    except UnifiedError as error:
        return str(error)


class Longer(MapFunction[Word, Word]):
    def map(self, value: Word) -> Word:
        return Word(value.word + "!", value.count * 2**61)


class Short(FilterFunction[Word]):
    def filter(self, value: Word) -> bool:
        return len(value.word) < 4


@MODES
@given(
    st.lists(
        st.builds(Line, st.text("aA,- bé\x00", max_size=8), st.integers(-3, 3), st.none() | st.text("a-", max_size=3)),
        max_size=12,
    ),
    st.sampled_from(READ),
)
def test_what_they_emit_is_the_same_with_operators_before_and_after(mode, lines, function):
    """Event times go with the records; numbers may need more than 64 bits."""
    by_number = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("number")

    def build(stream):
        timed = stream.filter(lambda line: line.text != "a").assign_timestamps_and_watermarks(by_number)
        found = timed.flat_map(function, Word).filter(Short()).map(Longer()).flat_map(lambda w: w.word.split("b"), str)
        return found.map(lambda word: word * 2).key_by(lambda word: word).max()

    assert repr(outcome(build, lines, mode, "AUTO")) == repr(outcome(build, lines, mode, "OFF"))
