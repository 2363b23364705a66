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
    started.conf.set("spark.sql.legacy.setCommandRejectsSparkCoreConfs", "false")
    started.conf.set("spark.dynamicAllocation.enabled", "true")
    assert session.prepared(started).conf.get(PARTITIONS) == "200"
    started.conf.unset(PARTITIONS)
    started.conf.set("spark.dynamicAllocation.maxExecutors", "5")
    started.conf.set("spark.executor.cores", "3")
    assert session.prepared(started).conf.get(PARTITIONS) == "30"
