"""A schema registry: where the schemas are that values name by a number.

Knows Confluent's client and what a registry answers; not how values are decoded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
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
        """The Avro schema with this number, parsed.

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
        return parse_schema(without_uuids(json.loads(found.schema_str)), named_schemas=named)

    def _add_references(self, client: Any, schema: Any, named: dict[str, Any]) -> None:
        """Parse what a schema refers to, each after what it refers to itself."""
        from fastavro import parse_schema

        for reference in schema.references or ():
            if reference.name in named:
                continue
            subject, version = reference.subject, reference.version
            found = self._asked(partial(client.get_version, subject, version), f"version {version} of '{subject}'")
            self._add_references(client, found.schema, named)
            parse_schema(without_uuids(json.loads(found.schema.schema_str)), named_schemas=named)

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
            status = error.http_status_code
        except Exception as error:  # its client raises what its own HTTP client does
            raise UnavailableError(
                f"{where} does not answer ({type(error).__name__}); see that it runs and that this machine reaches it"
            ) from None
        if status == 404:
            raise ValueError(f"{what} is not in the registry at {self.origin}")
        if status in (401, 403):
            raise ConfigurationError(
                f"{where} refused this client (status {status}); check its option basic.auth.user.info"
            )
        raise UnavailableError(f"{where} failed (status {status}); see whether it is well")


def without_uuids(schema: Any) -> Any:
    """An Avro schema whose UUIDs are plain text, as values hold them: records have no type of their own for these."""
    if isinstance(schema, list):
        return list(map(without_uuids, schema))
    if not isinstance(schema, Mapping):
        return schema
    if schema.get("type") == "string" and schema.get("logicalType") == "uuid":
        return {name: value for name, value in schema.items() if name != "logicalType"}
    return {name: value if name == "default" else without_uuids(value) for name, value in schema.items()}
