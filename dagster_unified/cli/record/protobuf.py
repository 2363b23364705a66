"""A Protobuf message as an Arrow schema, whose record the format `ProtobufFormat` reads."""

from __future__ import annotations

import base64
import binascii
import importlib
import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from dagster_unified.cli.record.classes import unread
from dagster_unified.errors import ConfigurationError, RecordTypeError

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool

_PLAIN = {
    **dict.fromkeys((1, 2), pa.float64()),
    **dict.fromkeys((3, 4, 5, 6, 7, 13, 15, 16, 17, 18), pa.int64()),
    8: pa.bool_(),
    9: pa.string(),
    12: pa.binary(),
    14: pa.string(),
}
"""Types of fields by Protobuf's numbers; an enum is its name."""

_KNOWN = {
    "google.protobuf.Timestamp": pa.timestamp("us", "UTC"),
    "google.protobuf.Duration": pa.duration("us"),
    **dict.fromkeys(("google.protobuf.DoubleValue", "google.protobuf.FloatValue"), pa.float64()),
    **{f"google.protobuf.{name}Value": pa.int64() for name in ("Int64", "UInt64", "Int32", "UInt32")},
    "google.protobuf.BoolValue": pa.bool_(),
    "google.protobuf.StringValue": pa.string(),
    "google.protobuf.BytesValue": pa.binary(),
}
"""Messages that are one value."""


def of_message(descriptor: Descriptor) -> pa.Schema:
    """The fields of a message; one that a message may leave out may be None."""
    return pa.schema([_field(field, (descriptor.full_name,)) for field in descriptor.fields])


def first_message(text: str, imported: Mapping[str, str], where: str) -> Descriptor:
    """The first message of a file whose description in Base64, and those of its imports, a registry has given."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool

    pool, files = DescriptorPool(), []
    for described in (*imported.values(), text):
        try:
            file = FileDescriptorProto.FromString(base64.b64decode(described, validate=True))
        except (ValueError, binascii.Error, RuntimeError) as error:
            raise ConfigurationError(
                f"{where}: the registry gives the schema as the text of a .proto file, which only protoc reads; give"
                " the message's generated class, such as `dagster-unified record sales_pb2:Sale`"
            ) from error
        _add_googles(pool, file)
        pool.Add(file)
        files.append(file)
    names = [message.name for message in files[-1].message_type]
    if not names:
        raise RecordTypeError(f"{where}: its schema has no message")
    found: Descriptor = pool.FindMessageTypeByName(f"{files[-1].package}.{names[0]}".lstrip("."))
    return found


def _add_googles(pool: DescriptorPool, file: FileDescriptorProto) -> None:
    """Add the files of Google's that a file imports; a registry need not have them."""
    import google.protobuf  # type: ignore[import-untyped]
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    known = {module.name for module in pkgutil.iter_modules(google.protobuf.__path__)}
    for name in file.dependency:
        module = name.removeprefix("google/protobuf/").removesuffix(".proto") + "_pb2"
        if name.startswith("google/protobuf/") and module in known:
            descriptor = importlib.import_module(f"google.protobuf.{module}").DESCRIPTOR
            pool.Add(FileDescriptorProto.FromString(descriptor.serialized_pb))


def _field(field: FieldDescriptor, above: tuple[str, ...]) -> pa.Field:
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        key, value = message.fields_by_name["key"], message.fields_by_name["value"]
        return pa.field(field.name, pa.map_(_PLAIN[key.type], _value("value", value, above)), False)
    if field.is_repeated:
        return pa.field(field.name, pa.list_(_value("element", field, above)), False)
    return _value(field.name, field, above).with_nullable(field.has_presence and not field.is_required)


def _value(name: str, field: FieldDescriptor, above: tuple[str, ...]) -> pa.Field:
    """A field for one value."""
    message = field.message_type
    if message is None:
        return pa.field(name, _PLAIN[field.type], False)
    if message.full_name in _KNOWN:
        return pa.field(name, _KNOWN[message.full_name], False)
    if message.full_name in above:
        return unread(name, f"a {message.name} within another")
    members = [_field(member, (*above, message.full_name)) for member in message.fields]
    return pa.field(name, pa.struct(members), False, {"class": message.name})
