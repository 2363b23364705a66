"""The configured Dagster resources of this deployment.

Where Spark runs, and where runs keep what they hand on, is in the environment, so that a deployment on a cluster has
the code locations of one machine: `SPARK_MASTER` (`spark://host:7077`) or `SPARK_REMOTE` (`sc://host:15002`), and
`UNIFIED_STORAGE`. Without them, this machine. All can be changed at launch, in the launchpad.
"""

from __future__ import annotations

import os
from typing import Any

from dagster import EnvVar

from dagster_unified.orchestration import ExecutionConfig, IntermediatesResource, SparkResource

STORAGE = os.environ.get("UNIFIED_STORAGE", ".dagster_unified/intermediates")
"""Where intermediates are: a folder, or a bucket that the whole cluster reaches."""


def resources() -> dict[str, Any]:
    """The resources that every code location here uses."""
    return {
        "spark": _spark(),
        "execution": ExecutionConfig(),
        "intermediates": IntermediatesResource.configure_at_launch(path=STORAGE),
    }


def _spark() -> Any:
    """A session on a cluster, of a Connect server, or on all cores of this machine."""
    if "SPARK_REMOTE" in os.environ:
        return SparkResource(remote=EnvVar("SPARK_REMOTE"))  # the address may hold a token
    return SparkResource.configure_at_launch(master=os.environ.get("SPARK_MASTER", "local[*]"))
