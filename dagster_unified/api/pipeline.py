"""`Pipeline`: what an author starts from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dagster_unified.api.building import NOT_GIVEN, GraphBuilder
from dagster_unified.api.stream import DataStream
from dagster_unified.connectors.collection import CollectionSource, records_of, type_of
from dagster_unified.errors import PipelineError
from dagster_unified.graph.connectors import Source, check_is_one
from dagster_unified.graph.nodes import Naming, SourceNode
from dagster_unified.operators.failures import placed
from dagster_unified.operators.functions.type_variables import T

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from typing_extensions import TypeForm

    from dagster_unified.api.watermarks import WatermarkStrategy
    from dagster_unified.execution import JobHandle


class Pipeline(GraphBuilder):
    """A named dataflow program. The name becomes part of asset keys and storage paths: letters, digits and `_`.

    It does not say in which mode it runs: that is chosen at launch (`execution.runtime-mode`).
    """

    def from_source(
        self,
        source: Source[T],
        watermark_strategy: WatermarkStrategy[T] | None = None,
        source_name: str | None = None,
    ) -> DataStream[T]:
        """A stream of a source's records, with event times where a strategy is given."""
        try:
            check_is_one(source, Source, "source")
        except PipelineError as error:
            raise PipelineError(f"{self.name}: from_source: {error}") from None
        naming = Naming.AUTHOR if source_name else Naming.SOURCE
        node = self._add(
            SourceNode, [], source_name or source.name, naming=naming, records=source.records, source=source
        )
        stream: DataStream[T] = DataStream(self, node.id)
        return stream if watermark_strategy is None else stream.assign_timestamps_and_watermarks(watermark_strategy)

    def from_collection(
        self,
        collection: Iterable[T],
        type_info: TypeForm[T] = NOT_GIVEN,
        name: str = "collection",
    ) -> DataStream[T]:
        """A bounded stream of the given records; `type_info` is their type, by default that of the first record.

        Examples:
            >>> collect(Pipeline("words").from_collection(["a", "b"]).map(str.upper, str))
            ['A', 'B']
        """
        try:
            records = records_of(collection, type_info)
            if type_info is None and not records:
                raise PipelineError("an empty collection has no type; give type_info=")
            type_info = type_of(records[0]) if type_info is None else type_info
        except PipelineError as error:
            raise PipelineError(f"{self.name}: source '{name}': {error}") from None
        with placed(self.name):
            source = CollectionSource(records, type_info, name)
        return self.from_source(source)

    def execute(
        self,
        options: Mapping[str, Any] | None = None,
        *,
        spark: SparkSession | None = None,
        master: str = "local[*]",
        storage: str | None = None,
        progress: bool | None = None,
        resources: Mapping[str, object] | None = None,
    ) -> JobHandle:
        """Starts the pipeline in a thread of this process, without Dagster.

        Returns at once with a handle on the job.

        In BATCH the stages run one after another, with no retries; in STREAMING the job runs until its input has ended
        or it is cancelled, and goes on from its checkpoint the next time. Once its input has ended it is finished, and
        the next time begins anew, as in BATCH, with all of the input and without state. PyFlink:
        `StreamExecutionEnvironment.execute_async`.

        `options` are option keys to values; the environment and `dagster-unified.toml` count as well. `spark` is a
        session that runs already; without it one is started on `master`, and stays for the next job. `storage` is where
        intermediates are kept; without it they go with the job. `progress` shows what runs on standard error, by
        default on a terminal and in a notebook. `resources` has, by its key, what each `ResourceKey` of a source or a
        sink stands for.

        Raises `PipelineError` and `ConfigurationError` before anything runs; what fails later is raised by the handle's
        `result()`. A program that ends before waits for the job; where the job then fails, the program says why, and
        ends with 1.
        """
        from dagster_unified.execution import Environment, execute

        return execute(self.graph(), options, Environment(spark, master, storage, resources or {}), progress)
