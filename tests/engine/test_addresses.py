"""Addresses of Spark: which are refused, and how soon one that nobody answers at is given up."""

import socket

import pytest

from dagster_unified.api import Pipeline
from dagster_unified.engine import session
from dagster_unified.engine.session import checked_master, checked_remote, reach_master
from dagster_unified.errors import ConfigurationError, UnreachableError, lasting
from dagster_unified.orchestration import IntermediatesResource, SparkResource, unified_definitions


@pytest.mark.parametrize(
    "master",
    [
        "local",
        "local[2]",
        "local[*]",
        "local[2,3]",
        "local-cluster[2,1,1024]",
        "spark://a:7077,b:7077",
        "yarn",
        "k8s://https://host:443",
    ],
)
def test_the_masters_that_spark_knows_are_taken(master):
    assert checked_master(master) == master


@pytest.mark.parametrize(
    "master", ["sprk://host:7077", "spark://host", "Local[2]", "local[two]", "", "http://host:7077"]
)
def test_another_master_is_refused(master):
    with pytest.raises(ConfigurationError, match="is not a Spark master, such as local"):
        checked_master(master)


@pytest.mark.parametrize("remote", ["http://host:15002", "sc://", "host:15002", "sc://host:port", "sc://host:99999"])
def test_another_remote_is_refused(remote):
    with pytest.raises(
        ConfigurationError, match="is not the address of a Spark Connect server, such as sc://host:15002"
    ):
        checked_remote(remote)


def test_one_of_several_masters_is_enough():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        reach_master(f"spark://127.0.0.1:1,127.0.0.1:{listening.getsockname()[1]}")
    with pytest.raises(UnreachableError, match="Connection refused; Connection refused"):
        reach_master("spark://127.0.0.1:1,127.0.0.1:2")


def test_a_stream_may_be_started_again_where_a_master_is_away_for_a_while():
    assert not lasting("UnreachableError")
    assert lasting("MissingRequirementError")


def test_a_port_where_something_else_listens_is_given_up_and_a_token_is_not_shown():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"sc://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(
            UnreachableError, match=f"can be reached at {address}: what listens there does not answer as one"
        ):
            session.start(remote=f"{address}/;token=secret")


def test_the_server_of_the_environment_is_taken_where_nobody_says_where_spark_runs(monkeypatch):
    monkeypatch.setenv("SPARK_REMOTE", "sc://127.0.0.1:1")
    with pytest.raises(UnreachableError, match=r"no Spark Connect server can be reached at sc://127\.0\.0\.1:1"):
        session.start()
    with pytest.raises(ConfigurationError, match=r"to run on spark://host:7077, and the environment has SPARK_REMOTE"):
        session.start("spark://host:7077")


def test_a_stage_fails_at_once_and_is_not_tried_again(tmp_path):
    pipeline = Pipeline("words")
    pipeline.from_collection([("a", 1)], name="words").print("out")
    resources = {
        "spark": SparkResource(remote="sc://127.0.0.1:1"),
        "intermediates": IntermediatesResource(path=str(tmp_path)),
    }
    job = unified_definitions(pipeline, resources=resources).resolve_job_def("words_batch")
    result = job.execute_in_process(raise_on_error=False)
    failed = next(e for e in result.all_node_events if e.is_step_failure)
    assert failed.step_failure_data.user_failure_data.description.startswith(
        "no Spark Connect server can be reached at sc://127.0.0.1:1: Connection refused"
    )
    assert not [e for e in result.all_events if e.is_step_up_for_retry]
