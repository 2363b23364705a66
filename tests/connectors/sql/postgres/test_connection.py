"""How connections are written down, what they show, and what the errors of a real server become."""

import pickle
import signal
import time

import psycopg
import pyarrow as pa
import pytest
from dagster import EnvVar

from dagster_unified.connectors.sql.postgres import PostgresConnection
from dagster_unified.connectors.sql.postgres.connection import errors_of, lost, translated
from dagster_unified.errors import ConfigurationError, PipelineError, SinkError, UnavailableError
from dagster_unified.orchestration import PostgresResource


@pytest.fixture(scope="module")
def user(postgres_server):
    """The parts of a connection as a user with a password and no rights."""
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute("CREATE ROLE etl LOGIN PASSWORD 'right'")
    yield {"host": "127.0.0.1", "port": postgres_server.port, "database": "postgres", "user": "etl"}
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute("DROP ROLE etl")


def test_a_url_is_taken_apart_and_shows_no_secret():
    given = PostgresConnection("postgresql://e%40tl:s%3Acret@db.example:5433/sales?sslmode=require&sslpassword=hidden")
    assert repr(given) == "PostgresConnection(postgresql://db.example:5433/sales)"
    assert given.parameters() | {"user": "e@tl", "password": "s:cret", "sslmode": "require"} == given.parameters()
    assert "cret" not in f"{given} {given.describe()}"


def test_a_bad_url_is_not_shown():
    with pytest.raises(ConfigurationError, match="none of PostgreSQL's") as raised:
        PostgresConnection("mysql://etl:secret@db/sales")
    assert "secret" not in str(raised.value)


def test_values_are_looked_up_where_a_client_connects(monkeypatch):
    given = PostgresConnection(host=EnvVar("DB_HOST"), database="sales", password=EnvVar("DB_PASSWORD"))
    arrived = pickle.loads(pickle.dumps(given))
    assert arrived == given
    assert arrived.describe() == "postgresql://$DB_HOST:5432/sales"
    monkeypatch.setenv("DB_HOST", "db.example")
    with pytest.raises(ConfigurationError, match="password: environment variable DB_PASSWORD has no value"):
        arrived.parameters()
    monkeypatch.setenv("DB_PASSWORD", "secret")
    assert arrived.parameters()["password"] == "secret"
    assert "secret" not in repr(arrived)


def test_a_port_may_be_looked_up(monkeypatch):
    given = PostgresConnection(host="db.example", port=EnvVar.int("DB_PORT"))
    assert given.describe() == "postgresql://db.example:$DB_PORT"
    monkeypatch.setenv("DB_PORT", "5433")
    assert pickle.loads(pickle.dumps(given)).parameters()["port"] == "5433"


def test_an_answer_that_does_not_come_is_not_waited_for_for_long(user):
    assert PostgresConnection("postgresql://x/y").parameters()["tcp_user_timeout"] == "30000"
    for client in ("connect", "connect_bulk"):
        getattr(PostgresConnection(**user, password="right"), client)("sink 'sales'").close()


@pytest.fixture(scope="module")
def forbidding(postgres_server, user):
    """The parts of a connection, with a database that they may not connect to, and others that cannot log in."""
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE closed ALLOW_CONNECTIONS false")
        connection.execute("CREATE DATABASE private")
        connection.execute("REVOKE CONNECT ON DATABASE private FROM PUBLIC")
        connection.execute("CREATE ROLE idle PASSWORD 'right'")
        connection.execute("CREATE ROLE few LOGIN PASSWORD 'right' CONNECTION LIMIT 0")
    yield user
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        for made in ("DATABASE closed", "DATABASE private", "ROLE idle", "ROLE few"):
            connection.execute(f"DROP {made}")


LOGIN = r"refuses the login \(.*\); check user and password"
OPTIONS = "correct the connection's options, or the server's"


@pytest.mark.parametrize("client", ["connect", "connect_bulk"])
@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"database": "private"}, ConfigurationError, 'database "private"; GRANT CONNECT ON DATABASE private TO "etl"'),
        ({"database": "closed"}, ConfigurationError, '"closed" is not currently accepting connections; ' + OPTIONS),
        ({"user": "idle"}, ConfigurationError, LOGIN),
        ({"user": "nobody"}, ConfigurationError, LOGIN),
        ({"user": "few"}, UnavailableError, r"cannot do it now \(too many connections for role"),
        ({"options": {"sslmode": "require"}}, ConfigurationError, "SSL was required; " + OPTIONS),
        ({"options": {"sslmode": "requir"}}, ConfigurationError, 'invalid sslmode value: "requir"; ' + OPTIONS),
        ({"options": {"sslmod": "require"}}, ConfigurationError, 'invalid connection option "sslmod"; ' + OPTIONS),
        ({"port": 99999}, ConfigurationError, 'invalid port number: "99999"; ' + OPTIONS),
        ({"options": {"options": "-c none=1"}}, ConfigurationError, 'parameter "none"; ' + OPTIONS),
        ({"options": {"options": "-c log_min_messages=log"}}, ConfigurationError, "permission denied to set .*; grant"),
    ],
)
def test_what_is_refused_for_good_is_not_tried_again(forbidding, client, given, kind, said):
    connection = PostgresConnection(**{**forbidding, "password": "right", **given})
    with pytest.raises(kind, match=f"^sink 'sales': postgresql://127.*{said}"):
        getattr(connection, client)("sink 'sales'")


def test_a_transaction_that_the_server_ends_is_transient(user):
    connection = PostgresConnection(**user, password="right")
    with connection.connect("sink 'sales'") as connected:
        connected.execute("SET idle_in_transaction_session_timeout = '50ms'")
        time.sleep(0.5)
        with pytest.raises(UnavailableError, match="cannot do it now"), errors_of(connection, "sink 'sales'"):
            connected.execute("SELECT 1")


@pytest.mark.parametrize("state", ["25P03", "25P04"])
def test_its_connection_is_lost(state):
    class Ended(psycopg.OperationalError):
        sqlstate = state

    Ended.__module__ = "psycopg.errors"
    ended = Ended("FATAL: terminating connection due to transaction timeout")
    assert lost(ended)
    assert isinstance(translated(ended, PostgresConnection("postgresql://x/y"), "sink 'sales'"), UnavailableError)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("PQgetCopyData() failed: server closed the connection unexpectedly\n", UnavailableError),
        ("Execution error [PGRES_FATAL_ERROR]: FATAL:  terminating connection due to admin", UnavailableError),
        ("Execution error [PGRES_FATAL_ERROR]: ERROR:  lost connection to parallel worker\n", UnavailableError),
        ("Execution error [PGRES_FATAL_ERROR]: ERROR:  could not write: No space left on device", UnavailableError),
        ("Execution error [PGRES_FATAL_ERROR]: ERROR:  terminating due to administrator command", UnavailableError),
        ("Execution error [PGRES_FATAL_ERROR]: ERROR:  out of memory", UnavailableError),
        ("Execution error [PGRES_FATAL_ERROR]: ERROR:  division by zero\n", SinkError),
        ("Execution error [PGRES_FATAL_ERROR]: ERROR:  invalid input value for enum\n", SinkError),
        ("Execution error [PGRES_FATAL_ERROR]: FEHLER:  Division durch Null\n", SinkError),
        ("Field 1: expected 8 bytes but found 4", SinkError),
    ],
)
@pytest.mark.parametrize("error", [OSError, pa.ArrowInvalid])
def test_what_is_said_while_rows_are_read_is_known_by_its_words(error, said, kind):
    found = translated(error(f"[libpq] {said}"), PostgresConnection("postgresql://x/y"), "here")
    assert type(found) is kind
    assert said.split(":  ")[-1].strip() in str(found)
    assert translated(error("of another library"), PostgresConnection("postgresql://x/y"), "here") is None


def test_a_whole_url_may_be_looked_up(monkeypatch):
    given = PostgresConnection.of(EnvVar("DB_URL"))
    assert given.describe() == "postgresql at $DB_URL"
    monkeypatch.setenv("DB_URL", "postgresql://etl:secret@db.example/sales")
    assert given.parameters()["dbname"] == "sales"


def test_a_resource_gives_a_connection(monkeypatch):
    monkeypatch.setenv("DB_PASSWORD", "secret")
    resource = PostgresResource(host="db.example", database="sales", user="etl", password=EnvVar("DB_PASSWORD"))
    assert PostgresConnection.of(resource).parameters()["password"] == "secret"
    assert "secret" not in repr(PostgresConnection.of(resource))


def test_a_resource_connects(user):
    with PostgresResource(**user, password="right").get_connection() as connection:
        assert connection.execute("SELECT current_user").fetchone() == ("etl",)


def test_anything_else_is_no_connection():
    with pytest.raises(PipelineError, match="expected a PostgresConnection"):
        PostgresConnection.of(7)


@pytest.mark.parametrize("client", ["connect", "connect_bulk"])
@pytest.mark.parametrize(
    ("changed", "kind", "says"),
    [
        ({"password": "wrong"}, ConfigurationError, 'password authentication failed for user "etl"'),
        ({}, ConfigurationError, "no password supplied"),
        ({"password": "right", "database": "nowhere"}, ConfigurationError, 'database "nowhere" does not exist'),
        ({"password": "right", "port": 1}, UnavailableError, "Connection refused"),
        ({"password": "right", "host": "nobody.invalid"}, UnavailableError, "nobody.invalid"),
    ],
)
def test_one_sentence_says_why_nobody_answers(user, client, changed, kind, says):
    began = time.monotonic()
    with pytest.raises(kind, match=says) as raised:
        getattr(PostgresConnection(**{**user, **changed}), client)("sink 'sales'")
    assert time.monotonic() - began < 10
    assert str(raised.value).startswith("sink 'sales': postgresql://")
    assert "\n" not in str(raised.value)
    assert "right" not in str(raised.value)


@pytest.mark.parametrize("client", ["connect", "connect_bulk"])
@pytest.mark.parametrize(
    ("statement", "kind", "says"),
    [
        (
            "SELECT * FROM pg_authid",
            ConfigurationError,
            "for table pg_authid; GRANT SELECT ON TABLE pg_authid TO .etl.",
        ),
        ("SELECT * FROM nothing", SinkError, 'relation "nothing" does not exist; check the name'),
        ("SELECT 1/0", SinkError, "refuses it: division by zero"),
        ("SELECT pg_terminate_backend(pg_backend_pid())", UnavailableError, "terminating connection"),
    ],
)
def test_one_sentence_says_what_the_server_refuses(user, client, statement, kind, says):
    connection = PostgresConnection(**user, password="right")

    def fetched():
        with errors_of(connection, "sink 'sales'"), connected.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall()

    with getattr(connection, client)("sink 'sales'") as connected, pytest.raises(kind, match=says):
        fetched()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGQUIT, signal.SIGINT])
def test_a_server_that_goes_away_is_transient_and_comes_back(postgres_server, how):
    connection = PostgresConnection(postgres_server.url())
    opened = connection.connect("sink 'sales'", autocommit=True)
    postgres_server.restart(how)
    with pytest.raises(UnavailableError), errors_of(connection, "sink 'sales'"):
        opened.execute("SELECT 1")
    with connection.connect("sink 'sales'") as again:
        assert again.execute("SELECT 1").fetchone() == (1,)
