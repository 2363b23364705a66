"""Into how many tasks exchanges lead where nobody says."""

import pytest

from dagster_unified.engine import session
from dagster_unified.engine.session import PARTITIONS

pytestmark = pytest.mark.spark


@pytest.fixture
def started(spark):
    """A session that was started elsewhere, with nothing said."""
    found = spark.newSession()
    found.conf.unset(PARTITIONS)
    return found


def test_two_for_each_core(started):
    assert session.prepared(started).conf.get(PARTITIONS) == "4"


def test_what_somebody_says_holds_also_where_it_is_what_spark_has(started):
    started.conf.set(PARTITIONS, "200")
    assert session.prepared(started).conf.get(PARTITIONS) == "200"


def test_two_for_each_core_that_dynamic_allocation_may_bring(started):
    given = {"enabled": "true", "maxExecutors": "5"}
    settings = {f"spark.dynamicAllocation.{name}": value for name, value in given.items()}
    assert session._cores_at_most(started, {**settings, "spark.executor.cores": "3"}) == 15
    assert session._cores_at_most(started, {"spark.dynamicAllocation.enabled": "true"}) is None
