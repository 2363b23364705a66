"""A deployment under `dagster dev` whose broker and database crash, stay away, and come back."""

import json
import signal

import pytest
from psycopg.errors import UndefinedTable

from tests.connectors.sql.support import rows
from tests.orchestration.test_streaming_under_dagster import Dagster
from tests.servers.kafka import Broker
from tests.servers.postgres import PostgresServer

pytestmark = [pytest.mark.spark, pytest.mark.rotates("stories")]


class Restarted(Dagster):
    module = "tests.connectors.restarted_job"
    mark = "RESTARTED_FOLDER"

    def failed(self):
        return [run for run, status in self.statuses().items() if status == "FAILURE"]


def test_a_job_whose_servers_crash_goes_on_by_itself_and_everything_is_there_once(tmp_path, postgres_programs):
    folder = tmp_path / "dagster"
    folder.mkdir()
    dagster, broker, server = (
        Restarted(folder),
        Broker(tmp_path / "broker", heap="256m"),
        PostgresServer(postgres_programs),
    )
    sent = 0

    def send(count):
        nonlocal sent
        numbers = range(sent, sent + count)
        broker.write("sold", [{"value": json.dumps({"id": n, "shop": f"shop {n % 7}"}).encode()} for n in numbers])
        sent += count

    def is_there():
        try:
            return [n for (n,) in rows(database, "SELECT id FROM sold ORDER BY id")] == [*range(sent)]
        except UndefinedTable:
            return False

    def failed_again(before, *says):
        """Whether a run has failed since, and says this in one sentence."""
        said = [dagster.said(run) for run in dagster.failed() if run not in before]
        return any(all(part in one for part in says) for one in said)

    try:
        broker.start()
        server.start()
        database = server.create_database("shop")
        for topic in ("sold", "copied"):
            broker.create_topic(topic)
        send(100)
        dagster.start(RESTARTED_BROKER=broker.address, RESTARTED_DATABASE=database)
        dagster.sensor(on=True)
        dagster.until(is_there, "the first records are in the table")

        before = dagster.failed()
        server.stop(signal.SIGKILL)
        send(100)
        dagster.until(
            lambda: failed_again(before, "sink 'table'", f"127.0.0.1:{server.port}"), "a run without its database fails"
        )
        dagster.until(
            lambda: len(dagster.failed()) >= len(before) + 2, "another one begins, without its database, and fails"
        )
        server.start()
        dagster.until(is_there, "what came meanwhile is in the table")

        before = dagster.failed()
        send(100)
        broker.kill()
        dagster.until(lambda: failed_again(before, broker.address), "a run without its broker fails")
        broker.start()
        send(100)
        dagster.until(is_there, "everything is in the table")
        dagster.until(lambda: len(broker.values("copied")) >= sent, "everything is in the topic")
        copied = sorted(json.loads(value)["id"] for value in broker.values("copied"))
        assert copied == [*range(sent)]
        assert len(dagster.failed()) >= 3
    finally:
        dagster.end()
        broker.kill()
        server.remove()
