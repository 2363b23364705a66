"""`UnifiedPipelineComponent`: a pipeline and its deployments as a component for `dg`, declared in a `defs.yaml`."""

# No `from __future__ import annotations` here: Dagster reads the annotations of a component's fields as objects.
import importlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args, get_origin
from weakref import WeakKeyDictionary

from dagster import (
    AssetKey,
    AssetSpec,
    BackfillPolicy,
    Component,
    ComponentLoadContext,
    ComponentTree,
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
    TranslationFn,
    TranslationFnResolver,
    resolve_backfill_policy,
    resolve_partitions_def,
    scaffold_component,
)
from dagster_unified.orchestration.catalog import Catalog
from dagster_unified.orchestration.checks import Checks
from dagster_unified.orchestration.definitions import definitions_of
from dagster_unified.orchestration.deployed import by_pipeline
from dagster_unified.orchestration.deployments import BatchDeployment, StreamingDeployment
from dagster_unified.orchestration.janitor import Retention
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


def _duration(_: ResolutionContext, text: str | None) -> timedelta | None:
    parsed: timedelta | None = Option("a duration", "duration", None, "").parse(text) if text is not None else None
    return parsed


def _checked(kind: Any, description: str, *examples: object, called: str | None = None) -> Resolver:
    """Resolve a value of a plain type. A template gives text, such as `false` from an environment variable."""
    read = TypeAdapter(kind)

    def resolve(_: ResolutionContext, value: object) -> object:
        try:
            return read.validate_python(value)
        except ValidationError:
            raise ConfigurationError(f"expected {type_name(kind)}, and not {value!r}") from None

    return Resolver(
        resolve,
        model_field_name=called,
        model_field_type=kind | str,
        description=description,
        examples=list(examples) or None,
    )


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


@dataclass(frozen=True)
class Attributes(Resolvable):
    """The attributes of a `defs.yaml` for what is declared in Python by a dataclass, whose fields they are."""

    declares: ClassVar[Any]

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of that dataclass."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {
            name: value.declares(**value.arguments()) if isinstance(value, Attributes) else value
            for name, value in values
        }

    def deployment(self, pipeline: Pipeline) -> BatchDeployment | StreamingDeployment:
        """Declare the same in Python."""
        deployment: BatchDeployment | StreamingDeployment = self.declares(pipeline, **self.arguments())
        return deployment


def _attributes(name: str, declares: type, **described: Resolver | tuple[str, *tuple[object, ...]]) -> type[Attributes]:
    """The attributes for some fields of a dataclass: each with a resolver, or a description and examples.

    What is only described is resolved by its type, and what is left out has the dataclass's own default.
    """
    attributes: list[tuple[str, Any, Any]] = []
    for declared in fields(declares):
        if declared.name in described:
            said = described[declared.name]
            resolver = said if isinstance(said, Resolver) else _by_type(declared.type, *said)
            default = field(default=declared.default, default_factory=declared.default_factory)
            attributes.append((declared.name, Annotated[declared.type, resolver], default))
    return make_dataclass(name, attributes, bases=(Attributes,), frozen=True, namespace={"declares": declares})


def _by_type(kind: Any, description: str, *examples: object) -> Resolver:
    """Resolve a value by its type: lengths of time are texts such as `10 min`."""
    text = {timedelta: str, timedelta | None: str | None}.get(kind)
    if text is not None:
        return Resolver(_duration, model_field_type=text, description=description, examples=list(examples) or None)
    if kind in (str, str | None) or any(get_origin(part) is Literal for part in (kind, *get_args(kind))):
        plain: Resolver = Resolver.default(
            model_field_type=kind, description=description, examples=list(examples) or None
        )
        return plain
    return _checked(kind, description, *examples)


_OPTIONS = _checked(
    dict[str, str | int | float | bool],
    "Option keys and values.",
    {"execution.checkpointing.dir": "/data/checkpoints"},
)
_UPSTREAM = Resolver(
    _upstream,
    model_field_type=Mapping[str, str],
    description="Your own assets, by the names of the sources that read them.",
    examples=[{"sales": "exports/sales"}],
)

_PARTITIONS = Resolver(
    _partitions,
    model_field_type=PARTITIONS_MODEL,
    description="Dagster's partitions, in its own attributes, or module:attribute of a PartitionsDefinition.",
    examples=[
        {"type": "daily", "start_date": "2024-01-01", "timezone": "America/New_York"},
        "my_project.partitions:DAYS",
    ],
)


def _template(description: str, example: str) -> Resolver:
    """Resolve what only a template can give: an object of Dagster's."""
    resolver: Resolver = Resolver.default(model_field_type=str | None, description=description, examples=[example])
    return resolver


Schedule = _attributes(
    "Schedule",
    BatchSchedule,
    offset=("How long after the end of a partition it runs.", "2 h"),
    catch_up=("How many of the partitions before that one a tick runs where they are missing.",),
    retries=("How often Dagster executes a failed run again.",),
    cron=(
        "When it runs; for a pipeline without partitions in time, or whose partitions have a cron of their own.",
        "0 3 * * *",
    ),
    running=("Whether the schedule is on unless somebody turns it off.",),
)

Kept = _attributes(
    "Kept",
    Retention,
    max_age=("How long intermediates that nobody needs are kept.", "7 d"),
    max_bytes=("How many bytes of them are kept at most.",),
    failed_for=("How long those of a failed run are kept.", "3 d"),
    cron=("When the janitor runs.",),
    running=("Whether its schedule is on unless somebody turns it off.",),
)

SinkChecks = _attributes(
    "SinkChecks",
    Checks,
    # pydantic's models have a method `schema`
    schema=_checked(bool, "Compare the columns of a table with its record type.", called="columns"),
    unique_keys=("Check the keys of upserted tables.",),
    rows_within=("By which part a row count of BATCH may differ from the median of those before.", 0.5),
    history=("How many row counts to compare with.",),
    fresh_within=("How old the last materialization may be, or the last rows of a stream.", "1 d"),
    blocking=("Whether a failed check stops the assets after it.",),
)
_CHECKS = _nested(SinkChecks, "Which checks the assets of the sinks get.")

Batch = _attributes(
    "Batch",
    BatchDeployment,
    partitions=_PARTITIONS,
    timezone=("The time zone of partitions that name none.", "Europe/Vienna"),
    backfill_policy=Resolver(
        _backfill_policy,
        model_field_type=BACKFILL_POLICY_MODEL,
        description="How many partitions a backfill gives to one run.",
    ),
    carry_state=("Start each partition from the keyed state that the one before it left.",),
    reuse=("With fingerprint, a stage that would give the same again does not run.",),
    upstream=_UPSTREAM,
    schedule=_nested(Schedule, "When it runs."),
    automation_condition=_template(
        "Dagster's declarative automation of its assets.", "{{ dg.AutomationCondition.eager() }}"
    ),
    freshness_policy=_template(
        "The freshness policy of the tables.", "{{ dg.FreshnessPolicy.cron('0 6 * * *', datetime.timedelta(hours=1)) }}"
    ),
    retention=_nested(Kept, "Which intermediates are kept; null keeps all. Without it, the defaults below."),
    checks=_CHECKS,
    pool=("The concurrency pool of the stages.",),
    options=_OPTIONS,
)

Streaming = _attributes(
    "Streaming",
    StreamingDeployment,
    state=("Whether it is to run before anybody says otherwise.",),
    upgrade_mode=("How new code starts: without state, from the last state, or from it with a savepoint kept.",),
    from_savepoint=("The savepoint that a job without state starts from.", "/data/savepoints/2024"),
    restart_strategy=("When it is started again after a failure.",),
    options=_OPTIONS,
    start_when=_by_type(
        Literal["always", "files"], "With files, it is started when files have arrived since it last ran."
    ),
    stall_after=("How long one epoch may take before the job is replaced.", "10 min"),
    observe_every=("How often the assets of the sinks are observed.", "30 s"),
    materialize_every=("How often those that got rows are materialized.", "5 min"),
    partitions=_PARTITIONS,
    rerun_late=("Whether a sensor runs partitions with late records again in BATCH.",),
    tick_every=("How often the sensor looks.", "30 s"),
    upstream=_UPSTREAM,
    checks=_CHECKS,
)


_KINDS = {
    Table: "table",
    Stage: "stage",
    Input: "source",
    Malformed: "malformed",
    Savepoints: "savepoint",
    Stream: "stream",
}

_TRANSLATION = TranslationFnResolver[Part](
    lambda part: {"part": part, "pipeline": part.pipeline, "name": part.name, "kind": _KINDS[type(part)]}
)
_TRANSLATION.description = (
    "What the assets are, in Dagster's own attributes. Templates know pipeline, name, kind (table, stage, source,"
    " malformed, savepoint or stream), part and spec."
)
_TRANSLATION.examples = [{"key": "lake/{{ pipeline }}/{{ name }}"}]


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
@dataclass(eq=False)
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
    batch: Annotated[Attributes | None, _nested(Batch, "How it runs in BATCH.")] = None
    streaming: Annotated[Attributes | None, _nested(Streaming, "How it is kept running in STREAMING.")] = None
    translation: Annotated[TranslationFn[Part] | None, _TRANSLATION] = None
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

    @property
    def deployments(self) -> list[Pipeline | BatchDeployment | StreamingDeployment]:
        """The pipeline's deployments; the pipeline itself where it has the defaults."""
        modes = [mode for mode in (self.batch, self.streaming) if mode is not None]
        return [mode.deployment(self.pipeline) for mode in modes] or [self.pipeline]

    def build_defs(self, context: ComponentLoadContext) -> Definitions:
        """Build the definitions of the pipeline, with edges to those of the project's other components."""
        catalog = _catalog(self, context.component_tree)
        return definitions_of(
            [deployed for deployed in catalog.deployed if deployed.pipeline is self.pipeline],
            catalog,
            dict.fromkeys(self.project_resources),
            in_process_executor if self.executor == "in_process" else None,
        )


class _OfComponents(PipelineTranslator):
    """Gives each pipeline its assets by the `translation` of its component."""

    def __init__(self, components: Sequence[UnifiedPipelineComponent]) -> None:
        self._translations = {component.pipeline.name: component.translation for component in components}

    def get_asset_spec(self, part: Part) -> AssetSpec:
        spec, translation = super().get_asset_spec(part), self._translations[part.pipeline]
        return spec if translation is None else translation(spec, part)


_CATALOGS: WeakKeyDictionary[UnifiedPipelineComponent, Catalog] = WeakKeyDictionary()
"""The catalog of each component: all of a project build their definitions from one."""


def _catalog(component: UnifiedPipelineComponent, tree: ComponentTree) -> Catalog:
    """Return the catalog of a component and of all others of its project, whose pipelines read each other's tables."""
    known = _CATALOGS.get(component)
    if known is not None:
        return known
    components = tree.get_all_components(UnifiedPipelineComponent)
    if not any(other is component for other in components):
        components = [*components, component]  # one that Python code builds
    names = Counter(other.pipeline.name for other in components)
    twice = [name for name, times in names.items() if times > 1]
    if twice:
        raise ConfigurationError(
            f"two components are of pipelines named '{twice[0]}'; give batch and streaming of one pipeline in one"
            " component, and each pipeline another name"
        )
    deployed = by_pipeline([deployment for other in components for deployment in other.deployments])
    catalog = Catalog(deployed, _OfComponents(components))
    for other in components:
        _CATALOGS.setdefault(other, catalog)
    return catalog


def _module_of(request: ScaffoldRequest[ScaffoldParams]) -> str:
    root = request.project_root or Path.cwd()
    place = request.target_path.absolute().relative_to(root.absolute())
    return ".".join(part for number, part in enumerate(place.parts) if number or part != "src")
