"""A schema registry: where the schemas are that values name by a number.

Knows Confluent's client and what a registry answers; not how values are decoded.
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
"""Seconds in which a registry has to answer."""


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
        """The Avro schema with this number, with what it refers to in it.

        Raises `ValueError` where there is none, `ConfigurationError` where the registry refuses this client, and
        `UnavailableError` where it does not answer.
        """
        from fastavro import parse_schema

        client = self._client()
        named: dict[str, Any] = {}
        found = self._asked(partial(client.get_schema, number), f"schema {number}")
        if found.schema_type not in (None, "AVRO"):
            raise ValueError(f"schema {number} in the registry is {found.schema_type}, and not Avro")
        self._add_references(client, found, named)
        return _inlined(parse_schema(for_records(json.loads(found.schema_str)), named_schemas=named), named, set())

    def latest(self, subject: str) -> int:
        """The number of the latest schema of a subject; raises as `avro`."""
        client = self._client()
        found = self._asked(partial(client.get_latest_version, subject), f"the subject '{subject}'")
        return int(found.schema_id)

    def register(self, subject: str, schema: str, kind: str) -> int:
        """The number of a schema, which a subject gets where it has not got it.

        Raises `ValueError` where the registry does not take it, and else what `avro` raises.
        """
        return self._registered(self._client(), subject, schema, kind, ())

    def register_files(self, subject: str, files: Sequence[bytes]) -> int:
        """As `register`, for Protobuf's description of a file, which comes after the files that it imports.

        Those get subjects with their names, as Confluent's serializer gives them.
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
            own = subject if content is files[-1] else file.name
            number = self._registered(client, own, text, "PROTOBUF", references)
            if content is not files[-1]:
                version = self._version(client, own, text, references)
                known[file.name] = SchemaReference(file.name, own, version)
        return number

    def _registered(self, client: Any, subject: str, schema: str, kind: str, references: Sequence[Any]) -> int:
        from confluent_kafka.schema_registry import Schema

        made = Schema(schema, kind, list(references))
        number: int = self._asked(partial(client.register_schema, subject, made), f"the subject '{subject}'")
        return number

    def _version(self, client: Any, subject: str, schema: str, references: Sequence[Any]) -> int:
        from confluent_kafka.schema_registry import Schema

        made = Schema(schema, "PROTOBUF", list(references))
        version: int = self._asked(partial(client.lookup_schema, subject, made), f"the subject '{subject}'").version
        return version

    def _add_references(self, client: Any, schema: Any, named: dict[str, Any]) -> None:
        """Parse what a schema refers to, each after what it refers to itself."""
        from fastavro import parse_schema

        for reference in schema.references or ():
            if reference.name in named:
                continue
            subject, version = reference.subject, reference.version
            found = self._asked(partial(client.get_version, subject, version), f"version {version} of '{subject}'")
            self._add_references(client, found.schema, named)
            parse_schema(for_records(json.loads(found.schema.schema_str)), named_schemas=named)

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
"""The registry's own numbers for a subject, a version and a schema that it does not have."""

TIMES_OF_DAY = {"int": "time-millis", "long": "time-micros"}
"""Avro's times of day, which records hold as a timedelta since midnight; fastavro would give `datetime.time`."""

SINCE_MIDNIGHT = "since-midnight-"
"""How the logical types of such times begin in a schema of `for_records`."""


def for_records(schema: Any) -> Any:
    """An Avro schema with types that records have: a UUID is plain text, as values hold it, a time of day a timedelta.

    Such a schema may be given again.
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
    """A parsed Avro schema with each named type where it is used first, so that it needs no others.

    fastavro's `expand_schema` writes a type wherever it is used, which is no schema again.
    """
    if isinstance(schema, str):
        return schema if schema in known or schema not in named else _inlined(named[schema], named, known)
    if isinstance(schema, list):
        return [_inlined(one, named, known) for one in schema]
    found = {name: value for name, value in schema.items() if not name.startswith("__")}  # fastavro's marks
    if "name" in found:
        known.add(found["name"])
    for part in ("items", "values"):
        if part in found:
            found[part] = _inlined(found[part], named, known)
    if "fields" in found:
        found["fields"] = [{**field, "type": _inlined(field["type"], named, known)} for field in found["fields"]]
    return found
