"""Finds what a command is about, in the module or file that it is given."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tomllib
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from dagster_unified.errors import PipelineError, UnifiedError, nearest

if TYPE_CHECKING:
    from dagster_unified.api.pipeline import Pipeline
    from dagster_unified.orchestration.deployments import StreamingDeployment


def load(name: str) -> Pipeline:
    """The pipeline in a module or file; raises `PipelineError` where there is none, or several."""
    from dagster_unified.api.pipeline import Pipeline

    place, attribute, module = _module(name)
    pipelines = {n: v for n, v in vars(module).items() if isinstance(v, Pipeline)}
    if attribute:
        if attribute not in pipelines:
            raise PipelineError(
                f"{place} has no pipeline"
                f" '{attribute}'{nearest(attribute, pipelines) or '; it has ' + (', '.join(pipelines) or 'none')}"
            )
        return pipelines[attribute]
    if len({id(v) for v in pipelines.values()}) != 1:
        raise PipelineError(
            f"{place} has no Pipeline at its top level"
            if not pipelines
            else f"{place} has several pipelines; name one: {', '.join(f'{place}:{n}' for n in pipelines)}"
        )
    return next(iter(pipelines.values()))


def load_deployment(name: str) -> StreamingDeployment:
    """The streaming deployment in a module or file.

    One that is defined there, one of its `Definitions`, or that of its pipeline.

    Raises `PipelineError` where there is none, or several and none is named.
    """
    from dagster import Definitions

    from dagster_unified.api.pipeline import Pipeline

    place, attribute, module = _module(name)
    deployments: dict[str, StreamingDeployment] = {}
    names: dict[str, str] = {}
    declared: set[str] = set()
    for variable, value in sorted(
        vars(module).items(), key=lambda item: isinstance(item[1], Pipeline)
    ):  # a declared deployment before a pipeline's own
        for deployment in _deployments(value):
            deployments.setdefault(deployment.pipeline.name, deployment)
            if not isinstance(value, Definitions):
                names.setdefault(variable, deployment.pipeline.name)
            if not isinstance(value, Pipeline):
                declared.add(deployment.pipeline.name)
    if declared and not attribute:  # pipelines beside them may be run in BATCH only
        deployments = {name: deployment for name, deployment in deployments.items() if name in declared}
    if not deployments:
        raise PipelineError(
            f"{place} has no StreamingDeployment, Definitions of pipelines, or Pipeline at its top level"
        )
    if attribute:
        chosen = names.get(attribute, attribute)
        if chosen not in deployments:
            raise PipelineError(
                f"{place} has no streaming deployment of"
                f" '{attribute}'{nearest(attribute, deployments) or '; it has ' + ', '.join(deployments)}"
            )
        return deployments[chosen]
    if len(deployments) > 1:
        raise PipelineError(
            f"{place} has several streaming deployments; name one:"
            f" {', '.join(f'{place}:{n}' for n in sorted(deployments))}"
        )
    return next(iter(deployments.values()))


@dataclass(frozen=True)
class Declared:
    """The deployments in a module or file: the streams, and the names of the pipelines that run in BATCH."""

    streaming: Sequence[StreamingDeployment]
    batch: Sequence[str]


def declared_in(name: str) -> Declared:
    """The deployments in a module or file: of its `Definitions`, those that it declares, or else of its pipelines.

    Raises `PipelineError` where there is none.
    """
    from dagster_unified.api.pipeline import Pipeline
    from dagster_unified.graph.connectors import Boundedness
    from dagster_unified.graph.mode import boundedness

    place, _, module = _module(name)
    values = list(vars(module).values())
    streaming = _declared_streams(module)
    batch = dict.fromkeys(pipeline for value in values for pipeline in _in_batch(value))
    if not streaming and not batch:
        for pipeline in (value for value in values if isinstance(value, Pipeline)):
            if boundedness(pipeline.graph()) is Boundedness.BOUNDED:
                batch[pipeline.name] = None
            else:
                streaming |= {deployment.pipeline.name: deployment for deployment in _deployments(pipeline)}
    if not streaming and not batch:
        raise PipelineError(f"{place} has no deployment, Definitions of pipelines, or Pipeline at its top level")
    return Declared(list(streaming.values()), list(batch))


def default_module() -> str:
    """The module that pyproject.toml gives Dagster, here; without any, `definitions`."""
    try:
        tool = tomllib.loads(Path("pyproject.toml").read_text()).get("tool", {})
    except (FileNotFoundError, tomllib.TOMLDecodeError):
        tool = {}
    module = tool.get("dagster", {}).get("module_name")
    return module if isinstance(module, str) else "definitions"


def _in_batch(value: object) -> list[str]:
    """The pipelines that a value deploys in BATCH."""
    from dagster import Definitions, SensorDefinition

    from dagster_unified.orchestration.deployments import BatchDeployment

    if isinstance(value, BatchDeployment):
        return [value.pipeline.name]
    if not isinstance(value, Definitions):
        return []
    sensors = {sensor.name for sensor in value.sensors or () if isinstance(sensor, SensorDefinition)}
    names = (getattr(job, "name", "").removesuffix("_batch") for job in value.jobs or ())
    return [name for name in names if f"{name}_heartbeat_sensor" in sensors]


def intermediates_of(name: str) -> str:
    """Where the `Definitions` in a module or file that is loaded keep intermediates; without any, the default."""
    from dagster import EnvVar

    from dagster_unified.orchestration import IntermediatesResource

    stores = [resource for resource in resources_of(name).values() if isinstance(resource, IntermediatesResource)]
    path = (stores[0] if stores else IntermediatesResource()).path
    return (path.get_value() or "") if isinstance(path, EnvVar) else path


def resources_of(name: str) -> dict[str, object]:
    """Return the resources of the `Definitions` in a module or file that is loaded, by key."""
    return _resources(_loaded(name))


def declared_stream_of(name: str, pipeline: str) -> StreamingDeployment | None:
    """Return the streaming deployment of a pipeline that a module or file declares which is loaded, if it does."""
    return _declared_streams(_loaded(name)).get(pipeline)


def _loaded(name: str) -> ModuleType:
    """Return a module or file that is loaded. Loading a file again would make its classes anew."""
    place = name.partition(":")[0]
    return sys.modules[Path(place).stem if place.endswith(".py") else place]


def _declared_streams(module: ModuleType) -> dict[str, StreamingDeployment]:
    """Return the streaming deployments that a module declares, by pipeline; not those of pipelines by themselves."""
    from dagster_unified.api.pipeline import Pipeline

    declared = (value for value in vars(module).values() if not isinstance(value, Pipeline))
    return {deployment.pipeline.name: deployment for value in declared for deployment in _deployments(value)}


def _resources(module: ModuleType) -> dict[str, object]:
    from dagster import Definitions

    found: dict[str, object] = {}
    for value in vars(module).values():
        if isinstance(value, Definitions):
            found = {**(value.resources or {}), **found}
    return found


def _deployments(value: object) -> list[StreamingDeployment]:
    from dagster import Definitions

    from dagster_unified.api.pipeline import Pipeline
    from dagster_unified.orchestration.deployments import StreamingDeployment
    from dagster_unified.orchestration.streaming import deployments_of

    if isinstance(value, StreamingDeployment):
        return [value]
    if isinstance(value, Definitions):
        return deployments_of(value)
    return [StreamingDeployment(value)] if isinstance(value, Pipeline) else []


def _module(name: str) -> tuple[str, str, ModuleType]:
    place, _, attribute = name.partition(":")
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    _use_object_store(module)
    return place, attribute, module


def _use_object_store(module: ModuleType) -> None:
    """Let this process use the object store of a module's `Definitions`, as their runs and sensors do."""
    if "dagster" not in sys.modules:  # then it has none
        return
    from dagster_unified.orchestration.resources import OBJECT_STORE, ObjectStore

    store = _resources(module).get(OBJECT_STORE)
    if isinstance(store, ObjectStore):
        store.use()


def _import_module(name: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise PipelineError(
                f"there is no module '{name}'{_similar(name)}; give a module or a file, from the folder that holds it"
            ) from error
        raise PipelineError(_cannot_import(name, error)) from error
    except (ValueError, TypeError) as error:
        raise PipelineError(f"'{name}' is not a module's name; give it in full, such as jobs.flight_delays") from error
    except UnifiedError:
        raise
    except (Exception, SystemExit) as error:
        raise PipelineError(_cannot_import(name, error)) from error


def _similar(name: str) -> str:
    folder = Path(*name.split(".")[:-1])
    known = [".".join([*folder.parts, f.stem]) for f in folder.glob("*.py")] if folder.is_dir() else []
    return nearest(name, known)


def _import_file(path: Path) -> ModuleType:
    if not path.exists():
        raise PipelineError(f"there is no file {path}")
    sys.path.insert(0, str(path.parent.absolute()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except UnifiedError:
        raise
    except (Exception, SystemExit) as error:
        raise PipelineError(_cannot_import(str(path), error)) from error
    return module


def _cannot_import(name: str, error: BaseException) -> str:
    trace = [] if isinstance(error, SyntaxError) else traceback.extract_tb(error.__traceback__)  # which says its line
    of_spark = [f"{os.sep}pyspark{os.sep}" in frame.filename for frame in trace]
    if of_spark and of_spark[-1]:
        place = next(frame for frame, inside in zip(reversed(trace), reversed(of_spark), strict=True) if not inside)
        return (
            f"{name} cannot be imported: at {place.filename}:{place.lineno} pyspark is asked for what only a running"
            " Spark has; take column functions from dagster_unified.api: from dagster_unified.api import functions as F"
        )
    at = f", at {trace[-1].filename}:{trace[-1].lineno}" if trace else ""
    return (
        f"{name} cannot be imported: {type(error).__name__}:"
        f" {str(error).splitlines()[0] if str(error) else 'no message'}{at}"
    )
