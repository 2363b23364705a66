"""What a STREAMING job was started from, and what of it has changed since.

It decides when a job has to be upgraded, and says why. It changes with the pipeline's code and its configuration, and
not with what its sources hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from dagster_unified.graph.fingerprint import digest
from dagster_unified.graph.nodes.graph import edge_parts, own_parts
from dagster_unified.graph.plan import Plan
from dagster_unified.version import library_version

OPTIONS = "the options"
VERSION = "the version of dagster-unified"

Code = Mapping[str, Mapping[str, str]]
"""By operator (its uid), and by where its code was written, a digest."""


def deployed_code(plan: Plan) -> dict[str, dict[str, str]]:
    """Return everything that a plan's jobs do, part by part."""
    code = {
        VERSION: {"": library_version()},
        OPTIONS: {f.name: digest(getattr(plan.execution, f.name)) for f in fields(plan.execution) if f.repr},
    }
    for node in plan.graph.nodes:
        code[node.uid] = own_parts(node, with_input=False)
        for number, edge in enumerate(plan.graph.inputs(node.id)):
            for place, part in edge_parts(edge).items():
                code[node.uid][f"{place} (input {number + 1})"] = digest(plan.graph.node(edge.source).uid, part)
    return code


def deployment_fingerprint(code: Code) -> str:
    """One hash of it all."""
    return digest(
        *(f"{uid} {place} {part}" for uid, parts in sorted(code.items()) for place, part in sorted(parts.items()))
    )


def changes(before: Code, now: Code) -> list[str]:
    """Describe the differences, as a person would."""
    if not before:  # an earlier version did not record it
        return [VERSION]
    changed = []
    for uid in sorted({*before, *now}):
        subject = uid if uid in (OPTIONS, VERSION) else f"operator '{uid}'"
        if uid not in before:
            changed.append(f"{subject} is new")
        elif uid not in now:
            changed.append(f"{subject} is gone")
        elif before[uid] != now[uid]:
            old, new = before[uid], now[uid]
            places = dict.fromkeys(
                place.partition(" (input ")[0] for place in sorted({*old, *new}) if old.get(place) != new.get(place)
            )
            changed_places = [place for place in places if place and uid != VERSION]
            changed.append(f"{subject} ({', '.join(changed_places)})" if changed_places else subject)
    return changed
