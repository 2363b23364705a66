"""Operators that hold state of a key and run in Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dagster_unified.graph.nodes.base import Key, Node


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyedNode(Node):
    """An operator on a keyed stream."""

    key: Key


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyedProcessNode(KeyedNode):
    """A `KeyedProcessFunction`."""

    function: Any


class BroadcastNode(KeyedProcessNode):
    """A function with broadcast state; `function` is its `Broadcasting`. With a key of no fields its stream is not
    keyed.

    What comes over BROADCAST exchanges is its broadcast stream.
    """


class WindowNode(KeyedProcessNode):
    """Windows; `function` is their `Windowing`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReduceNode(KeyedNode):
    """A rolling combination: a reduce function, or a built-in one as (kind, field)."""

    function: Any = None
    rolling: tuple[str, str | int | None] | None = None
