"""Protobuf messages as plain values. Knows descriptors; a generated class need not reach the workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timezone
from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor

Read = Callable[[Any], Any]


def files(file: FileDescriptor) -> tuple[bytes, ...]:
    """A file and what it imports, each after what it needs itself."""
    found: dict[str, bytes] = {}

    def visit(one: FileDescriptor) -> None:
        for needed in one.dependencies:
            visit(needed)
        found.setdefault(one.name, one.serialized_pb)

    visit(file)
    return tuple(found.values())


def place(descriptor: Descriptor) -> tuple[int, ...]:
    """The place of a message in its file: its number among its neighbours, from the outermost message on."""
    above = descriptor.containing_type
    if above is None:
        return (list(descriptor.file.message_types_by_name).index(descriptor.name),)
    return (*place(above), list(above.nested_types_by_name).index(descriptor.name))


def reader(described: Sequence[bytes], message: str) -> Callable[[bytes], Any]:
    """What makes plain values of the bytes of a message, which is in one of the described files."""
    pool = descriptor_pool.DescriptorPool()
    for file in described:
        pool.Add(descriptor_pb2.FileDescriptorProto.FromString(file))
    descriptor = pool.FindMessageTypeByName(message)
    parse = message_factory.GetMessageClass(descriptor).FromString
    read = _of_message(descriptor, ())
    return lambda value: read(parse(value))


def _of_message(descriptor: Descriptor, above: tuple[str, ...]) -> Read:
    known = _WELL_KNOWN.get(descriptor.full_name)
    if known is not None:
        return known
    if descriptor.full_name in above:  # a message within itself has no record type
        return lambda message: None
    within = (*above, descriptor.full_name)
    fields = [(field.name, field.has_presence, _of_field(field, within)) for field in descriptor.fields]

    def read(message: Any) -> dict[str, Any]:
        return {
            name: read_field(getattr(message, name))
            for name, has_presence, read_field in fields
            if not has_presence or message.HasField(name)
        }

    return read


def _of_field(field: FieldDescriptor, above: tuple[str, ...]) -> Read:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        read_value = _of_value(kind.fields_by_name["value"], above)
        return lambda entries: {key: read_value(entries[key]) for key in entries}
    read = _of_value(field, above)
    return (lambda values: list(map(read, values))) if field.is_repeated else read


def _of_value(field: FieldDescriptor, above: tuple[str, ...]) -> Read:
    if field.message_type is not None:
        return _of_message(field.message_type, above)
    if field.enum_type is not None:
        names = {number: value.name for number, value in field.enum_type.values_by_number.items()}
        return lambda number: names.get(number, str(number))
    return lambda value: value


def _wrapped(message: Any) -> Any:
    return message.value


_WELL_KNOWN: dict[str, Read] = {
    "google.protobuf.Timestamp": lambda message: message.ToDatetime(timezone.utc),
    "google.protobuf.Duration": lambda message: message.ToTimedelta(),
    **{
        f"google.protobuf.{name}Value": _wrapped
        for name in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
    },
}
