"""Ships a packed Python environment to the workers of a cluster, whose own interpreter may have no package at all.

Spark unpacks the archive in each executor's folder. An executor finds the interpreter there by its PATH, and the
driver, which runs some Python workers as well, finds its own by the same name: Spark has one name for both.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from dagster_unified.errors import ConfigurationError

FOLDER = "environment"
"""Where an executor has it, in its own folder."""

INTERPRETER = "python3"

_PACKED = (".tar.gz", ".tgz")
"""Of other archives Spark loses who may run a file, and it refuses links that lead out of them."""

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def shipping(path: str, master: str, remote: str | None, config: Mapping[str, str]) -> dict[str, str]:
    """The settings by which the executors of a session, or of a Connect server, that is about to start use it.

    Raises `ConfigurationError` for what is no archive, and for a session whose workers Spark does not start on a
    cluster.
    """
    if remote is not None or master.startswith("local"):
        of = f"the Spark Connect server's at {remote}" if remote is not None else f"those of {master} on this machine"
        raise ConfigurationError(
            f"environment={path!r} is for workers that Spark starts on a cluster for this resource, and its workers are"
            f" {of}; leave it out, or give a master such as spark://host:7077, by itself or with connect"
        )
    if not path.endswith(_PACKED):
        raise ConfigurationError(
            f"environment={path!r} is no .tar.gz file; pack the folder of a virtual environment with"
            " tar -C FOLDER -czf environment.tar.gz ."
        )
    if "://" not in path and not Path(path).is_file():
        raise ConfigurationError(f"environment={path!r}: there is no such file in {Path.cwd()}")
    os.environ["PYSPARK_PYTHON"] = INTERPRETER
    own, others = os.path.dirname(sys.executable), os.environ.get("PATH", "")
    if not others.startswith(own):
        os.environ["PATH"] = f"{own}:{others}"  # the JVM that is about to start runs the driver's Python workers by it
    given = config.get("spark.executorEnv.PATH", _PATH)
    # of a Connect session, workers start in a folder of its own within the executor's
    found = f"./{FOLDER}/bin:../{FOLDER}/bin"
    return {
        "spark.archives": ",".join(filter(None, (config.get("spark.archives"), f"{path}#{FOLDER}"))),
        "spark.executorEnv.PATH": f"{found}:{given}",
    }
