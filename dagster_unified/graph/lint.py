"""The mode-parity lint: warns where a graph's final result depends on the mode.

Knows the logical graph and what can be read from functions' code; runs nothing. A *warning* says that BATCH and
STREAMING may end differently; a *note* says what the lint cannot promise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from dagster_unified.graph.code import changed_by, names_used, reads_from_outside, reads_watermark, refers_to
from dagster_unified.graph.event_time import Assigned, assigners, nearest_assigners
from dagster_unified.graph.fingerprint import fingerprint_of
from dagster_unified.graph.mode import Execution
from dagster_unified.graph.nodes import BroadcastNode, Graph, IterationNode, Node, SinkNode
from dagster_unified.graph.nodes.base import Finding
from dagster_unified.operators.state.descriptors import StateDescriptor, StateTtlConfig

Rule = Callable[[Graph, Node, Execution], list[tuple[str, str]]]


def lint(graph: Graph, execution: Execution, carry_state: bool = False) -> tuple[Finding, ...]:
    """All findings, in the order of the operators; with `carry_state` a run leaves its state to that of a partition."""
    findings: list[Finding] = []
    leaves = (_held_back,) if carry_state or execution.goes_on else ()
    for node in graph.nodes:
        findings += _findings(_BEFORE, graph, node, execution)
        findings += node.parity()
        findings += _findings((*_AFTER, *leaves), graph, node, execution)
        if isinstance(node, IterationNode):
            findings += [
                replace(finding, node=node.id)
                for n in node.body.nodes
                for finding in _findings(_IN_BODIES, node.body, n, execution)
            ]
    return tuple(findings)


def _findings(rules: Sequence[Rule], graph: Graph, node: Node, execution: Execution) -> list[Finding]:
    return [
        Finding(rule.__name__.strip("_").removesuffix("_in_body").replace("_", "-"), severity, node.id, message)
        for rule in rules
        for severity, message in rule(graph, node, execution)
    ]


def _rolling_upstream(graph: Graph, node: Node) -> Node | None:
    """Return the nearest rolling operation upstream whose updates reach this node unchanged."""
    pending = [e.source for e in graph.inputs(node.id) if e.tag is None]
    while pending:
        upstream = graph.nodes[pending.pop()]
        if upstream.emits_updates:
            return upstream
        pending += [e.source for e in graph.inputs(upstream.id)]
    return None


def _counts_updates(graph: Graph, node: Node, execution: Execution) -> list[tuple[str, str]]:
    appends = isinstance(node, SinkNode)
    if not node.counts_records:
        return []
    rolling = _rolling_upstream(graph, node)
    if rolling is None:
        return []
    what = "appends" if appends else "sees"
    todo = (
        "use a sink that upserts by key"
        if appends
        else f"make it depend on the last update per key only, or move it before '{rolling.name}'"
    )
    return [
        (
            "warning",
            (
                f"'{node.name}' {what} every update of the rolling operation '{rolling.name}' in STREAMING and only its"
                f" final results in BATCH; {todo}"
            ),
        )
    ]


def _clock(graph: Graph, node: Node, execution: Execution) -> list[tuple[str, str]]:
    function = node.user_function
    if function is None:
        return []
    used = names_used(function)
    findings: list[tuple[str, str]] = []
    if "current_processing_time" in used and "register_processing_time_timer" in used:
        findings.append(
            (
                "note",
                (
                    f"'{node.name}' reads the processing time, and sets timers by it; if anything else depends on what"
                    " it reads, so does its result on when it runs"
                ),
            )
        )
    elif "current_processing_time" in used:
        findings.append(
            (
                "warning",
                (
                    f"'{node.name}' reads the processing time, so that its result depends on when it runs; use"
                    " ctx.timestamp()"
                ),
            )
        )
    outside = reads_from_outside(function)
    if outside is not None:
        findings.append(
            (
                "warning",
                (
                    f"'{node.name}' reads {outside}, so that each mode, and each retry, gives another result; take what"
                    " it needs from the record"
                ),
            )
        )
    return findings


def _watermark(graph: Graph, node: Node, execution: Execution) -> list[tuple[str, str]]:
    function = node.user_function
    if function is None or not reads_watermark(function):
        return []
    what = (
        f"'{node.name}' reads the watermark, which stands at its beginning in BATCH and follows the records in"
        " STREAMING"
    )
    return [("warning", f"{what}; use ctx.timestamp(), or an event-time timer")]


def _late_records(graph: Graph, node: Node, execution: Execution) -> list[tuple[str, str]]:
    dropping = node.drops_late_records
    if dropping is None:
        return []
    nearest = assigners(graph, node)
    if not nearest:
        return []  # the watermark stands still until the end of input
    if all(assigner.covered for assigner in nearest):
        covered = ", ".join(
            f"those of '{a.name}' by {a.disorder} ms at most, with a bound of {a.bound} ms" for a in nearest
        )
        return [("note", f"no record can be late for '{node.name}': they are out of order {covered}")]
    bounds = ", ".join(map(_allowed, (a for a in nearest if not a.covered)))
    lateness = getattr(dropping, "lateness", 0)
    tags = [tag for tag in getattr(dropping, "late_tags", ()) if tag is not None]
    if tags or lateness:
        what = f"side output '{tags[0].name}'" if tags else "allowed lateness"
        return [("warning", f"'{node.name}': nothing is late in BATCH, so that its {what} is of STREAMING only")]
    return [
        (
            "warning",
            (
                f"'{node.name}' drops late records in STREAMING, where BATCH has none and counts them all; it cannot"
                f" happen where records come sorted by event time, or no further out of order than the bound ({bounds})"
            ),
        )
    ]


def _allowed(assigner: Assigned) -> str:
    """Say how far out of order an assigner's records may be."""
    if assigner.bound is None:
        return f"what the watermark generator of '{assigner.name}' allows"
    return f"{assigner.bound} ms of '{assigner.name}'"


def _expiry(graph: Graph, node: Node, execution: Execution) -> list[tuple[str, str]]:
    if not node.holds_state or not refers_to(node.user_function, _lives_for_a_time):
        return []
    return [
        (
            "warning",
            (
                f"'{node.name}' has state with a time to live, which STREAMING forgets after that and BATCH does not;"
                " if its result depends on it, forget by event-time timers instead"
            ),
        )
    ]


def _lives_for_a_time(value: object) -> bool:
    return (
        value is StateTtlConfig
        or isinstance(value, StateTtlConfig)
        or (isinstance(value, StateDescriptor) and value.ttl is not None)
    )


def _order(graph: Graph, node: Node, execution: Execution) -> list[tuple[str, str]]:
    if not node.depends_on_order:
        return []
    return [
        (
            "note",
            (
                f"'{node.name}' gets a key's records in event-time order in BATCH and as they arrive in STREAMING; if"
                " its result depends on order, set requires_time_sorted_input = True"
            ),
        )
    ]


def _null_key(graph: Graph, node: Node, execution: Execution) -> list[tuple[str, str]]:
    key = node.key
    if key is None or not key.fields:
        return []
    notes = []
    for edge in graph.main_inputs(node.id):
        records = graph.records_of(edge)
        if records is not None:
            notes += [
                (
                    "note",
                    (
                        f"'{node.name}' is keyed by '{f}', which may be None, and a None key fails the run; filter"
                        " before key_by"
                    ),
                )
                for f in key.fields
                if records.schema.field(f).nullable
            ]
    return notes


def _left_out(graph: Graph, node: Node, execution: Execution) -> list[tuple[str, str]]:
    left_out = fingerprint_of(*node.code()).left_out
    return [
        (
            "note",
            (
                f"'{node.name}' uses {place}, {what}: whether it has changed is not known, so that only the statement"
                " that creates it counts as code; create it in open(), or build it from values that can be compared"
            ),
        )
        for place, what in left_out.items()
    ]


def _held_back(graph: Graph, node: Node, execution: Execution) -> list[tuple[str, str]]:
    """Note which streams may hold the others back at the end of a run that leaves its state to another."""
    before = nearest_assigners(graph, graph.inputs(node.id)) if node.has_timers else []
    waited_for = sorted(
        (assigner for assigner in before if assigner.idleness_ms is None), key=lambda assigner: assigner.id
    )
    if len(before) < 2 or not waited_for:
        return []
    names = " and ".join(dict.fromkeys(f"'{name}'" for assigner in waited_for for name in _sources_of(graph, assigner)))
    return [
        (
            "note",
            (
                f"'{node.name}' waits for the slowest of several streams, also at the end of a run that leaves its"
                f" state to another one: what is later than the last record of {names} stays in the state. Give the"
                " WatermarkStrategy of a stream that may be silent for long with_idleness(...): a stream that has it"
                " holds nobody back there"
            ),
        )
    ]


def _sources_of(graph: Graph, node: Node) -> list[str]:
    upstream = graph.upstream(node.id)
    return [source.name for source in graph.sources if source.id in upstream]


def _attributes(graph: Graph, node: Node, execution: Execution) -> list[tuple[str, str]]:
    """Note what a function keeps in itself or outside of it, where only state lasts."""
    return _note_changes(node, "a function object lives for a micro-batch, and in BATCH for a task")


def _attributes_in_body(graph: Graph, node: Node, execution: Execution) -> list[tuple[str, str]]:
    return _note_changes(node, "in a body a function is opened anew in each epoch")


def _note_changes(node: Node, life: str) -> list[tuple[str, str]]:
    changed = changed_by(node.user_function)
    if not changed:
        return []
    what = f"'{node.name}' changes {', '.join(changed)} as records come: {life}, and what it keeps otherwise than in"
    return [("note", f"{what} state is gone then; keep what lasts in state")]


def _broadcast(graph: Graph, node: Node, execution: Execution) -> list[tuple[str, str]]:
    if not isinstance(node, BroadcastNode):
        return []
    if any(graph.node(edge.source).timestamped for edge in graph.broadcast_inputs(node.id)):
        return []
    return [
        (
            "warning",
            (
                f"'{node.name}' gets its broadcast records in no defined order in BATCH, since they have no event"
                " times; if a later one replaces an earlier, assign timestamps to them"
            ),
        )
    ]


def _unused(graph: Graph, node: Node, execution: Execution) -> list[tuple[str, str]]:
    if isinstance(node, SinkNode) or any(edge.source == node.id for edge in graph.edges):
        return []
    return [("note", f"its {node.product} not used: '{node.name}' leads to no sink, and it does not run")]


_BEFORE: tuple[Rule, ...] = (_counts_updates, _clock, _watermark)
"""The rules for every operator, before its node's own findings."""

_AFTER: tuple[Rule, ...] = (_broadcast, _late_records, _expiry, _order, _null_key, _left_out, _attributes, _unused)
"""The rules for every operator, after them."""

_IN_BODIES: tuple[Rule, ...] = (
    _broadcast,
    _counts_updates,
    _clock,
    _watermark,
    _expiry,
    _order,
    _null_key,
    _attributes_in_body,
)
"""The rules for the operators of an iteration's body; the iteration answers for their code and their results."""
