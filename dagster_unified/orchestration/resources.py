"""The resources of a deployment: a Spark session, and the option keys as launch-time configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

from dagster import ConfigurableResource, InitResourceContext
from pydantic import Field, PrivateAttr, create_model

from dagster_unified import settings
from dagster_unified.engine import connect_server, session
from dagster_unified.engine.addresses import BUSY_PATIENCE
from dagster_unified.errors import ConfigurationError
from dagster_unified.graph.options import OPTIONS, Configuration, Layer, option

if TYPE_CHECKING:
    from dagster_pyspark import PySparkResource
    from pyspark.sql import SparkSession


class SparkResource(ConfigurableResource):  # type: ignore[type-arg]
    """A Spark session: classic on `master`, or Spark Connect at `remote`. Started by the first stage that needs it."""

    master: str = Field(
        default="local[*]", description="The master of a classic session, such as local[2] or spark://host:7077."
    )
    remote: Optional[str] = Field(
        default=None,
        description="The address of a Spark Connect server, such as sc://host:15002; used instead of `master`.",
    )
    connect: Optional[int] = Field(
        default=None,
        description=(
            "A port on this machine: the Spark Connect server there, started on `master` where there is none, is shared"
            " by all runs and steps."
        ),
    )
    config: dict[str, str] = Field(default={}, description="Further Spark configuration.")
    environment: Optional[str] = Field(
        default=None,
        description=(
            "A packed Python environment for the workers of a cluster, such as tar makes of a virtual environment, or"
            " conda-pack: a .tar.gz file, on this machine or at an address that Spark reads."
        ),
    )

    _run: Optional[str] = PrivateAttr(default=None)

    def setup_for_execution(self, context: InitResourceContext) -> None:
        """The steps of a run share a session of a server that is started on demand; its Python workers stay warm."""
        self._run = context.run.run_id if context.run is not None else None

    @property
    def spark_session(self) -> SparkSession:
        """The running session, or a new one.

        The name is that of dagster-pyspark's `PySparkResource`, so that an asset takes either.
        """
        if self.connect is None:
            return session.start(self.master, self.remote, self.config, environment=self.environment)
        if self.remote is not None:
            raise ConfigurationError(
                "the resource 'spark' has both remote, a Spark Connect server that is there, and connect, one to start"
                " on demand; give one of them"
            )
        return session.start(
            remote=connect_server.ensure(self.connect, self.master, self.config, self.environment),
            session_id=self._run,
            patience=BUSY_PATIENCE,
        )


def session_of(resource: SparkResource | PySparkResource) -> SparkSession:
    """Return the session of the resource `spark`, with what results rely on set in it."""
    found: SparkSession | None = getattr(resource, "spark_session", None)
    if found is None:
        raise ConfigurationError(
            f"the resource 'spark' is a {type(resource).__name__}; give a SparkResource, or dagster-pyspark's"
            " PySparkResource"
        )
    return found if isinstance(resource, SparkResource) else session.prepared(found)


class _Execution(ConfigurableResource):  # type: ignore[type-arg]
    """The execution configuration of a run: its fields are the option keys.

    What is not set follows from the pipeline and its mode. Raises `ConfigurationError` for what is no option.
    """

    def __init__(self, **data: Any) -> None:
        for key in data:
            option(key)
        super().__init__(**data)

    def launched(self) -> Layer:
        """The options that were set at launch."""
        given = {field.alias: getattr(self, name) for name, field in type(self).model_fields.items() if field.alias}
        return Layer("launch", {str(key): value for key, value in given.items() if value is not None})


def batch_configuration(*launched: Layer) -> Configuration:
    """The options of `<pipeline>_batch`.

    Its sources and the launch say which mode it runs in. A mode in the environment or the file is for the command line,
    which chooses the job by it.
    """
    return Configuration([*launched, Layer("job", {"execution.runtime-mode": "AUTOMATIC"}), *settings.shared_layers()])


_TYPES: dict[str, Any] = {"bool": Optional[bool], "count": Optional[int], "size": Optional[int]}

ExecutionConfig: type[_Execution] = create_model(
    "ExecutionConfig",
    __base__=_Execution,
    **{
        o.key.replace(".", "_").replace("-", "_"): (
            _TYPES.get(o.kind, Optional[str]),
            Field(default=None, alias=o.key, description=o.description),
        )
        for o in OPTIONS
    },  # type: ignore[call-overload]
)
"""`ExecutionConfig(**{"execution.runtime-mode": "BATCH"})`; in the launchpad, a field for every option key."""
