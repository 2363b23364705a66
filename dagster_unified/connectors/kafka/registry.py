"""A schema registry: the schemas that values name by a number.

Knows Confluent's client and a registry's answers; not how values are decoded.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from dagster_unified.connectors.secrets import Value, deferred, resolved
from dagster_unified.errors import ConfigurationError, MissingRequirementError, UnavailableError

T = TypeVar("T")

_PATIENCE = 8
"""Seconds within which a registry has to answer."""


class SchemaRegistry:
    """A schema registry with Confluent's interface, and further options of its client, such as `basic.auth.user.info`.

    The value of an option may be an object with `get_value()`, such as Dagster's `EnvVar`, which is called only where a
    worker makes a client. No value of an option appears in plans, logs, metadata or checkpoints.

    Examples:
        >>> from dagster import EnvVar
        >>> SchemaRegistry("http://registry:8081", {"basic.auth.user.info": EnvVar("REGISTRY_LOGIN")})
        SchemaRegistry(http://registry:8081, options basic.auth.user.info)
    """

    def __init__(self, url: str, options: Mapping[str, Value] | None = None) -> None:
        if "@" in url:
            raise ConfigurationError(
                "SchemaRegistry: the url has a login in it, which plans would show; give it as the option"
                " basic.auth.user.info"
            )
        self.origin = url
        self._options = {name: deferred(value) for name, value in (options or {}).items()}

    def __repr__(self) -> str:
        options = f", options {', '.join(sorted(self._options))}" if self._options else ""
        return f"SchemaRegistry({self.origin}{options})"

    def avro(self, number: int) -> Any:
        """The Avro schema with this number, with its references inlined.

        Raises `ValueError` where there is none, `ConfigurationError` where the registry refuses this client, and
        `UnavailableError` where it does not answer.
        """
        from fastavro import parse_schema

        client = self._client()
        named: dict[str, Any] = {}
        registered = self._asked(partial(client.get_schema, number), f"schema {number}")
        if registered.schema_type not in (None, "AVRO"):
            raise ValueError(f"schema {number} in the registry is {registered.schema_type}, and not Avro")
        self._add_references(client, registered, named)
        return _inlined(parse_schema(for_records(json.loads(registered.schema_str)), named_schemas=named), named, set())

    def schema(self, subject: str) -> tuple[str, str, tuple[tuple[str, str], ...]]:
        """The kind of a subject's latest schema, `AVRO`, `JSON` or `PROTOBUF`, its text, and those that it refers to.

        The latter by name, each after its own. A registry that can gives Protobuf's as a description in Base64. Raises
        as `avro`.
        """
        client = self._client()
        ask = partial(client.get_latest_version, subject, fmt="serialized")
        schema = self._asked(ask, f"the subject '{subject}'").schema
        texts: dict[str, str] = {}
        self._add_texts(client, schema, texts)
        return schema.schema_type or "AVRO", schema.schema_str, tuple(texts.items())

    def _add_texts(self, client: Any, schema: Any, texts: dict[str, str]) -> None:
        for reference in schema.references or ():
            if reference.name not in texts:
                ask = partial(client.get_version, reference.subject, reference.version, fmt="serialized")
                referenced = self._asked(ask, f"version {reference.version} of '{reference.subject}'").schema
                self._add_texts(client, referenced, texts)
                texts[reference.name] = referenced.schema_str

    def latest(self, subject: str) -> int:
        """The number of the latest schema of a subject; raises as `avro`."""
        client = self._client()
        latest = self._asked(partial(client.get_latest_version, subject), f"the subject '{subject}'")
        return int(latest.schema_id)

    def register(self, subject: str, schema: str, kind: str) -> int:
        """Register a schema for a subject, unless it is there, and return its number.

        Raises `ValueError` where the registry rejects it, and else what `avro` raises.
        """
        return self._registered(self._client(), subject, schema, kind, ())

    def register_files(self, subject: str, files: Sequence[bytes]) -> int:
        """As `register`, for Protobuf's description of a file, which comes after the files that it imports.

        The imported files get subjects with their names, as Confluent's serializer does it.
        """
        from confluent_kafka.schema_registry import SchemaReference
        from google.protobuf.descriptor_pb2 import FileDescriptorProto

        client = self._client()
        known: dict[str, Any] = {}
        number = 0
        for content in files:
            file = FileDescriptorProto.FromString(content)
            if file.name.startswith("google/protobuf/"):  # a registry has these
                continue
            text = base64.standard_b64encode(content).decode()
            references = [known[name] for name in file.dependency if name in known]
            file_subject = subject if content is files[-1] else file.name
            number = self._registered(client, file_subject, text, "PROTOBUF", references)
            if content is not files[-1]:
                version = self._version(client, file_subject, text, references)
                known[file.name] = SchemaReference(file.name, file_subject, version)
        return number

    def _registered(self, client: Any, subject: str, schema: str, kind: str, references: Sequence[Any]) -> int:
        from confluent_kafka.schema_registry import Schema

        new_schema = Schema(schema, kind, list(references))
        number: int = self._asked(partial(client.register_schema, subject, new_schema), f"the subject '{subject}'")
        return number

    def _version(self, client: Any, subject: str, schema: str, references: Sequence[Any]) -> int:
        from confluent_kafka.schema_registry import Schema

        known_schema = Schema(schema, "PROTOBUF", list(references))
        version: int = self._asked(
            partial(client.lookup_schema, subject, known_schema), f"the subject '{subject}'"
        ).version
        return version

    def _add_references(self, client: Any, schema: Any, named: dict[str, Any]) -> None:
        """Parse the schemas that a schema refers to, each after its own references."""
        from fastavro import parse_schema

        for reference in schema.references or ():
            if reference.name in named:
                continue
            subject, version = reference.subject, reference.version
            referenced = self._asked(partial(client.get_version, subject, version), f"version {version} of '{subject}'")
            self._add_references(client, referenced.schema, named)
            parse_schema(for_records(json.loads(referenced.schema.schema_str)), named_schemas=named)

    def _client(self) -> Any:
        try:
            from confluent_kafka.schema_registry import SchemaRegistryClient
        except ImportError as error:
            raise MissingRequirementError(
                "a schema registry needs the package confluent-kafka[schemaregistry]: install dagster-unified[kafka]"
            ) from error
        where = f"the schema registry at {self.origin}"
        options = {name: resolved(value, f"{where}: {name}") for name, value in self._options.items()}
        try:
            return SchemaRegistryClient({"url": self.origin, "timeout": _PATIENCE, "max.retries": 1, **options})
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{where}: {type(error).__name__} of its client; check its options") from error

    def _asked(self, ask: Callable[[], T], what: str) -> T:
        from confluent_kafka.schema_registry import SchemaRegistryError

        where = f"the schema registry at {self.origin}"
        try:
            return ask()
        except SchemaRegistryError as error:
            status, code, said = error.http_status_code, error.error_code, error.error_message
        except Exception as error:  # its client raises what its own HTTP client does
            raise UnavailableError(
                f"{where} does not answer ({type(error).__name__}); see that it runs and that this machine reaches it"
            ) from None
        if code in _NOT_FOUND:
            raise ValueError(f"{what} is not in the registry at {self.origin}; register it, or correct the name")
        if status == 404:
            raise ConfigurationError(f"{where} answers as no registry does (status 404); correct its url")
        if status in (409, 422):
            raise ValueError(f"the registry at {self.origin} does not take the schema for {what}: {said}")
        if status in (401, 403):
            raise ConfigurationError(
                f"{where} refused this client (status {status}); check its option basic.auth.user.info"
            )
        raise UnavailableError(f"{where} failed (status {status}); see whether it is well")


_NOT_FOUND = (40401, 40402, 40403)
"""The registry's error codes for an unknown subject, version and schema."""

TIMES_OF_DAY = {"int": "time-millis", "long": "time-micros"}
"""Avro's times of day, which records hold as a timedelta since midnight; fastavro would give `datetime.time`."""

SINCE_MIDNIGHT = "since-midnight-"
"""The prefix of the logical types of such times in a schema of `for_records`."""


def for_records(schema: Any) -> Any:
    """An Avro schema with the types of records: a UUID is plain text, as values hold it, a time of day a timedelta.

    Converting such a schema again changes nothing.
    """
    if isinstance(schema, list):
        return list(map(for_records, schema))
    if not isinstance(schema, Mapping):
        return schema
    avro, logical = schema.get("type"), schema.get("logicalType")
    if avro == "string" and logical == "uuid":
        return {name: value for name, value in schema.items() if name != "logicalType"}
    if isinstance(avro, str) and logical is not None and TIMES_OF_DAY.get(avro) == logical:
        return {**schema, "logicalType": f"{SINCE_MIDNIGHT}{logical}"}
    return {name: value if name == "default" else for_records(value) for name, value in schema.items()}


def _inlined(schema: Any, named: Mapping[str, Any], known: set[str]) -> Any:
    """A parsed Avro schema with each named type where it is first used, so that it needs no other schema.

    fastavro's `expand_schema` writes a type wherever it is used, which is not a valid schema.
    """
    if isinstance(schema, str):
        return schema if schema in known or schema not in named else _inlined(named[schema], named, known)
    if isinstance(schema, list):
        return [_inlined(member, named, known) for member in schema]
    inlined = {name: value for name, value in schema.items() if not name.startswith("__")}  # fastavro's marks
    if "name" in inlined:
        known.add(inlined["name"])
    for part in ("items", "values"):
        if part in inlined:
            inlined[part] = _inlined(inlined[part], named, known)
    if "fields" in inlined:
        inlined["fields"] = [{**field, "type": _inlined(field["type"], named, known)} for field in inlined["fields"]]
    return inlined
