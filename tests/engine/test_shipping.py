"""Shipping an author's code: no session is needed to make payloads and to load them."""

import pickle
import re
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
from pyspark import cloudpickle

from dagster_unified.by_value import by_value_bytes
from dagster_unified.engine.shipping import Payload, Shipments, by_value_afresh
from dagster_unified.errors import MissingRequirementError, PipelineError
from dagster_unified.operators.drivers.batch import spare_the_garbage_collector
from dagster_unified.operators.functions.base import MapFunction
from dagster_unified.operators.windows import EventTimeTrigger, TumblingEventTimeWindows
from dagster_unified.operators.windows.contents import Windowing
from tests.graph.test_fingerprint import ROOT


class Counting(MapFunction):
    def __init__(self):
        self.calls = 0

    def map(self, value):
        self.calls += 1
        return self.calls

    def __call__(self, value):
        return self.map(value)


def double(value):
    return value * 2


class SlowToPickle:
    """Lets another thread ship something while this is being pickled."""

    def __init__(self, other):
        self.other = other

    def __getstate__(self):
        self.other.start()
        self.other.join(0.2)  # it ends here, or waits until this is done
        return {"function": double}


def test_a_worker_with_other_versions_than_the_driver_says_so():
    payload = Payload.of(double, [double])
    assert payload.load()(2) == 4
    payload.versions = (*((name, one) for name, one in payload.versions if name != "pyarrow"), ("pyarrow", "1.0"))
    with pytest.raises(MissingRequirementError, match=r"^host \S+ has pyarrow \d\S* and not 1\.0: install what"):
        pickle.loads(pickle.dumps(payload)).load()


class Unloadable:
    """Cannot be made anew, for the reason that it is given."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        return _raise, (self.error,)


def _raise(error):
    raise error


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (ModuleNotFoundError("No module named 'till'", name="till"), MissingRequirementError, "has no till: install"),
        (
            ModuleNotFoundError("No module named 'shops.till'", name="shops.till"),
            MissingRequirementError,
            "has a shops without the module shops.till: install",
        ),
        (
            ImportError("cannot import name 'till'"),
            MissingRequirementError,
            "cannot import a module: ImportError: cannot import name 'till': install",
        ),
        (SyntaxError("expected ':'"), MissingRequirementError, "cannot import a module: SyntaxError: expected"),
        (ValueError("no price"), PipelineError, "cannot load what it was sent: ValueError: no price; create"),
        (pickle.UnpicklingError("cut"), PipelineError, "cannot load what it was sent: UnpicklingError: cut; create"),
        (TimeoutError("no answer"), TimeoutError, "no answer"),
    ],
)
def test_a_worker_that_cannot_load_what_it_was_sent_says_so_where_no_retry_mends_it(error, kind, said):
    payload = Payload.of(Unloadable(error), [double])
    with pytest.raises(kind, match=rf"^(host \S+ )?{re.escape(said)}"):
        payload.load()


def test_two_queries_that_ship_at_once_do_not_take_each_others_modules_away():
    payloads = []
    other = threading.Thread(target=lambda: payloads.append(by_value_bytes(double)))
    payloads.append(by_value_bytes(SlowToPickle(other)))
    other.join()
    program = (
        f"import sys; sys.path.remove({ROOT!r}); from pyspark import cloudpickle;"
        f" print(*(type(cloudpickle.loads(p)).__name__ for p in {payloads!r}))"
    )
    ran = subprocess.run([sys.executable, "-I", "-c", program], cwd="/", capture_output=True, text=True)
    assert sorted(ran.stdout.split()) == ["SlowToPickle", "function"], ran.stderr
    assert cloudpickle.list_registry_pickle_by_value() == set()


class AsInherited(EventTimeTrigger):
    """Says again what it inherits: what a trigger says of itself is not inherited."""

    only_registers_end = True


def test_what_a_trigger_says_of_itself_reaches_a_worker():
    windows = Windowing(TumblingEventTimeWindows.of(timedelta(seconds=1)), AsInherited(), int)
    program = (
        f"from pyspark import cloudpickle; print(cloudpickle.loads({by_value_bytes(windows)!r}).only_registers_end)"
    )
    ran = subprocess.run([sys.executable, "-I", "-c", program], cwd="/", capture_output=True, text=True)
    assert ran.stdout.strip() == "True", ran.stderr


def test_a_function_with_a_life_cycle_is_another_object_for_each_task():
    payload = Payload.of(Counting(), [Counting()])
    assert [payload.load().map(0) for _ in range(3)] == [1, 1, 1]
    sent = by_value_afresh(Counting())
    assert [sent(0) for _ in range(3)] == [1, 1, 1]


def test_plain_functions_are_loaded_once_per_worker():
    payload = Payload.of([double], [double])
    assert payload.load() is payload.load()


def test_a_job_ships_each_of_its_places_once():
    made = Shipments()
    assert [
        made.once("head", lambda: "first"),
        made.once("head", lambda: "second"),
        made.once("tail", lambda: "third"),
    ] == ["first", "first", "third"]


def test_garbage_is_frozen_once_per_process():
    program = """
import gc
from dagster_unified.operators.drivers.batch import spare_the_garbage_collector as spare
spare()
frozen = gc.get_freeze_count()
kept = [[] for _ in range(1000)]
spare()
print(gc.get_freeze_count() <= frozen)
"""
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
        == "True"
    )
    assert spare_the_garbage_collector.cache_info().currsize <= 1
