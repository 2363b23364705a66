"""What a Spark worker runs: a program over the batches of one partition, its outputs combined into one stream of batches.

Knows the operators and how a function gets to a worker; no session.
"""

from __future__ import annotations

import functools
import io
import sys
import typing
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import pyarrow as pa

from dagster_unified.errors import PipelineError
from dagster_unified.graph.code import is_installed
from dagster_unified.operators.batch import Emitted, run_batch, spare_the_garbage_collector
from dagster_unified.operators.layout import PART_FIELD, combine, combined_schema, metrics_row
from dagster_unified.operators.program import FLUSH, Program
from dagster_unified.operators.ranges import run_range

MapInArrow = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def run_partition(payload: bytes, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs the program in `payload` over a partition."""
    from pyspark import TaskContext, cloudpickle

    program: Program = cloudpickle.loads(payload)
    spare_the_garbage_collector()
    schema = combined_schema(tuple(o.layout for o in program.outputs))
    context = TaskContext.get()
    subtask = context.partitionId() if context is not None else 0

    def row_of(emitted: Emitted | str) -> pa.RecordBatch:
        return metrics_row(schema, emitted) if isinstance(emitted, str) else combine(schema, *emitted)

    if not program.parts:
        yield from map(row_of, run_batch(program, batches, subtask=subtask))
        return
    waiting: dict[tuple[int, int], list[pa.RecordBatch]] = {}
    size = 0

    def of(part: int, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.append_column(PART_FIELD, pa.repeat(pa.scalar(part, PART_FIELD.type), batch.num_rows))

    def gathered() -> pa.RecordBatch:
        """What many key groups and partitions have emitted, a few rows each, in one batch."""
        found = pa.concat_batches([of(part, row_of((number, pa.concat_batches(some)))) for (part, number), some in waiting.items()])
        waiting.clear()
        return found

    for part, emitted in run_range(lambda: cloudpickle.loads(payload), batches, subtask=subtask):
        if isinstance(emitted, str):
            yield of(part, row_of(emitted))
            continue
        number, batch = emitted
        waiting.setdefault((part, number), []).append(batch)
        size += batch.num_rows
        if size >= FLUSH:
            yield gathered()
            size = 0
    if waiting:
        yield gathered()


def shipped(program: Program) -> MapInArrow:
    """The program as a function for `mapInArrow`; raises `PipelineError` naming the operator that cannot be sent to workers."""
    try:
        payload = by_value_bytes(program)
    except Exception as error:
        raise PipelineError(f"{_unpicklable(program)} cannot be sent to Spark's workers: {error}; create connections, locks and open files in open(), not before") from error
    return functools.partial(run_partition, payload)


def _unpicklable(program: Program) -> str:
    """The first operator that does not pickle."""
    for step in program.steps:
        try:
            by_value_bytes(step.function)
        except Exception:
            return program.where(step)
    return f"{program.pipeline}: stage '{program.stage}'"


def by_value(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that carries its user code along."""
    return functools.partial(_call, by_value_bytes(function))


def _call(payload: bytes, *arguments: Any) -> Any:
    function = loaded(payload)
    return function(*arguments)


@functools.lru_cache(maxsize=8)
def loaded(payload: bytes) -> Any:
    """What was shipped as bytes, unpickled once per worker."""
    from pyspark import cloudpickle

    return cloudpickle.loads(payload)


def by_value_bytes(value: Any) -> bytes:
    """Pickles something with every author's module that it refers to by value, so that workers need not be able to import it."""
    from pyspark import cloudpickle as untyped

    cloudpickle: Any = untyped

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, type) and "__msgspec_cache__" in vars(obj):
                delattr(obj, "__msgspec_cache__")  # msgspec's note to itself on a class, which it makes again when it needs it
            if isinstance(obj, type):
                _resolve_annotations(obj)
            return super().reducer_override(obj)

    modules = [module for name, module in list(sys.modules.items()) if _belongs_to_the_author(name, module)]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    buffer = io.BytesIO()
    try:
        Pickler(buffer).dump(value)
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
    return buffer.getvalue()


def _resolve_annotations(cls: type) -> None:
    """Puts types in the place of annotations that are text: a worker has not the module in which they could be looked up."""
    own = vars(cls).get("__annotations__")
    if isinstance(own, dict) and any(isinstance(a, (str, typing.ForwardRef)) for a in own.values()):
        try:
            hints = typing.get_type_hints(cls, include_extras=True)
        except (NameError, TypeError):
            return  # names known to a type checker only: nothing that a record's fields could be made of
        own.update({name: hints[name] for name in own})


def _belongs_to_the_author(name: str, module: ModuleType | None) -> bool:
    return name != "__main__" and getattr(module, "__file__", None) is not None and getattr(module, "__spec__", None) is not None and not is_installed(name)
