"""The Dagster face: a pipeline's stages as assets, in one asset job, configured at launch by the option keys."""

from dagster_unified.orchestration.checks import Checks, Parity
from dagster_unified.orchestration.definitions import unified_definitions
from dagster_unified.orchestration.deployments import BatchDeployment, StreamingDeployment
from dagster_unified.orchestration.janitor import Retention
from dagster_unified.orchestration.module_assets import unified_assets, unified_resources
from dagster_unified.orchestration.resources import (
    ExecutionConfig,
    IntermediatesResource,
    KafkaResource,
    ObjectStore,
    PostgresResource,
    SparkResource,
    process_executor,
)
from dagster_unified.orchestration.schedules import BatchSchedule
from dagster_unified.orchestration.translator import (
    Input,
    Malformed,
    Part,
    PipelineTranslator,
    Savepoints,
    Stage,
    Stream,
    Table,
)

__all__ = [
    "BatchDeployment",
    "BatchSchedule",
    "Checks",
    "ExecutionConfig",
    "Input",
    "IntermediatesResource",
    "KafkaResource",
    "Malformed",
    "ObjectStore",
    "Parity",
    "Part",
    "PipelineTranslator",
    "PostgresResource",
    "Retention",
    "Savepoints",
    "SparkResource",
    "Stage",
    "Stream",
    "StreamingDeployment",
    "Table",
    "process_executor",
    "unified_assets",
    "unified_definitions",
    "unified_resources",
]
