"""Builds a pipeline: the growing graph, types from annotations, and errors that name a line.

`GraphBuilder` is what streams add their operators to. Imports no Spark.
"""

from __future__ import annotations

import copy
import os
import re
import sys
import types
import typing
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

from dagster_unified.errors import PipelineError, RecordTypeError
from dagster_unified.graph import explain as explanation
from dagster_unified.graph.nodes import Edge, Graph, Location, Naming, Node, Partitioning, SinkNode, SourceNode
from dagster_unified.graph.operator_state import check_operator_state
from dagster_unified.graph.options import Configuration
from dagster_unified.graph.plan import Plan, plan
from dagster_unified.graph.targets import check_targets, written
from dagster_unified.operators.functions.base import OutputTag
from dagster_unified.operators.functions.iterations import iteration_listeners
from dagster_unified.operators.functions.type_variables import Out
from dagster_unified.records import RecordType, element_type, record_type, return_type, type_name

if TYPE_CHECKING:
    from dagster_unified.graph.connectors import Sink

_LIBRARY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

C = TypeVar("C", bound=type)


def located(kind: C) -> C:
    """A class whose methods an author calls; their errors say from where."""
    for name, method in list(vars(kind).items()):
        if isinstance(method, FunctionType) and not name.startswith("_"):
            setattr(kind, name, _located(method))
    return kind


def _located(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except (PipelineError, RecordTypeError) as error:
            place = f" ({caller()})"
            if type(error) in (PipelineError, RecordTypeError) and place not in str(error):
                error.args = (f"{error}{place}",)
            raise

    return call


def caller() -> Location | None:
    """The line of the author's program that is being executed: the nearest frame outside the library."""
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_LIBRARY):
            return Location(_short(frame.f_code.co_filename), frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _short(file: str) -> str:
    """Return the path relative to the working directory, if the file lies below it."""
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return file if relative.startswith("..") else relative


N = TypeVar("N", bound=Node)


@dataclass(frozen=True)
class Upstream:
    """Where a stream's records come from, and how they are to travel to the next operator."""

    node: int
    tag: OutputTag[Any] | None = None
    partitioning: Partitioning | None = None


class GraphBuilder:
    """A graph that is being built: the operators so far, and the mistakes found in them."""

    identified_by = ("name",)
    """The part of it that a fingerprint takes, where a function mentions it."""

    is_body = False
    """Whether it is the body of an iteration."""

    def __init__(self, name: str) -> None:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise PipelineError(f"'{name}' is not a pipeline name; use letters, digits and _, beginning with a letter")
        self.name = name
        self._nodes: list[Node] = []
        self._edges: list[Edge] = []
        self._mistakes: list[tuple[Location | None, RecordTypeError]] = []
        self._tags: dict[tuple[int, str], RecordType] = {}

    def graph(self) -> Graph:
        """The logical graph.

        Raises `PipelineError` where it is not complete, two operators share a uid, or two sinks overwrite each other.

        Of sinks with one name, all but the first have a number behind it.
        """
        self._raise_mistakes()
        if not any(isinstance(n, SinkNode) for n in self._nodes):
            raise PipelineError(f"{self.name}: nothing is written anywhere; end a stream with sink_to(...) or print()")
        graph = Graph(self.name, tuple(self._identified(self._named())), tuple(self._edges))
        check_operator_state(graph)
        check_targets(written(graph))
        return graph

    def with_sink(self, upstream: tuple[Upstream, ...], sink: Sink[Any], records: RecordType) -> GraphBuilder:
        """A copy of the graph with one sink more; this one stays as it is."""
        copied = copy.copy(self)
        copied._nodes, copied._edges = [*self._nodes], [*self._edges]
        copied._mistakes, copied._tags = [*self._mistakes], {**self._tags}
        copied._add(SinkNode, [*upstream], sink.name, naming=Naming.LIBRARY, sink=sink.bound_to(records))
        return copied

    def check_same(self, other: GraphBuilder, where: str) -> None:
        """Raises `PipelineError` where the streams of an operator do not belong together."""
        if other is self:
            return
        if self.is_body or other.is_body:
            raise PipelineError(
                f"{where}: one stream is of an iteration's body and one of the outside; pass it in as data"
            )
        raise PipelineError(f"{where}: the streams belong to different pipelines, '{self.name}' and '{other.name}'")

    def plan(self, options: Mapping[str, Any] | Configuration | None = None) -> Plan:
        """Everything that is decided before a run, for a configuration (option keys to values)."""
        return plan(self.graph(), options if isinstance(options, Configuration) else Configuration.of(options))

    def explain(
        self,
        options: Mapping[str, Any] | Configuration | None = None,
        format: str = "text",  # noqa: A002
    ) -> str:
        """The plan as `text`, `mermaid` or `json`, or with the format "physical" the execution graph."""
        formats = {
            "text": explanation.as_text,
            "mermaid": explanation.as_mermaid,
            "json": explanation.dumps,
            "physical": explanation.physical,
        }
        if format not in formats:
            raise PipelineError(f"explain knows the formats {', '.join(formats)}, not '{format}'")
        return formats[format](self.plan(options))

    def _named(self) -> list[Node]:
        """Return the operators; no two sinks of them have one name."""
        names: set[str] = set()
        nodes = []
        for node in self._nodes:
            if isinstance(node, SinkNode):
                node = replace(node, name=_free(node.name, names))
                names.add(node.name)
            nodes.append(node)
        return nodes

    def _identified(self, nodes: Sequence[Node]) -> list[Node]:
        """Return the operators, each with a uid; raises where an author has given one uid to two of them.

        A sink's uid does not depend on the names of operators: by it a target knows what the sink has written. Nor does
        that of a source, which comes before an operator of its name: positions and the source's asset go by it.
        """
        named = [n for n in nodes if n.given_uid]
        for uid, count in Counter(n.uid for n in named).items():
            if count > 1:
                first, second = [n for n in named if n.uid == uid][:2]
                raise PipelineError(
                    f"{self.name}: '{first.name}' ({first.location}) and '{second.name}' ({second.location}) both have "
                    f"the uid '{uid}'; a uid names one operator's state"
                )
        uids = {n.id: n.uid for n in named}
        for node in sorted(nodes, key=lambda node: (not isinstance(node, SinkNode), not isinstance(node, SourceNode))):
            if not node.given_uid:
                words = re.sub(r"\W+", "-", node.name).strip("-").lower() or "operator"
                uids[node.id] = _free(f"sink-{words}" if isinstance(node, SinkNode) else words, uids.values())
        return [replace(node, uid=uids[node.id]) for node in nodes]

    def _add(self, kind: type[N], upstream: list[Upstream], name: str, **attributes: Any) -> N:
        if not self.is_body:
            self._check_hears_of_no_epochs(name, attributes.get("function"))
        timestamped = attributes.pop("timestamped", None)
        if timestamped is None:
            timestamped = any(self._nodes[u.node].timestamped for u in upstream)
        node = kind(id=len(self._nodes), name=name, location=caller(), timestamped=timestamped, **attributes)
        self._nodes.append(node)
        self._edges += [Edge(u.node, node.id, u.partitioning or Partitioning(), u.tag) for u in upstream]
        return node

    def _check_hears_of_no_epochs(self, operator: str, function: object) -> None:
        listener = next(iteration_listeners(function), None)
        if listener is not None:
            raise PipelineError(
                f"{self.name}: operator '{operator}': {type(listener).__name__} hears of the epochs of an iteration,"
                " and there are none here; use it in the body of an iteration"
            )

    def _found_mistake(self, node: int, mistake: RecordTypeError) -> None:
        """Keep a mistake in an output type until the graph is complete, so that all are reported at once."""
        self._mistakes.append((self._nodes[node].location, mistake))

    def _raise_mistakes(self) -> None:
        if not self._mistakes:
            return
        mistakes = [f"{mistake} ({location})" for location, mistake in self._mistakes]
        if len(mistakes) == 1:
            raise RecordTypeError(mistakes[0])
        lines = "".join(
            f"\n  {number}. {text.removeprefix(f'{self.name}: ')}" for number, text in enumerate(mistakes, 1)
        )
        raise RecordTypeError(f"{self.name}: {len(mistakes)} operators have no usable output type:{lines}")

    def _declare_tag(self, node: Node, tag: OutputTag[Any]) -> None:
        """Take the record type of a side output; raises where it was another before."""
        declared: RecordType = self._tags.setdefault((node.id, tag.name), tag.output_type)
        if declared != tag.output_type:
            raise RecordTypeError(
                f"{self.name}: operator '{node.name}': the side output '{tag.name}' is declared as"
                f" {declared.describe()} and as {tag.output_type.describe()}; give one of them another name"
            )

    def _change(self, node_id: int, **attributes: Any) -> None:
        self._nodes[node_id] = replace(self._nodes[node_id], **attributes)

    def _node(self, node_id: int) -> Node:
        return self._nodes[node_id]

    def _record_type(self, python: Any, operator: str) -> RecordType:
        return record_type(python, f"{self.name}: operator '{operator}'")


def _free(name: str, taken: Collection[str]) -> str:
    """Return the name, with a number behind it where it is taken."""
    free, number = name, 1
    while free in taken:
        number += 1
        free = f"{name}-{number}"
    return free


NOT_GIVEN: Any = None
"""The default of a parameter that takes a type. A checker sees nothing in it that would say one."""


def itself(annotation: Any) -> Any:
    """The record of a function that gives one record."""
    return annotation


def main_output(annotation: Any) -> Any | None:
    """The record of a function that gives an iterable; None where the annotation is not that of one.

    `(tag, record)` goes to a side output: `Iterable[Total | tuple[OutputTag[Sale], Sale]]` gives totals.
    """
    element = element_type(annotation)
    if typing.get_origin(element) not in (types.UnionType, typing.Union):
        return element
    members = [m for m in typing.get_args(element) if not _is_side_output(m)]
    return typing.Union[tuple(members)] if members else element  # noqa: UP007


def _is_side_output(annotation: Any) -> bool:
    if typing.get_origin(annotation) is not tuple:
        return False
    tag = typing.get_args(annotation)[0]
    return (typing.get_origin(tag) or tag) is OutputTag


def stated_output(method: Any) -> Any | None:
    """Return the output type that a method's class states: `int` of `MapFunction[Sale, int]`; None without one."""
    return type_argument(type(getattr(method, "__self__", None)), Out)


def type_argument(cls: type, variable: TypeVar) -> Any | None:
    """Return what a class gives for a type variable of one of its bases; None where it gives nothing."""
    argument = _argument(cls, variable, {})
    return None if isinstance(argument, TypeVar) or argument is Any else argument


def _argument(cls: type, variable: TypeVar, arguments_of_class: Mapping[Any, Any]) -> Any | None:
    """`arguments_of_class` is what was given for the class's own type variables."""
    if variable in arguments_of_class:
        return arguments_of_class[variable]
    for base in vars(cls).get("__orig_bases__", cls.__bases__):
        origin = typing.get_origin(base) or base
        if not isinstance(origin, type) or origin is typing.Generic:
            continue
        arguments = [_resolved(_with(arguments_of_class, a), cls) for a in typing.get_args(base)]
        argument = _argument(
            origin, variable, dict(zip(getattr(origin, "__parameters__", ()), arguments, strict=False))
        )
        if argument is not None:
            return argument
    return None


def _with(arguments: Mapping[Any, Any], argument: Any) -> Any:
    """Put the arguments of type variables into a type."""
    if argument in arguments:
        return arguments[argument]
    inner = getattr(argument, "__parameters__", ()) if typing.get_origin(argument) is not None else ()
    return argument[tuple(arguments.get(variable, variable) for variable in inner)] if inner else argument


def _resolved(argument: Any, cls: type) -> Any:
    """Return a type that was written in quotes."""
    if not isinstance(argument, typing.ForwardRef):
        return argument
    holder = type(cls.__name__, (), {"__annotations__": {"argument": argument}})
    try:
        return typing.get_type_hints(holder, vars(sys.modules[cls.__module__]))["argument"]
    except (NameError, KeyError):
        return None


def agreed_output(function: Any, methods: tuple[str, str], unwrap: Callable[[Any], Any], where: str) -> Any:
    """The output type of a function with two methods.

    Raises where nothing says it, or both are annotated with different ones.
    """
    stated = type_argument(type(function), Out)
    if stated is not None:
        return stated
    annotated = {m: t for m in methods if (t := return_type(getattr(function, m))) not in (None, type(None))}
    for method, annotation in annotated.items():
        if unwrap(annotation) is None:
            raise RecordTypeError(
                f"{where}: {method} is annotated to give {type_name(annotation)}, and has to give an iterable of"
                f" records, such as Iterable[{type_name(annotation)}]"
            )
    types = [unwrap(annotated[m]) if m in annotated else None for m in methods]
    agreed = next((t for t in types if t is not None), None)
    if agreed is None:
        raise RecordTypeError(f"{where} has no output type; annotate what {methods[0]} returns, or give output_type=")
    if None not in types and types[0] != types[1]:
        raise RecordTypeError(
            f"{where}: {methods[0]} gives {type_name(types[0])} and {methods[1]} gives {type_name(types[1])}; "
            "make them the same"
        )
    return agreed
