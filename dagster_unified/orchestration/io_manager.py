"""The IO manager of intermediates. A stage commits its output itself, and looks its inputs up itself, since it may have to go further up."""

from __future__ import annotations

from typing import Any

from dagster import AssetKey, ConfigurableIOManager, InputContext, OutputContext
from pydantic import Field

from dagster_unified.engine.batch.store import IntermediateStore


class IntermediateIOManager(ConfigurableIOManager):
    """Keeps intermediates below `path`, a folder or a URL."""

    path: str = Field(default=".dagster_unified/intermediates", description="Where intermediates are kept: a folder, or a URL such as s3://bucket/folder.")

    def store(self) -> IntermediateStore:
        """The store."""
        return IntermediateStore(self.path)

    def handle_output(self, context: OutputContext, obj: Any) -> None:
        """Nothing is left to do: a stage's manifest is its commit."""

    def load_input(self, context: InputContext) -> AssetKey:
        """The upstream asset's key: it makes Dagster run the upstream stage first."""
        return context.asset_key
