"""The values of a topic, as a schema registry or a generated class of Protobuf describes them."""

from __future__ import annotations

import importlib
import json
import os
import sys

import pyarrow as pa

from dagster_unified.cli.record.avro import of_avro
from dagster_unified.cli.record.json_schema import of_json_schema
from dagster_unified.cli.record.protobuf import first_message, of_message
from dagster_unified.errors import ConfigurationError, PipelineError


def of_subject(topic: str, url: str) -> pa.Schema:
    """The fields of a topic's values, by the latest schema of its subject `<topic>-value`.

    A login of the registry is taken from the environment variable SCHEMA_REGISTRY_LOGIN, as `user:password`.
    """
    from dagster_unified.connectors.kafka.registry import SchemaRegistry

    login = os.environ.get("SCHEMA_REGISTRY_LOGIN")
    registry = SchemaRegistry(url, {"basic.auth.user.info": login} if login else {})
    subject = f"{topic}-value"
    where = f"record: the values of topic '{topic}'"
    try:
        kind, text, references = registry.schema(subject)
        if kind == "AVRO":
            return of_avro(registry.avro(registry.latest(subject)), where)
    except ValueError as error:
        raise PipelineError(f"record: {error}") from error
    if kind == "JSON":
        return of_json_schema(json.loads(text), where)
    return of_message(first_message(text, dict(references), where))


def of_generated_class(name: str) -> pa.Schema:
    """The fields of a message, by its class that protoc has generated: `sales_pb2:Sale`."""
    module, _, message = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        descriptor = getattr(importlib.import_module(module), message).DESCRIPTOR
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"record: {name} is no class of a Protobuf message ({error}); give its module and its name, such as"
            " sales_pb2:Sale, from the folder that holds the module"
        ) from error
    return of_message(descriptor)
