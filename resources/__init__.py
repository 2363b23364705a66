"""The configured Dagster resources of this deployment.

`local` runs on this machine; `cluster` on a Spark Connect server, whose address and token come from the environment.
Both can be changed at launch, in the launchpad.
"""

from __future__ import annotations

from typing import Any

from dagster import EnvVar

from dagster_unified.orchestration import ExecutionConfig, IntermediatesResource, SparkResource


def local() -> dict[str, Any]:
    """A classic session on all cores, intermediates in a folder."""
    return {
        "spark": SparkResource.configure_at_launch(master="local[*]"),
        "execution": ExecutionConfig(),
        "intermediates": IntermediatesResource.configure_at_launch(path=".dagster_unified/intermediates"),
    }


def cluster() -> dict[str, Any]:
    """A Spark Connect server at SPARK_REMOTE (`sc://host:port`), intermediates in the bucket at UNIFIED_STORAGE."""
    return {
        "spark": SparkResource(remote=EnvVar("SPARK_REMOTE")),
        "execution": ExecutionConfig(),
        "intermediates": IntermediatesResource(path=EnvVar("UNIFIED_STORAGE")),
    }
