"""The resources of a deployment: a Spark session, and the option keys as launch-time configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Optional

from dagster import ConfigurableResource, ExecutorDefinition, InitResourceContext, multiprocess_executor
from pydantic import Field, PrivateAttr, create_model

from dagster_unified import settings
from dagster_unified.connectors.kafka.connection import KafkaConnection
from dagster_unified.connectors.secrets import deferred, resolved
from dagster_unified.connectors.sql.postgres.connection import PostgresConnection
from dagster_unified.engine import connect_server, session
from dagster_unified.engine.batch.intermediates import IntermediateStore
from dagster_unified.engine.session import BUSY_PATIENCE
from dagster_unified.errors import ConfigurationError
from dagster_unified.graph.options import OPTIONS, Configuration, Layer, option
from dagster_unified.orchestration._dagster_compat import STORAGE_MODULE
from dagster_unified.storage import object_store

if TYPE_CHECKING:
    import psycopg
    from confluent_kafka import Consumer, Producer
    from dagster_pyspark import PySparkResource
    from pyspark.sql import SparkSession

    from dagster_unified.graph.nodes import Graph


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
    running: SparkSession | None = getattr(resource, "spark_session", None)
    if running is None:
        raise ConfigurationError(
            f"the resource 'spark' is a {type(resource).__name__}; give a SparkResource, or dagster-pyspark's"
            " PySparkResource"
        )
    return running if isinstance(resource, SparkResource) else session.prepared(running)


class _Execution(ConfigurableResource):  # type: ignore[type-arg]
    """The execution configuration of a run: its fields are the option keys.

    What is not set follows from the pipeline and its mode. Raises `ConfigurationError` for what is no option.
    """

    def __init__(self, **data: Any) -> None:
        for key in data:
            option(key)
        super().__init__(**data)

    def launched(self) -> Layer:
        values = {field.alias: getattr(self, name) for name, field in type(self).model_fields.items() if field.alias}
        return Layer("launch", {str(key): value for key, value in values.items() if value is not None})


def connections(graph: Graph, resources: object) -> dict[str, object]:
    """Return what sources and sinks connect by, of the resources of a step, which requires them by their keys."""
    return {key: getattr(resources, key) for key in graph.resource_keys}


def batch_configuration(*launched: Layer) -> Configuration:
    """Return the options of `<pipeline>_batch`.

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


_PRELOADED = [
    "dagster_unified.orchestration",
    STORAGE_MODULE,
    "deltalake",
    "matplotlib.figure",
    "pyarrow.parquet",
    "pyspark.sql.connect.functions",
    "pyspark.sql.connect.session",
]
"""Modules that every step needs, and that take longer to import than most steps run. Missing ones are left out."""


def process_executor(max_concurrent: int = 2) -> ExecutorDefinition:
    """Execute each stage of a run in a process of its own, at most `max_concurrent` at once.

    Independent stages run in parallel, and one whose process dies takes no other with it. It needs a session that
    processes can share: `SparkResource(remote=…)` or `SparkResource(connect=…)`.

    It is Dagster's multiprocess executor, with processes that are forked from one which has imported the library.
    """
    return multiprocess_executor.configured(
        {"max_concurrent": max_concurrent, "start_method": {"forkserver": {"preload_modules": _PRELOADED}}}
    )


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


class KafkaResource(ConfigurableResource):  # type: ignore[type-arg]
    """How to reach a Kafka cluster. Give it to `KafkaSource` and `KafkaSink`, and to assets of your own.

    A field or an option may be an `EnvVar`, which is looked up where a client connects.

    Examples:
        >>> from dagster import EnvVar
        >>> kafka = KafkaResource(bootstrap_servers="broker:9092", options={"sasl.password": EnvVar("KAFKA_PASSWORD")})
        >>> kafka.connection()
        KafkaConnection(broker:9092, options sasl.password)
    """

    bootstrap_servers: str = Field(description="The brokers to ask first, such as one:9092,two:9092.")
    options: dict[str, str] = Field(
        default={}, description="Further options of librdkafka, such as security.protocol; an EnvVar keeps secrets out."
    )

    def connection(self) -> KafkaConnection:
        """Return the same for sinks and sources."""
        return KafkaConnection(self.bootstrap_servers, self.options)

    def get_producer(self, config: Mapping[str, Any] | None = None) -> Producer:
        """Return a producer of confluent-kafka, for an asset, with further options of librdkafka."""
        return self.connection().producer(config or {})

    def get_consumer(self, group: str, config: Mapping[str, Any] | None = None) -> Consumer:
        """A consumer of confluent-kafka in a consumer group, for an asset, with further options of librdkafka."""
        return self.connection().consumer({"group.id": group, **(config or {})})


class PostgresResource(ConfigurableResource):  # type: ignore[type-arg]
    """How to reach a PostgreSQL server. Give it to `PostgresSink` and `PostgresSource`, and to assets of your own.

    A field may be an `EnvVar`, which is looked up where a client connects.

    Examples:
        >>> from dagster import EnvVar
        >>> warehouse = PostgresResource(host="db.example", database="sales", password=EnvVar("DATABASE_PASSWORD"))
        >>> warehouse.connection()
        PostgresConnection(postgresql://db.example:5432/sales)
    """

    host: str = Field(default="localhost", description="The server's name or address.")
    port: int = Field(default=5432, description="The server's port.")
    database: Optional[str] = Field(default=None, description="The database.")
    user: Optional[str] = Field(default=None, description="The user to connect as.")
    password: Optional[str] = Field(default=None, description="The user's password; an EnvVar keeps it out of code.")
    options: dict[str, str] = Field(default={}, description="Further parameters of libpq, such as sslmode.")

    def connection(self) -> PostgresConnection:
        """Return the same for sinks and sources."""
        return PostgresConnection(
            host=self.host,
            port=self.port,
            database=self.database,
            user=self.user,
            password=self.password,
            options=self.options,
        )

    @contextmanager
    def get_connection(self) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
        """A psycopg connection, for an asset; committed at the end of the block, or rolled back after an error."""
        with self.connection().connect("resource") as connected:
            yield connected


OBJECT_STORE = "object_store"
"""The key of the resource that says where the buckets are; all that reads or writes there requires it."""


class ObjectStore(ConfigurableResource):  # type: ignore[type-arg]
    """The S3-compatible store of intermediates, checkpoints, savepoints and tables, for all that reads and writes them.

    It is the resource `object_store`, of a code location as a whole: give it to `unified_definitions`, or give that
    `{"object_store": None}`, and the store to the definitions that it is merged with. It sets the environment of the
    processes and Spark's settings for Hadoop's connector, so that sensors, runs and workers reach the store. What is
    left out is what the machine has. Dagster shows what is written here: give secrets as `EnvVar`.

    A process has one store. Raises `ConfigurationError` where it uses another one already.
    """

    endpoint: str | None = Field(
        default=None, description="The URL of a store other than Amazon's, such as https://minio.example.com."
    )
    region: str | None = Field(default=None, description="The region, such as eu-central-1.")
    key: str | None = Field(default=None, description="The access key's id.")
    secret: str | None = Field(default=None, description="The secret access key: an EnvVar.")
    token: str | None = Field(default=None, description="The token of temporary credentials: an EnvVar.")

    def setup_for_execution(self, context: InitResourceContext) -> None:
        """Let the process of a run, a sensor or a check use the store."""
        self.use()

    def use(self) -> None:
        """Let this process use the store."""
        names = ("endpoint", "region", "key", "secret", "token")
        settings = {name: value for name in names if (value := getattr(self, name)) is not None}
        resolved_settings = {
            name: resolved(deferred(value), f"ObjectStore's {name}") for name, value in settings.items()
        }
        object_store.use(object_store.Store(**resolved_settings))
