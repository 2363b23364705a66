"""Which packed environments are taken. `tests/end_to_end/test_standalone_cluster.py` ships one."""

import pytest

from dagster_unified.engine.environment import shipping
from dagster_unified.errors import ConfigurationError

MASTER = "spark://host:7077"


@pytest.fixture(autouse=True)
def same_process(monkeypatch):
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv("PYSPARK_PYTHON", "python")


def test_executors_have_it_in_their_folder_beside_what_the_configuration_ships(tmp_path):
    path = tmp_path / "environment.tar.gz"
    path.touch()
    given = {"spark.archives": "more.zip", "spark.executorEnv.PATH": "/opt/bin"}
    assert shipping(str(path), MASTER, None, given) == {
        "spark.archives": f"more.zip,{path}#environment",
        "spark.executorEnv.PATH": "./environment/bin:../environment/bin:/opt/bin",
    }


@pytest.mark.parametrize(
    ("path", "master", "remote", "told"),
    [
        ("e.tar.gz", "local[2]", None, "its workers are those of local[2] on this machine"),
        ("e.tar.gz", "local[2]", "sc://host", "its workers are the Spark Connect server's at sc://host;"),
        ("environment.zip", MASTER, None, "is no .tar.gz file"),
        ("e.tar.gz", MASTER, None, "there is no such file in "),
    ],
)
def test_where_it_cannot_be_shipped(path, master, remote, told):
    with pytest.raises(ConfigurationError) as raised:
        shipping(path, master, remote, {})
    assert told in str(raised.value)
