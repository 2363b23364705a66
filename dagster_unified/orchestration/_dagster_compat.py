"""Everything that the library uses of Dagster beyond its public names, in one place, for an upgrade to look at.

`tests/orchestration/test_dagster_compat.py` asserts that each name is there; `pyproject.toml` bounds Dagster's version.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dagster import (
    AssetExecutionContext,
    BetaWarning,
    DagsterError,
    DagsterInstance,
    DagsterInvariantViolationError,
    InitResourceContext,
    InputContext,
    IOManager,
    IOManagerDefinition,
    ResourceDefinition,
    SupersessionWarning,
)
from dagster import __version__ as dagster_version
from dagster._core.definitions.asset_selection import KeysAssetSelection
from dagster._core.definitions.assets.definition.asset_dep import CoercibleToAssetDep
from dagster._core.definitions.assets.graph.base_asset_graph import BaseAssetGraph
from dagster._core.definitions.declarative_automation.operators import AllDepsCondition
from dagster._core.definitions.declarative_automation.operators.utils import has_allow_ignore
from dagster._core.definitions.metadata.metadata_value import ObjectMetadataValue
from dagster._core.definitions.partitions.schedule_type import ScheduleType
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition
from dagster._core.errors import DagsterExecutionInterruptedError
from dagster._core.execution.backfill import BulkActionsFilter, BulkActionStatus
from dagster._core.execution.stats import StepEventStatus
from dagster._core.storage.partition_status_cache import AssetPartitionStatus
from dagster._core.storage.tags import (
    ASSET_PARTITION_RANGE_END_TAG,
    ASSET_PARTITION_RANGE_START_TAG,
    BACKFILL_ID_TAG,
    PARTITION_NAME_TAG,
    REPOSITORY_LABEL_TAG,
    WILL_RETRY_TAG,
)
from dagster.components.component_scaffolding import scaffold_component
from dagster.components.resolved.core_models import (
    DailyPartitionsDefinitionModel,
    HourlyPartitionsDefinitionModel,
    MultiRunBackfillPolicyModel,
    SingleRunBackfillPolicyModel,
    StaticPartitionsDefinitionModel,
    TimeWindowPartitionsDefinitionModel,
    WeeklyPartitionsDefinitionModel,
    resolve_backfill_policy,
    resolve_partitions_def,
)
from dagster.components.utils.translation import TranslationFn, TranslationFnResolver
from dagster_shared.error import SerializableErrorInfo

if TYPE_CHECKING:
    from dagster._core.workspace.context import WorkspaceRequestContext

__all__ = [
    "ASSET_PARTITION_RANGE_END_TAG",
    "ASSET_PARTITION_RANGE_START_TAG",
    "BACKFILL_ID_TAG",
    "BACKFILL_POLICY_MODEL",
    "PARTITIONS_MODEL",
    "PARTITION_NAME_TAG",
    "REPOSITORY_LABEL_TAG",
    "STORAGE_MODULE",
    "WILL_RETRY_TAG",
    "AllDepsCondition",
    "AssetPartitionStatus",
    "BaseAssetGraph",
    "BulkActionStatus",
    "BulkActionsFilter",
    "CheckedIOManagerDefinition",
    "CoercibleToAssetDep",
    "DagsterExecutionInterruptedError",
    "KeysAssetSelection",
    "ObjectMetadataValue",
    "ScheduleType",
    "SerializableErrorInfo",
    "StepEventStatus",
    "StepInterruptedError",
    "TranslationFn",
    "TranslationFnResolver",
    "UnresolvedAssetJobDefinition",
    "has_allow_ignore",
    "has_partitions",
    "is_of_range",
    "resolve_backfill_policy",
    "resolve_partitions_def",
    "scaffold_component",
    "without_warning",
    "workspace",
]

STORAGE_MODULE = "dagster._core.storage.sqlite_storage"
"""What every storage of Dagster's is made of."""


PARTITIONS_MODEL = (
    HourlyPartitionsDefinitionModel
    | DailyPartitionsDefinitionModel
    | WeeklyPartitionsDefinitionModel
    | TimeWindowPartitionsDefinitionModel
    | StaticPartitionsDefinitionModel
)
"""The attributes of partitions in a `defs.yaml`, as those of Dagster's own components."""

BACKFILL_POLICY_MODEL = SingleRunBackfillPolicyModel | MultiRunBackfillPolicyModel


class StepInterruptedError(DagsterError, DagsterExecutionInterruptedError):
    """Ends a step, and its run, since the process was asked to stop.

    A step with a retry policy is tried again after a plain `DagsterExecutionInterruptedError`. A `DagsterError` passes
    by the policy; being an interruption as well, this one then ends the run, with no further step.
    """


# Dagster's multiprocess executor knows an interrupted step by the name of its error.
StepInterruptedError.__name__ = DagsterExecutionInterruptedError.__name__


class CheckedIOManagerDefinition(IOManagerDefinition):
    """An IO manager that `check` compares with all resources of a code location when its definitions load.

    Dagster's own error for a resource that another one requires says neither what for nor what to do.
    """

    def __init__(
        self,
        resource_fn: Callable[[InitResourceContext], IOManager],
        required: AbstractSet[str],
        check: Callable[[Mapping[str, object]], object],
        description: str,
    ) -> None:
        super().__init__(resource_fn, required_resource_keys=set(required), description=description)
        self._check = check

    def get_required_resource_keys(self, resource_defs: Mapping[str, ResourceDefinition]) -> AbstractSet[str]:
        """Return the keys of the resources that it requires; Dagster asks while definitions load."""
        self._check(resource_defs)
        return super().get_required_resource_keys(resource_defs)


def has_partitions(context: AssetExecutionContext, name: str) -> bool:
    """Whether the asset of an input has partitions; the public methods raise where it has none."""
    return bool(context.get_step_execution_context().has_asset_partitions_for_input(name))


def is_of_range(context: InputContext) -> bool:
    """Whether a run of several partitions loads an input; `InputContext` tells it of one partition only."""
    try:
        step = context.step_context
    except DagsterInvariantViolationError:  # no run loads it
        return False
    return step.has_partition_key_range


@contextmanager
def without_warning(subject: str) -> Iterator[None]:
    """Keep Dagster from warning about the library's own use of what is in beta or superseded."""
    with warnings.catch_warnings():
        for category in (BetaWarning, SupersessionWarning):
            warnings.filterwarnings("ignore", message=rf"\w+ `{subject}`", category=category)
        yield


@contextmanager
def workspace(instance: DagsterInstance, module: str) -> Iterator[WorkspaceRequestContext]:
    """The code locations of the workspace in this folder, as `dagster sensor start` loads them.

    Without a workspace: that of a module or a Python file, as `dagster dev -m` and `-f` load it.
    """
    from click import UsageError
    from dagster._cli.workspace.cli_target import get_workspace_from_cli_opts, workspace_opts_to_load_target
    from dagster_shared.cli import WorkspaceOpts

    opts = WorkspaceOpts()
    try:
        workspace_opts_to_load_target(opts)
    except UsageError:
        opts = WorkspaceOpts(python_file=[module]) if module.endswith(".py") else WorkspaceOpts(module_name=[module])
    with get_workspace_from_cli_opts(instance, dagster_version, opts, log_level="ERROR") as loaded:
        yield loaded
