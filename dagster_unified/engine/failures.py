"""Turns what Spark raises into the library's errors: the sentence first, Spark's trace as the cause.

An error that a worker raised arrives as text, in a classic session and through Connect; its class and message are read
from it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from dagster_unified import errors
from dagster_unified.by_value import install_for_workers, without_module
from dagster_unified.connectors.files.sources import ParquetSource
from dagster_unified.connectors.files.text_sources import TextSource
from dagster_unified.graph.aggregates import fields_of, too_large
from dagster_unified.graph.nodes import Node
from dagster_unified.storage.object_store import is_connect
from dagster_unified.storage.paths import is_local

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from upath import UPath

    from dagster_unified.graph.plan import Plan

_RAISED = re.compile(
    r"(?:^|\]\s|:\s)dagster_unified\.errors\.(\w+): (.*?)(?=\n\s*\n|\n\s+at |\nDriver stacktrace|\nJVM"
    r" stacktrace|\n\nThe above|\n=== Streaming Query ===|\Z)",
    re.DOTALL | re.MULTILINE,
)
"""As a worker or an expression raises it; not where a plan that is shown quotes the expression."""

CLOSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR}
"""Errors of a path that no further attempt fixes, unlike a full disk or a lost connection."""

_STATE = re.compile(r"\s*SQLSTATE: [0-9A-Z]{5}$")
"""The text that Spark puts behind a message."""


_DETAIL = re.compile(r'"(source|file|reason|row)":"((?:[^"\\]|\\.)*)')
"""A member of the JSON in which an expression says of a row that it is malformed; the last may be cut short."""

_COLON = re.compile(r"while reading file (\S+?)\. .*?URISyntaxException: Relative path in absolute URI", re.DOTALL)
"""Hadoop's message about a file on a disk whose name has a colon."""

_OF_PYTHON = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n)+(\S.*)")

_ENDED_EARLY = re.compile(r"Error from python worker:\n((?:[ \t].*\n)+)PYTHONPATH was:\n")
"""The output, which Spark indents, of a process that ended before it was a worker."""

_AWAY = {
    "botocore": ("ConnectionError", "HTTPClientError"),
    "aiohttp": ("ClientConnectionError", "ClientPayloadError"),
}
"""The errors that fsspec's clients raise where nobody answers, by the first part of their module's name."""

_AWAY_IN_JAVA = re.compile(r"(?:(s3a://\S+): \S+ )?Unable to execute HTTP request: ([^\n(]*)")
_AWAY_IN_RUST = re.compile(
    r"Error performing (\w+ \S+) in (?:(?!\n\s+at |\n\n).)*error sending request(.*?)(?=\n\s+at |\n\n|\Z)", re.DOTALL
)
"""The messages of Hadoop's connector and deltalake for it."""

_ARROW = "\u21b3\x1b[0m"
"""The text that deltalake puts before each cause, in colour."""

_NO_CREDENTIALS = re.compile(r"NoAuthWithAWSException|No AWS Credentials|Unable to load credentials from any")

_BUSY = (errno.EBUSY, errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET)

_SILENT_SERVER = re.compile(r'StatusCode\.UNAVAILABLE\s+details = "([^"]*)"')
"""The message of Spark Connect's client once it has asked often enough."""

_REAPED = 2.0
"""Seconds within which a process has ended whose connections have."""

_FILE_SYSTEMS = ("fsspec", "s3fs", "gcsfs", "adlfs")

_NOT_IMPORTED = re.compile(r"(?:^|: )((?:ModuleNotFound|Import|Syntax|Indentation|Tab)Error: .+)")
"""A sentence of Python's about a module that cannot be imported."""

_ABSENT = re.compile(r"No module named '(\w+(?:\.[\w.]+)?)'")

_NO_CLASS = re.compile(
    r"\b(?:ClassNotFoundException|NoClassDefFoundError|UnsupportedClassVersionError|NoSuchMethodError): "
    r"(?!Could not)\S+"
)
"""A sentence of the JVM's about a class that it does not have, or has of another version."""

_NO_FORMAT = re.compile(r"Failed to find (?:the )?data source: ([\w.$-]+)")

_NOT_STREAMED = re.compile(r"Data source (\S+) does not support streamed reading")

_NO_INTERPRETER = re.compile(r'Cannot run program "([^"]+)"[^\n]*error(?:=|: )(?:2|13)\b')
"""What the JVM says of an interpreter that is not there, or that it may not run."""

_HOST = re.compile(r"\((\S+) executor \S+\)")

_DAMAGED = re.compile(
    r"\[FAILED_READ_FILE[.\w]*\] Encountered error while reading file (\S+?)\. .*?Caused by: [^\n]*?"
    r"(Checksum error|is not a Parquet file)",
    re.DOTALL,
)
"""Spark's message about a file whose bytes are not those that were written."""

_OTHER_TYPE = re.compile(
    r"\[FAILED_READ_FILE[.\w]*\] Encountered error while reading file (\S+?)\. [^\n]*?reading Parquet column \[(.+?)\]"
    r"\. Expected Spark type (\w+), actual Parquet type (\w+)"
)
"""Spark's message about a column that it cannot read with the type that it has in another file."""

_SLOW_START = re.compile(
    r"Python worker failed to connect back|Python daemon failed to launch worker|\[CANNOT_OPEN_SOCKET\][^\n]*timed out"
)
"""Spark's message where a Python process, or this one, took longer to connect than Spark waits."""

_GONE = re.compile(r"\[FAILED_READ_FILE\.FILE_NOT_EXIST\] Encountered error while reading file (\S+?)\. ")
"""Spark's message about a file that is gone since it was listed."""

_MAY_COME_BACK = ("PATH_NOT_FOUND",)
"""Errors that Spark finds while it analyses a plan, and may not find at the next attempt."""


def translated(error: Exception, plan: Plan, stage: str, spark: SparkSession) -> errors.UnifiedError:
    """Return the error to raise in place of one of Spark's."""
    if isinstance(error, errors.UnifiedError):
        return _of_pipeline(error, plan)
    text = str(error)
    unknown = _unknown_format(text)
    if unknown is not None:
        return errors.MissingRequirementError(f"{plan.name}: stage '{stage}': {unknown}")
    refused = refusal(error)
    if refused is not None:
        return errors.PipelineError(f"{plan.name}: stage '{stage}': {refused}")
    colon = _COLON.search(text)
    if colon is not None:
        return errors.SourceError(
            f"{plan.name}: stage '{stage}': the name of {unquote(colon.group(1)).removeprefix('file://')} has a colon,"
            " which Hadoop does not read on a disk; rename the file"
        )
    missing = _GONE.search(text)
    if missing is not None:
        return errors.StageError(
            f"{plan.name}: stage '{stage}': {unquote(missing.group(1)).removeprefix('file://')} is gone, which was"
            " there when it was listed; put it back, and the next attempt reads it"
        )
    unfit = _unfit_file(error, plan)
    if unfit is not None:
        return unfit
    if "No usable value for logOffset" in text:
        return errors.StateError(
            f"{plan.name}: the checkpoint has an epoch that was planned, not committed, of a source of another kind;"
            " run the code that it is of until the epoch is committed, or start without state (upgrade mode stateless)"
        )
    raised = _RAISED.findall(text)
    if "ARITHMETIC_OVERFLOW" in text and not raised:
        large = _too_large(plan, stage)
        if large is not None:
            return large
    if raised:
        name, message = raised[-1]
        message = _STATE.sub("", message.strip())
        if name == "MalformedInputError":
            return _malformed(message, plan, spark)
        kind = getattr(errors, name, errors.StageError)
        built: errors.UnifiedError = kind(message)
        return _of_pipeline(built, plan)
    lasting = _no_retry_mends(error, plan, stage)
    if lasting is not None:
        return lasting
    if _SLOW_START.search(text):
        return errors.SlowStartError(
            f"{plan.name}: '{stage}' could not start: a Python process of Spark's did not answer within Spark's ten"
            f" seconds; {_load(is_connect(spark))}"
        )
    died = _jvm_died(error)
    if died is not None:
        return errors.StageError(f"{plan.name}: stage '{stage}': the JVM of this process's Spark session {died}")
    silent = _SILENT_SERVER.search(text) if is_connect(spark) and _OF_PYTHON.search(text) is None else None
    if silent is not None:
        return errors.StageError(
            f"{plan.name}: stage '{stage}': the Spark Connect server does not answer any more ({silent.group(1)}); see"
            " its log for why it ended"
        )
    away = _away(error, text)
    if away is not None:
        return errors.UnavailableError(
            f"{plan.name}: stage '{stage}': its object store does not answer ({away[:300]}); another attempt may"
            " succeed"
        )
    if _NO_CREDENTIALS.search(text):
        return errors.StageError(
            f"{plan.name}: stage '{stage}': Spark has no credentials for an S3 store: give an ObjectStore with key and"
            " secret, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY where the session's processes start; of Spark"
            " Connect that is where its server starts"
        )
    return errors.StageError(f"{plan.name}: stage '{stage}': {_sentence(error, text)[:500]}")


def _no_retry_mends(error: Exception, plan: Plan, stage: str) -> errors.UnifiedError | None:
    """Return the error for what a worker or the JVM lacks; None for any other error.

    Spark has run a task that failed by it several times by then, on other hosts where there are any.
    """
    text = str(error)
    sentence = _sentence(error, text)
    at = _HOST.search(text)
    whose = f"host {at.group(1)}" if at is not None else "a Python process of Spark's"
    if isinstance(error, ImportError | SyntaxError):
        whose = "this process"
    program = _NO_INTERPRETER.search(text)
    if program is not None:
        return errors.MissingRequirementError(
            f"{plan.name}: {whose} cannot run the interpreter {program.group(1)}: install it there, or name another one"
            " in PYSPARK_PYTHON"
        )
    imported = _NOT_IMPORTED.search(sentence)
    if imported is not None:
        absent = _ABSENT.search(imported.group(1))
        if absent is None:
            lacks = f"cannot import a module that stage '{stage}' needs ({imported.group(1)})"
        else:
            lacks = without_module(absent.group(1))
        remedy = install_for_workers("that it was given")
        return errors.MissingRequirementError(f"{plan.name}: {whose} {lacks}: {remedy}")
    lacked = _NO_CLASS.search(sentence)
    if lacked is not None:
        return errors.MissingRequirementError(
            f"{plan.name}: stage '{stage}': Spark's JVM lacks a class ({lacked.group()}); give the session the package"
            f" that has it, made for this version of Spark: {_WITH_PACKAGE}"
        )
    not_streamed = _NOT_STREAMED.search(text)
    if not_streamed is not None:
        return errors.UnsupportedError(
            f"{plan.name}: Spark's data source {not_streamed.group(1)} is not read in STREAMING; read it in BATCH, with"
            " bounded=True, or with a source of the library's that has both modes"
        )
    return None


_WITH_PACKAGE = 'SparkResource(config={"spark.jars.packages": "group:artifact:version"})'


def _unknown_format(text: str) -> str | None:
    """Return why Spark has no data source of a name; None for any other error."""
    found = _NO_FORMAT.search(text)
    if found is None:
        return None
    return (
        f"Spark has no data source '{found.group(1).rstrip('.')}'; correct the name, or give the session its package:"
        f" {_WITH_PACKAGE}"
    )


def _too_large(plan: Plan, stage: str) -> errors.RecordTypeError | None:
    """Return the error for a computed number that its column does not hold; None where no operator computes columns.

    Spark does not say which operator failed: it may be any of the stage, or of the query, that computes columns.
    """
    nodes_of_stage = {number for region in plan.regions if region.name == stage for number in region.nodes}
    nodes = [
        node
        for node in plan.graph.nodes
        if getattr(node, "columns", ()) and (not nodes_of_stage or node.id in nodes_of_stage)
    ]
    aggregating = [node for node in nodes if node.aggregates_natively] or nodes
    if not aggregating:
        return None
    names = ", ".join(f"'{node.name}'" for node in aggregating)
    where = f"{plan.name}: operator {names}" if len(aggregating) == 1 else f"{plan.name}: one of the operators {names}"
    return too_large(where, [field for node in aggregating for field in fields_of(getattr(node, "columns", ()))])


def damaged_file(error: Exception) -> tuple[str, str] | None:
    """Return the file that Spark found damaged, and what is wrong with it; None where it found none."""
    match = _DAMAGED.search(str(error))
    if match is None:
        return None
    file = unquote(match.group(1)).removeprefix("file://")
    return file, f"checksum error in {file}" if match.group(2) == "Checksum error" else f"{file} is no Parquet file"


@contextmanager
def naming_store(pipeline: str, path: UPath, then: str) -> Iterator[None]:
    """Name the folder of a store that does not answer, or takes no files; `then` says what happens once it answers."""
    try:
        yield
    except errors.UnifiedError:
        raise
    except Exception as error:
        if is_local(path) and isinstance(error, OSError) and error.errno in CLOSED:
            if not str(error.filename).startswith(str(path)):
                raise
            raise errors.ConfigurationError(
                f"{pipeline}: nothing can be written to {path}: {error.strerror}: {error.filename}; give another folder"
            ) from error
        if is_local(path) or not _is_away(error):
            raise
        raise errors.UnavailableError(
            f"{pipeline}: the store of {path} does not answer ({_first_line(error)}); once it does, {then}"
        ) from error


def _is_away(error: Exception) -> bool:
    """Return whether a store has not answered. Calls to Spark fail with the same error numbers, so frames decide."""
    for kind in type(error).__mro__:
        if kind.__name__ in _AWAY.get(kind.__module__.partition(".")[0], ()):
            return True
    if not (isinstance(error, OSError) and error.errno in _BUSY):
        return False
    packages = {frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_tb(error.__traceback__)}
    return not packages.isdisjoint(_FILE_SYSTEMS)


def _jvm_died(error: Exception) -> str | None:
    """Describe how the JVM that this process started ended; None where it runs.

    Otherwise its end would be reported as a refused connection, or as a failed call.
    """
    from py4j.protocol import Py4JError, Py4JJavaError
    from pyspark import SparkContext

    process: subprocess.Popen[bytes] | None = getattr(SparkContext._gateway, "proc", None)
    if process is None or isinstance(error, Py4JJavaError) or not isinstance(error, (Py4JError, ConnectionError)):
        return None
    try:
        code = process.wait(_REAPED)
    except subprocess.TimeoutExpired:
        return None
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL), by hand or by the operating system for want of memory"
    return f"has ended with code {code}; what it wrote before is in the output of the run"


def _load(elsewhere: bool) -> str:
    """Describe what may have kept a process from starting in time, and what to do."""
    if elsewhere:
        return "the Spark Connect server's machine may be busy; its log has what the process said"
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores:
        return f"this machine is busy (load {load:.0f} on {cores} cores): run less beside it, or give it more cores"
    return "this machine is not busy, so what the process said is the reason: it is in the output of this one"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _away(error: Exception, text: str) -> str | None:
    """Return the sentence of whoever found that an object store does not answer; None for any other error."""
    in_java, in_rust = _AWAY_IN_JAVA.search(text), _AWAY_IN_RUST.search(text)
    if in_java is not None:
        return ": ".join(part.strip() for part in in_java.groups() if part)
    if in_rust is not None:
        asked, causes = in_rust.groups()
        _, arrow, cause = causes.rpartition(_ARROW)
        return f"{asked}: {cause.strip() if arrow else 'the request could not be sent'}"
    return _first_line(error) if _is_away(error) else None


def _of_pipeline(error: errors.UnifiedError, plan: Plan) -> errors.UnifiedError:
    """Put the pipeline's name before an error: neither a source nor a worker knows its pipeline."""
    if not str(error).startswith(("source '", "host ")):
        return error
    named = type(error)(f"{plan.name}: {error}")
    named.__cause__ = error.__cause__
    return named


def refusal(error: Exception) -> str | None:
    """Return why Spark refuses to run a plan, now and at the next attempt; None for any other error."""
    from pyspark.errors import AnalysisException

    if not isinstance(error, AnalysisException) or error.getCondition() in _MAY_COME_BACK:
        return None
    reason = " ".join(re.split(r";\s*\n|\n\n|\nJVM stacktrace", str(error))[0].split())
    return (
        f"Spark does not accept an expression of it: {re.sub(r' ?SQLSTATE: [0-9A-Z]+', '', reason)[:500]}; correct the"
        " names and types that it uses"
    )


@contextmanager
def naming_operator(pipeline: str, node: Node) -> Iterator[None]:
    """Name the operator whose expression Spark does not accept."""
    try:
        yield
    except errors.UnifiedError:
        raise
    except Exception as error:
        unknown = _unknown_format(str(error))
        if unknown is not None:
            raise errors.MissingRequirementError(f"{pipeline}: operator '{node.name}': {unknown}") from error
        refused = refusal(error)
        if refused is None:
            raise
        raise errors.PipelineError(f"{pipeline}: operator '{node.name}': {refused}") from error


def _sentence(error: Exception, text: str) -> str:
    """Return the line that says what went wrong.

    Of a Python worker's error it is the last line of the trace; of a Java error the exception's own, and that of its
    innermost cause.
    """
    early = _ENDED_EARLY.search(text)
    if early is not None:
        return f"a Python process of Spark's ended as it started: {early.group(1).strip().splitlines()[-1].strip()}"
    raised = _OF_PYTHON.findall(text)
    if raised and not raised[-1].startswith("py4j."):
        return str(raised[-1])
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    if not lines[0].startswith("An error occurred while calling"):
        return f"{type(error).__name__}: {lines[0]}"
    messages = [line.removeprefix(": ") for line in lines[1:2]] + [
        line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")
    ][-1:]
    return "; ".join(re.sub(r"^(?:\w+\.)+(?=\w+(?::|$))", "", line) for line in dict.fromkeys(messages)) or lines[0]


def _unfit_file(error: Exception, plan: Plan) -> errors.UnifiedError | None:
    """Return the error for a file that is no Parquet file, or has other types than the source's other files."""
    types, damaged = _OTHER_TYPE.search(str(error)), damaged_file(error)
    if types is not None:
        url, column, wanted, stored = types.groups()
        file = unquote(url).removeprefix("file://")
        problem = (
            f"column '{column}' of {file} is {stored} in Parquet, and was read as {wanted}; write the file with the"
            " types of the others, or read it with a source of its own"
        )
    elif damaged is not None:
        file, what = damaged
        problem = f"{what}; repair it, or remove it"
    else:
        return None
    sources = [n.source for n in plan.graph.readers if isinstance(n.source, ParquetSource)]
    source = next((s for s in sources if _reads(s, file)), None)
    return None if source is None else errors.MalformedInputError(f"{plan.name}: source '{source.name}': {problem}")


def _reads(source: ParquetSource[Any], file: str) -> bool:
    return any(file.endswith(str(f).split("://")[-1]) for f in source.files())


def _malformed(message: str, plan: Plan, spark: SparkSession) -> errors.UnifiedError:
    details, is_whole = _details(message)
    if "source" not in details or details.keys().isdisjoint(("reason", "row")):  # raised by an author's function
        return errors.MalformedInputError(f"{plan.name}: {message}")
    name, file, row = details["source"], details.get("file"), details.get("row", "")
    reason = details.get("reason", "a row does not fit its record type")
    source = next((n.source for n in plan.graph.sources if n.source.name == name), None)
    if isinstance(source, TextSource) and file and is_whole:
        return errors.MalformedInputError(f"{plan.name}: {source.locate(spark, file, row, reason)}")
    where = f"{unquote(file).removeprefix('file://')}: " if file else ""
    return errors.MalformedInputError(f"{plan.name}: source '{name}': {where}{reason}: {row[:200]}")


def _details(message: str) -> tuple[dict[str, str], bool]:
    """Parse a message about a malformed row; the second value says whether it is whole: Spark cuts long ones."""
    try:
        return json.loads(message[message.find("{") : message.rfind("}") + 1]), True
    except json.JSONDecodeError:
        pass
    details = {}
    for name, text in _DETAIL.findall(message) if message.startswith('{"source":') else ():
        try:
            details[name] = json.loads(f'"{text}"')
        except json.JSONDecodeError:  # cut within an escape
            details[name] = text
    return details, False
