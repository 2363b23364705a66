"""The resource that says where intermediates are kept.

It is no IO manager: a stage commits its output itself, by its manifest, and looks its inputs up itself, since it may
have to go further up.
"""

from __future__ import annotations

from dagster import ConfigurableResource
from pydantic import Field

from dagster_unified.engine.batch.intermediates.store import IntermediateStore
from dagster_unified.errors import ConfigurationError


class IntermediatesResource(ConfigurableResource):  # type: ignore[type-arg]
    """Keeps intermediates below `path`, a folder or a URL."""

    path: str = Field(
        default=".dagster_unified/intermediates",
        description="Where intermediates are kept: a folder, or a URL such as s3://bucket/folder.",
    )

    def store(self) -> IntermediateStore:
        """Open the store."""
        return IntermediateStore(self.path)


def store_of(resource: IntermediatesResource) -> IntermediateStore:
    """Open the store of the resource `intermediates`."""
    if not isinstance(resource, IntermediatesResource):
        raise ConfigurationError(
            f"the resource 'intermediates' is a {type(resource).__name__}; give an IntermediatesResource"
        )
    return resource.store()
