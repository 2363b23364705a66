"""Turns what Spark raises into the library's errors: the sentence first, Spark's trace as the cause.

An error that a worker raised arrives as text, in a classic session and through Connect; its class and message are read from it.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from dagster_unified import errors
from dagster_unified.connectors.files import TextSource
from dagster_unified.graph.nodes import SourceNode

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_unified.graph.plan import Plan

_RAISED = re.compile(r"(?:^|\]\s|:\s)dagster_unified\.errors\.(\w+): (.*?)(?=\n\s*\n|\n\s+at |\nDriver stacktrace|\nJVM stacktrace|\n\nThe above|\Z)", re.DOTALL | re.MULTILINE)
"""As a worker or an expression raises it; not where a plan that is shown quotes the expression."""


def translated(error: Exception, plan: Plan, stage: str, spark: SparkSession) -> errors.UnifiedError:
    """The error to raise instead of one that came out of Spark."""
    if isinstance(error, errors.UnifiedError):
        return error
    text = str(error)
    found = _RAISED.findall(text)
    if found:
        name, message = found[-1]
        message = message.strip().removesuffix("SQLSTATE: P0001").strip()
        if name == "MalformedInputError":
            return _malformed(message, plan, spark)
        kind = getattr(errors, name, errors.StageError)
        built: errors.UnifiedError = kind(message)
        return built
    return errors.StageError(f"{plan.name}: stage '{stage}': {_sentence(error, text)[:500]}")


def _sentence(error: Exception, text: str) -> str:
    """The line that says what went wrong: of a Java error the exception's own, and its innermost cause's."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    if not lines[0].startswith("An error occurred while calling"):
        return f"{type(error).__name__}: {lines[0]}"
    said = [line.removeprefix(": ") for line in lines[1:2]] + [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")][-1:]
    return "; ".join(re.sub(r"^(?:\w+\.)+(?=\w+(?::|$))", "", line) for line in dict.fromkeys(said)) or lines[0]


def _malformed(message: str, plan: Plan, spark: SparkSession) -> errors.UnifiedError:
    try:
        details = json.loads(message[message.find("{") : message.rfind("}") + 1])
    except json.JSONDecodeError:
        details = {}
    if not {"source", "file", "row", "reason"} <= set(details):  # raised by an author's function, or cut short
        return errors.MalformedInputError(f"{plan.name}: {message}")
    source = next((n.source for n in plan.graph.nodes if isinstance(n, SourceNode) and n.source.name == details["source"]), None)
    if isinstance(source, TextSource) and details["file"]:
        return errors.MalformedInputError(f"{plan.name}: {source.locate(spark, details['file'], details['row'], details['reason'])}")
    return errors.MalformedInputError(f"{plan.name}: source '{details['source']}': {details['reason']}: {details['row'][:200]}")
