"""`UnifiedPipelineComponent`: a pipeline and its deployments as a component for `dg`, declared in a `defs.yaml`."""

# No `from __future__ import annotations` here: Dagster reads the annotations of a component's fields as objects.
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from dagster import (
    AssetKey,
    BackfillPolicy,
    Component,
    ComponentLoadContext,
    ComponentTypeSpec,
    Definitions,
    PartitionsDefinition,
    ResolutionContext,
    Resolvable,
    Resolver,
    Scaffolder,
    ScaffoldRequest,
    in_process_executor,
    scaffold_with,
)
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from dagster_unified.api.pipeline import Pipeline
from dagster_unified.errors import ConfigurationError, nearest
from dagster_unified.graph.options import Option
from dagster_unified.orchestration._dagster_compat import (
    BACKFILL_POLICY_MODEL,
    PARTITIONS_MODEL,
    CoercibleToAssetDep,
    resolve_backfill_policy,
    resolve_partitions_def,
    scaffold_component,
)
from dagster_unified.orchestration.checks import Checks
from dagster_unified.orchestration.definitions import unified_definitions
from dagster_unified.orchestration.deployments import BatchDeployment, StreamingDeployment
from dagster_unified.orchestration.janitor import Retention
from dagster_unified.orchestration.schedules import BatchSchedule
from dagster_unified.records import type_name
from dagster_unified.templates import pipeline_over_literals

Wanted = TypeVar("Wanted")


def load_object(reference: str, wanted: type[Wanted], what: str) -> Wanted:
    """Import `module:attribute`; raises `ConfigurationError` where there is none, or one of another type."""
    module_name, _, attribute = reference.partition(":")
    if not module_name or not attribute:
        raise ConfigurationError(
            f"{what}: expected module:attribute, such as my_project.shops:{what}, and not {reference!r}"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports one that is not
        raise ConfigurationError(
            f"{what}: {reference!r} names a module that is not there; give it in full, such as my_project.shops"
        ) from error
    value = getattr(module, attribute, None)
    if isinstance(value, wanted):
        return value
    names = [name for name, value in vars(module).items() if isinstance(value, wanted)]
    raise ConfigurationError(
        f"{what}: {module_name} has no {wanted.__name__} '{attribute}'{nearest(attribute, names)}; it has"
        f" {', '.join(names) or 'none'}"
    )


def _pipeline(_: ResolutionContext, reference: str) -> Pipeline:
    return load_object(reference, Pipeline, "pipeline")


def _partitions(context: ResolutionContext, value: object) -> PartitionsDefinition[str] | None:
    if not isinstance(value, str):
        return resolve_partitions_def(context, value)
    loaded: PartitionsDefinition[str] = load_object(value, PartitionsDefinition, "partitions")  # type: ignore[type-abstract]
    return loaded


def _duration(context: ResolutionContext, text: str | None) -> timedelta | None:
    parsed: timedelta | None = Option("a duration", "duration", None, "").parse(text) if text is not None else None
    return parsed


def _length(description: str, example: str) -> Resolver:
    return Resolver(_duration, model_field_type=str, description=description, examples=[example])


def _length_or_none(description: str, example: str) -> Resolver:
    return Resolver(_duration, model_field_type=str | None, description=description, examples=[example])


def _plain(description: str, *examples: object) -> Resolver:
    resolver: Resolver = Resolver.default(description=description, examples=list(examples) or None)
    return resolver


def _checked(kind: Any, description: str, *examples: object) -> Resolver:
    """Resolve a value of a plain type. A template gives text, such as `false` from an environment variable."""
    read = TypeAdapter(kind)

    def resolve(_: ResolutionContext, value: object) -> object:
        try:
            return read.validate_python(value)
        except ValidationError:
            raise ConfigurationError(f"expected {type_name(kind)}, and not {value!r}") from None

    return Resolver(resolve, model_field_type=kind | str, description=description, examples=list(examples) or None)


def _nested(kind: type[Resolvable], description: str) -> Resolver:
    """Resolve nested attributes. Dagster lets a text pass in their place, as one of a template."""

    def resolve(context: ResolutionContext, attributes: BaseModel | str | None) -> object:
        if isinstance(attributes, str):
            known = ", ".join(kind.model().model_fields)
            raise ConfigurationError(f"expected attributes, some of {known}, and not {attributes!r}")
        return None if attributes is None else kind.resolve_from_model(context, attributes)

    return Resolver(resolve, model_field_type=kind.model() | None, description=description)


def _backfill_policy(context: ResolutionContext, value: object) -> BackfillPolicy | None:
    if isinstance(value, str):
        raise ConfigurationError(f"backfill_policy: expected attributes, such as {{type: single_run}}, not {value!r}")
    return resolve_backfill_policy(context, value)


def _upstream(_: ResolutionContext, assets: Mapping[str, str] | str) -> Mapping[str, CoercibleToAssetDep]:
    if isinstance(assets, str):
        raise ConfigurationError(
            f"upstream: expected assets by sources, such as {{sales: exports/sales}}, not {assets!r}"
        )
    return {source: AssetKey.from_user_string(asset) for source, asset in assets.items()}


Options: TypeAlias = Annotated[
    Mapping[str, str | int | float | bool],
    _checked(
        dict[str, str | int | float | bool],
        "Option keys and values.",
        {"execution.checkpointing.dir": "/data/checkpoints"},
    ),
]

Upstream: TypeAlias = Annotated[
    Mapping[str, CoercibleToAssetDep],
    Resolver(
        _upstream,
        model_field_type=Mapping[str, str],
        description="Your own assets, by the names of the sources that read them.",
        examples=[{"sales": "exports/sales"}],
    ),
]


@dataclass(frozen=True)
class Schedule(Resolvable):
    """When the pipeline runs in BATCH."""

    offset: Annotated[timedelta, _length("How long after the end of a partition it runs.", "2 h")] = timedelta(0)
    catch_up: Annotated[
        int, _checked(int, "How many of the partitions before that one a tick runs where they are missing.")
    ] = 0
    retries: Annotated[int | None, _checked(int | None, "How often Dagster executes a failed run again.")] = None
    cron: Annotated[
        str | None,
        _plain(
            "When it runs; for a pipeline without partitions in time, or whose partitions have a cron of their own.",
            "0 3 * * *",
        ),
    ] = None
    running: Annotated[bool, _checked(bool, "Whether the schedule is on unless somebody turns it off.")] = False


@dataclass(frozen=True)
class Kept(Resolvable):
    """Which intermediates are kept."""

    max_age: Annotated[
        timedelta | None, _length_or_none("How long intermediates that nobody needs are kept.", "7 d")
    ] = timedelta(days=7)
    max_bytes: Annotated[int | None, _checked(int | None, "How many bytes of them are kept at most.")] = 100_000_000_000
    failed_for: Annotated[timedelta, _length("How long those of a failed run are kept.", "3 d")] = timedelta(days=3)
    cron: Annotated[str, _plain("When the janitor runs.")] = "30 3 * * *"
    running: Annotated[bool, _checked(bool, "Whether its schedule is on unless somebody turns it off.")] = True


@dataclass(frozen=True)
class SinkChecks(Resolvable):
    """Which checks the assets of the sinks get."""

    columns: Annotated[bool, _checked(bool, "Compare the columns of a table with its record type.")] = True
    unique_keys: Annotated[bool, _checked(bool, "Check the keys of upserted tables.")] = True
    rows_within: Annotated[
        float | None,
        _checked(float | None, "By which part a row count of BATCH may differ from the median of those before.", 0.5),
    ] = None
    history: Annotated[int, _checked(int, "How many row counts to compare with.")] = 10
    fresh_within: Annotated[
        timedelta | None,
        _length_or_none("How old the last materialization may be, or the last rows of a stream.", "1 d"),
    ] = None
    blocking: Annotated[bool, _checked(bool, "Whether a failed check stops the assets after it.")] = False

    def declared(self) -> Checks:
        """Declare the same in Python."""
        values = _values(self)
        return Checks(schema=values.pop("columns"), **values)


@dataclass(frozen=True)
class Batch(Resolvable):
    """How the pipeline runs in BATCH: see `BatchDeployment`."""

    partitions: Annotated[
        PartitionsDefinition[str] | None,
        Resolver(
            _partitions,
            model_field_type=PARTITIONS_MODEL,
            description="Dagster's partitions, in its own attributes, or module:attribute of a PartitionsDefinition.",
            examples=[
                {"type": "daily", "start_date": "2024-01-01", "timezone": "America/New_York"},
                "my_project.partitions:DAYS",
            ],
        ),
    ] = None
    timezone: Annotated[str | None, _plain("The time zone of partitions that name none.", "Europe/Vienna")] = None
    backfill_policy: Annotated[
        BackfillPolicy | None,
        Resolver(
            _backfill_policy,
            model_field_type=BACKFILL_POLICY_MODEL,
            description="How many partitions a backfill gives to one run.",
        ),
    ] = None
    carry_state: Annotated[
        bool, _checked(bool, "Start each partition from the keyed state that the one before it left.")
    ] = False
    reuse: Annotated[
        Literal["never", "fingerprint"],
        _plain("With fingerprint, a stage that would give the same again does not run."),
    ] = "never"
    upstream: Upstream = field(default_factory=dict)
    schedule: Annotated[Schedule | None, _nested(Schedule, "When it runs.")] = None
    retention: Annotated[
        Kept | None, _nested(Kept, "Which intermediates are kept; null keeps all. Without it, the defaults below.")
    ] = field(default_factory=Kept)
    checks: Annotated[SinkChecks | None, _nested(SinkChecks, "Which checks the assets of the sinks get.")] = None
    pool: Annotated[str | None, _plain("The concurrency pool of the stages.")] = None
    options: Options = field(default_factory=dict)

    def deployment(self, pipeline: Pipeline) -> BatchDeployment:
        """Declare the same in Python."""
        return BatchDeployment(
            pipeline,
            **{
                **_values(self),
                "schedule": self.schedule and BatchSchedule(**_values(self.schedule)),
                "retention": self.retention and Retention(**_values(self.retention)),
                "checks": self.checks and self.checks.declared(),
            },
        )


@dataclass(frozen=True)
class Streaming(Resolvable):
    """How the pipeline is kept running in STREAMING: see `StreamingDeployment`."""

    state: Annotated[Literal["running", "suspended"], _plain("Whether it is to run before anybody says otherwise.")] = (
        "running"
    )
    upgrade_mode: Annotated[
        Literal["stateless", "last-state", "savepoint"],
        _plain("How new code starts: without state, from the last state, or from it with a savepoint kept."),
    ] = "last-state"
    from_savepoint: Annotated[
        str | None, _plain("The savepoint that a job without state starts from.", "/data/savepoints/2024")
    ] = None
    restart_strategy: Annotated[
        Literal["none", "fixed-delay", "exponential-delay", "failure-rate"] | None,
        _plain("When it is started again after a failure."),
    ] = None
    options: Options = field(default_factory=dict)
    start_when: Annotated[
        Literal["always", "files"], _plain("With files, it is started when files have arrived since it last ran.")
    ] = "always"
    stall_after: Annotated[timedelta, _length("How long one epoch may take before the job is replaced.", "10 min")] = (
        timedelta(minutes=10)
    )
    observe_every: Annotated[timedelta, _length("How often the assets of the sinks are observed.", "30 s")] = timedelta(
        seconds=30
    )
    tick_every: Annotated[timedelta, _length("How often the sensor looks.", "30 s")] = timedelta(seconds=30)
    upstream: Upstream = field(default_factory=dict)
    checks: Annotated[SinkChecks | None, _nested(SinkChecks, "Which checks the assets of the sinks get.")] = None

    def deployment(self, pipeline: Pipeline) -> StreamingDeployment:
        """Declare the same in Python."""
        return StreamingDeployment(pipeline, **{**_values(self), "checks": self.checks and self.checks.declared()})


class ScaffoldParams(BaseModel):
    """The parameters of `dg scaffold defs`."""

    pipeline: str | None = Field(
        default=None,
        description="The pipeline as module:attribute; without it, an example is written next to the defs.yaml.",
    )


class PipelineScaffolder(Scaffolder[ScaffoldParams]):
    """Writes a `defs.yaml` and, where no pipeline is named, a small pipeline next to it."""

    @classmethod
    def get_scaffold_params(cls) -> type[ScaffoldParams]:
        return ScaffoldParams

    def scaffold(self, request: ScaffoldRequest[ScaffoldParams]) -> None:
        reference = request.params.pipeline
        if reference is None:
            (request.target_path / "pipeline.py").write_text(pipeline_over_literals(request.target_path.name))
            reference = f"{_module_of(request)}.pipeline:pipeline"
        scaffold_component(request, {"pipeline": reference})


@scaffold_with(PipelineScaffolder)
@dataclass
class UnifiedPipelineComponent(Component, Resolvable):
    """A dagster-unified pipeline: its stages as assets in BATCH, a job that a sensor keeps running in STREAMING.

    Without `batch` and `streaming` the pipeline has the defaults: of `batch` where its sources are bounded, else of
    `streaming`. The page *Coming from Dagster* has an example of a `defs.yaml`.
    """

    pipeline: Annotated[
        Pipeline,
        Resolver(
            _pipeline,
            model_field_type=str,
            description="The pipeline, as module:attribute.",
            examples=["my_project.shops:pipeline"],
        ),
    ]
    batch: Annotated[Batch | None, _nested(Batch, "How it runs in BATCH.")] = None
    streaming: Annotated[Streaming | None, _nested(Streaming, "How it is kept running in STREAMING.")] = None
    executor: Annotated[
        Literal["in_process", "project"],
        _checked(
            Literal["in_process", "project"],
            "What executes its stages: one process, with one Spark session, or the executor of your project.",
        ),
    ] = "in_process"
    project_resources: Annotated[
        list[Literal["spark", "execution", "intermediates"]],
        _checked(
            list[Literal["spark", "execution", "intermediates"]],
            "Which of these resources the definitions of your project give. The others have their defaults.",
            ["spark", "intermediates"],
        ),
    ] = field(default_factory=list)

    @classmethod
    def get_spec(cls) -> ComponentTypeSpec:
        return ComponentTypeSpec(
            produces=["asset", "asset_check", "job", "schedule", "sensor", "resource"],
            tags=["spark", "dagster-unified"],
        )

    @classmethod
    def load(cls, attributes: BaseModel | None, context: ComponentLoadContext) -> Self:
        """Make the component of its attributes."""
        if attributes is None:
            raise ConfigurationError(
                "there are no attributes; give at least pipeline, as module:attribute, such as my_shops.sales:pipeline"
            )
        return super().load(attributes, context)

    def build_defs(self, context: ComponentLoadContext) -> Definitions:
        """Build the definitions of the pipeline."""
        modes = [mode for mode in (self.batch, self.streaming) if mode is not None]
        declared = [mode.deployment(self.pipeline) for mode in modes]
        return unified_definitions(
            *declared,
            *([] if declared else [self.pipeline]),
            resources=dict.fromkeys(self.project_resources),
            executor=in_process_executor if self.executor == "in_process" else None,
        )


def _module_of(request: ScaffoldRequest[ScaffoldParams]) -> str:
    root = request.project_root or Path.cwd()
    place = request.target_path.absolute().relative_to(root.absolute())
    return ".".join(part for number, part in enumerate(place.parts) if number or part != "src")


def _values(attributes: Batch | Streaming | Schedule | Kept | SinkChecks) -> dict[str, Any]:
    return {field.name: getattr(attributes, field.name) for field in fields(attributes)}
