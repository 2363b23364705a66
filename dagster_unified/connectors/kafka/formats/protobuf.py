"""Values that are Protobuf messages. Knows descriptors; a generated class need not reach the workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from msgspec import inspect as mi

from dagster_unified.connectors.kafka.formats.base import Decode, Encode, ValueFormat, framing, unframed
from dagster_unified.connectors.kafka.formats.values import (
    SCALARS,
    Convert,
    check_members,
    check_names,
    columns,
    converted,
    each,
    entries,
    field_converters,
    from_plain,
    in_32_bits,
    in_order,
    inside,
    members,
    needed,
    one_of,
    optional,
)
from dagster_unified.connectors.kafka.registry import SchemaRegistry
from dagster_unified.errors import PipelineError
from dagster_unified.graph.fingerprint import digest
from dagster_unified.records import RecordType, shorten
from dagster_unified.values import described

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor
    from google.protobuf.message import Message

Read = Callable[[Any], Any]


class ProtobufFormat(ValueFormat):
    """Values are Protobuf messages of one generated class; the record has fields with the names of the message's.

    In reading, a field that the message does not hold is None where the record allows it, and else its default; in
    writing, a field that is None is left out, and has to be `optional` or a message. Of well-known types a `Timestamp`
    is a datetime, a `Duration` a timedelta, either of them not finer than microseconds, or a record with the fields
    `seconds` and `nanos`; and a wrapper is the value in it. An enum's value is its name, for a `str` or
    an `Enum`, and of several names for one number the first, or the one that the `Enum` has. With `framed` each value
    begins with the number of its schema in a registry, and with the message's place in it, as Confluent's serializers
    write it: to write such values, give the `registry`. The driver then registers the class's file for `subject`, which
    is the topic's name with `-value` if nothing else is said.

    Raises `PipelineError` where the message has no such field as the record, and, in writing, where it cannot hold all
    values of the record's type. A value that the message's field cannot hold exactly, such as 0.1 in a `float`, is a
    `SinkError` that names the field.

    Examples:
        >>> from google.protobuf.type_pb2 import Field
        >>> ProtobufFormat(Field).describe()
        'protobuf google.protobuf.Field'
    """

    name = "protobuf"

    def __init__(
        self,
        message: type[Message],
        framed: bool = False,
        registry: SchemaRegistry | None = None,
        subject: str | None = None,
    ) -> None:
        descriptor = message.DESCRIPTOR
        self.message, self.framed = descriptor.full_name, framed or registry is not None
        self.registry, self.subject = registry, subject
        self._fields = tuple(field.name for field in descriptor.fields)
        self._files = _files(descriptor.file)
        self._place = _place(descriptor)

    def describe(self) -> str:
        return f"{self.name} {self.message}"

    def fingerprint(self) -> str:
        return digest(self.describe(), self._files, self.framed)

    def value_type(self, records: RecordType, fields: Sequence[str], where: str) -> RecordType:
        if records.shape != "class":
            raise PipelineError(
                f"{where}: a Protobuf message has fields, and {records.describe()} has none; declare a NamedTuple"
            )
        kind = super().value_type(records, fields, where)
        check_names(kind, self._fields, f"the message {self.message}", where)
        return kind

    def decoder(self, python: Any) -> Decode:
        descriptor, make = _message(self._files, self.message)
        read, convert = _of_message(descriptor, (), mi.type_info(python)), from_plain(python)
        parse, framed = make.FromString, self.framed
        begins = [_place_bytes(self._place), *([b"\2\0"] if self._place == (0,) else [])]

        def decode(value: bytes) -> Any:
            if framed:
                _, value = unframed(value)
                begin = next(filter(value.startswith, begins), None)
                if begin is None:
                    raise ValueError(f"it is another message of its schema, and no {self.message}")
                value = value[len(begin) :]
            return convert(read(parse(value)))

        return decode

    def check_writing(self, kind: RecordType, where: str) -> None:
        if self.framed and self.registry is None:
            raise PipelineError(
                f"{where}: a framed value names its schema in a registry; give ProtobufFormat the registry, with"
                " registry="
            )
        super().check_writing(kind, where)

    def registered(self, topic: str) -> tuple[ValueFormat, bytes]:
        if self.registry is None:
            return self, b""
        number = self.registry.register_files(self.subject or f"{topic}-value", self._files)
        return self, framing(number) + _place_bytes(self._place)

    def encoder(self, kind: RecordType) -> Encode:
        descriptor, make = _message(self._files, self.message)
        fields = columns(kind)
        names = [field.encoded for field in fields]
        by_name = _record([(field.encoded, field.type) for field in fields], descriptor, "")
        converts = [by_name[name] for name in names]
        check = _one_of_each(descriptor, names)

        def encode(arrays: Sequence[Sequence[Any]]) -> list[bytes]:
            rows = zip(*converted(arrays, names, converts), strict=True)
            return [_encoded(dict(zip(names, row, strict=True)), make, check) for row in rows]

        return encode


def _encoded(fields: dict[str, Any], make: Callable[..., Any], check: Convert | None) -> bytes:
    try:
        data: bytes = make(**(fields if check is None else check(fields))).SerializeToString()
    except Exception as error:
        raise ValueError(f"{shorten(fields)} does not fit its message: {error}") from error
    return data


# Descriptors


def _files(file: FileDescriptor) -> tuple[bytes, ...]:
    """A file and its imports, each after its own imports."""
    files: dict[str, bytes] = {}

    def visit(descriptor: FileDescriptor) -> None:
        for dependency in descriptor.dependencies:
            visit(dependency)
        files.setdefault(descriptor.name, descriptor.serialized_pb)

    visit(file)
    return tuple(files.values())


def _place(descriptor: Descriptor) -> tuple[int, ...]:
    """The place of a message in its file: its number among its neighbours, from the outermost message on."""
    above = descriptor.containing_type
    if above is None:
        return (list(descriptor.file.message_types_by_name).index(descriptor.name),)
    return (*_place(above), list(above.nested_types_by_name).index(descriptor.name))


def _message(described_files: Sequence[bytes], message: str) -> tuple[Descriptor, Any]:
    """The descriptor and the class of a message, which is in one of the described files."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    pool = descriptor_pool.DescriptorPool()
    for file in described_files:
        pool.Add(descriptor_pb2.FileDescriptorProto.FromString(file))
    descriptor = pool.FindMessageTypeByName(message)
    return descriptor, message_factory.GetMessageClass(descriptor)


def _value_field(field: FieldDescriptor) -> FieldDescriptor | None:
    kind = field.message_type
    return kind.fields_by_name["value"] if kind is not None and kind.GetOptions().map_entry else None


# Plain values of messages, for a type of values


def _of_message(descriptor: Descriptor, above: tuple[str, ...], info: mi.Type) -> Read:
    kind, _ = needed(info)
    known = _WELL_KNOWN.get(descriptor.full_name)
    if known is not None and not _in_parts(descriptor, kind):
        return known
    if descriptor.full_name in above and not isinstance(kind, mi.StructType):
        return _without_end
    within = (*above, descriptor.full_name)
    types = {field.encode_name: field.type for field in kind.fields} if isinstance(kind, mi.StructType) else {}
    fields = []
    for field in descriptor.fields:
        if types and field.name not in types:
            continue
        of_field, nullable = needed(types.get(field.name, _ANY))
        fields.append((field.name, field.has_presence, nullable, _of_field(field, within, of_field)))

    def read(message: Any) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, has_presence, nullable, read_field in fields:
            if not has_presence or message.HasField(name):
                values[name] = read_field(getattr(message, name))
            elif nullable:  # also where its default is another: a message leaves None out
                values[name] = None
        return values

    return read


def _without_end(message: Any) -> Any:
    raise ValueError(
        f"it has a {message.DESCRIPTOR.name} within another; declare an annotated class for the field that holds it"
    )


_ANY = mi.AnyType()


def _in_parts(message: Descriptor, kind: mi.Type) -> bool:
    """Whether a record has a time's seconds and nanoseconds instead of the time."""
    return isinstance(kind, mi.StructType) and message.full_name in (_TIMESTAMP, _DURATION)


def _of_field(field: FieldDescriptor, above: tuple[str, ...], kind: mi.Type) -> Read:
    value = _value_field(field)
    if value is not None:
        read_value = _of_value(value, above, kind.value_type if isinstance(kind, mi.DictType) else _ANY)
        return lambda entries: {key: read_value(entries[key]) for key in entries}
    if not field.is_repeated:
        return _of_value(field, above, kind)
    if isinstance(kind, mi.TupleType):
        reads = [_of_value(field, above, item) for item in kind.item_types]
        # one with too many or too few items does not fit its type, which says so
        return lambda values: [read(item) for read, item in zip(reads, values, strict=False)] + values[len(reads) :]
    read = _of_value(field, above, kind.item_type if isinstance(kind, (mi.ListType, mi.VarTupleType)) else _ANY)
    return lambda values: list(map(read, values))


def _of_value(field: FieldDescriptor, above: tuple[str, ...], info: mi.Type) -> Read:
    if field.message_type is not None:
        return _of_message(field.message_type, above, info)
    if field.enum_type is not None:
        kind, _ = needed(info)
        known = field.enum_type.values_by_name
        wanted = [member.value for member in kind.cls] if isinstance(kind, mi.EnumType) else []
        names = _names(field.enum_type) | {known[name].number: name for name in wanted if name in known}
        return lambda number: names.get(number, str(number))
    return lambda value: value


def _names(enum: EnumDescriptor) -> dict[int, str]:
    """The names of an enum's numbers; for several names of one number the first, as Protobuf itself reads them."""
    return {value.number: value.name for value in reversed(enum.values)}


def _micros(message: Any) -> Any:
    """The same time or duration; raises `ValueError` where Python's class would cut it off."""
    if message.nanos % 1000:
        raise ValueError(
            f"a {message.DESCRIPTOR.name} with {message.nanos} nanoseconds is finer than microseconds, which is all"
            " that a time has; declare a record with its seconds and nanos, two ints, to read it as it is"
        )
    return message


def _wrapped(message: Any) -> Any:
    return message.value


_WRAPPERS = tuple(
    f"google.protobuf.{name}Value"
    for name in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
)
_TIMESTAMP, _DURATION = "google.protobuf.Timestamp", "google.protobuf.Duration"

_WELL_KNOWN: dict[str, Read] = {
    _TIMESTAMP: lambda message: _micros(message).ToDatetime(timezone.utc),
    _DURATION: lambda message: _micros(message).ToTimedelta(),
    **dict.fromkeys(_WRAPPERS, _wrapped),
}


# Messages of plain values, as the arguments that a message class takes


def _record(fields: Sequence[tuple[str, mi.Type]], descriptor: Descriptor, where: str) -> dict[str, Convert | None]:
    """A converter for each field of a record; raises `ValueError` where the message cannot hold all its values."""

    known = {field.name: field for field in descriptor.fields}
    needed = {name: "is required" for name, field in known.items() if field.is_required}
    return field_converters(fields, known, needed, f"the message {descriptor.full_name}", _for_field, where)


def _for_field(info: mi.Type, field: FieldDescriptor, where: str) -> Convert | None:
    kind, nullable = needed(info)
    if nullable and (field.is_required or not field.has_presence):
        raise ValueError(
            f"{where} may be None, which the message's field cannot say; make it optional there, or declare it without"
            " None"
        )
    value = _value_field(field)
    if value is not None and isinstance(kind, mi.DictType):
        key = _for_value(kind.key_type, field.message_type.fields_by_name["key"], where)
        item = _for_value(kind.value_type, value, inside(where, "[]"))
        return entries(key, item)
    if value is None and field.is_repeated and isinstance(kind, mi.TupleType):
        return in_order([_for_value(item_type, field, inside(where, "[]")) for item_type in kind.item_types])
    if value is None and field.is_repeated and isinstance(kind, (mi.ListType, mi.VarTupleType)):
        item = _for_value(kind.item_type, field, inside(where, "[]"))
        return item and each(item)
    if field.is_repeated:
        raise _unfit(kind, field, where)
    convert = _for_value(kind, field, where)
    return convert if convert is None or not nullable else optional(convert)


def _for_value(info: mi.Type, field: FieldDescriptor, where: str) -> Convert | None:
    kind, nullable = needed(info)
    if nullable:
        raise ValueError(f"{where} may be None, and Protobuf's lists and maps hold no None; declare it without None")
    message = field.message_type
    if message is None:
        return _scalar(kind, field, where)
    if message.full_name == _TIMESTAMP and isinstance(kind, mi.DateTimeType) and kind.tz is not False:
        return _timestamp
    if message.full_name == _DURATION and isinstance(kind, mi.TimeDeltaType):
        return _duration
    if message.full_name in _WRAPPERS:
        convert = _scalar(kind, message.fields_by_name["value"], where)
        return lambda value: {"value": value if convert is None else convert(value)}
    if not isinstance(kind, mi.StructType) or (message.full_name in _WELL_KNOWN and not _in_parts(message, kind)):
        raise _unfit(kind, field, where)
    names = [member.encode_name for member in kind.fields]
    convert = members(_record([(member.encode_name, member.type) for member in kind.fields], message, where))
    check = _one_of_each(message, names)
    if check is None or convert is None:
        return check or convert
    return lambda value: check(convert(value))


def _scalar(kind: mi.Type, field: FieldDescriptor, where: str) -> Convert | None:
    if field.enum_type is not None:
        return _enum(kind, field, where)
    if isinstance(kind, mi.EnumType):  # a member is its value
        kind = mi.StrType() if isinstance(next(iter(kind.cls)).value, str) else mi.IntType()
    scalar = _SCALARS.get((type(kind), _type_name(field)))
    if scalar is None:
        raise _unfit(kind, field, where)
    return scalar[0]


def _enum(kind: mi.Type, field: FieldDescriptor, where: str) -> Convert | None:
    known = field.enum_type.values_by_name
    enum = f"the enum {field.enum_type.full_name}"
    if isinstance(kind, mi.StrType):
        first = _names(field.enum_type).values()
        names = [name for name in known if name in first]
        aliases = ", of whose names for one number the first is read," if len(names) < len(known) else ""
        return one_of(names, f"{enum}{aliases}")
    if not isinstance(kind, mi.EnumType):
        raise _unfit(kind, field, where)
    values = check_members(kind, known, enum, where)
    by_number: dict[int, str] = {}
    for value in values:
        other = by_number.setdefault(known[value].number, value)
        if other != value:
            raise ValueError(
                f"{where} may be {other} and {value}, which are one number in {enum}, and would be read as one of them;"
                " declare only one"
            )
    return None


def _one_of_each(descriptor: Descriptor, names: Sequence[str]) -> Convert | None:
    """A check that a record has at most one field of each oneof; None where no two fields share one."""
    groups = [[field.name for field in group.fields if field.name in names] for group in descriptor.oneofs]
    several = [group for group in groups if len(group) > 1]
    if not several:
        return None

    def check(fields: dict[str, Any]) -> dict[str, Any]:
        for group in several:
            present = [name for name in group if fields[name] is not None]
            if len(present) > 1:
                raise ValueError(f"{' and '.join(present)} are of one oneof, and only one may be given")
        return fields

    return check


_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_LONGEST = timedelta(seconds=315_576_000_000)


def _timestamp(value: datetime) -> dict[str, int]:
    since = value - _EPOCH
    return {"seconds": since.days * 86_400 + since.seconds, "nanos": since.microseconds * 1000}


def _duration(value: timedelta) -> dict[str, int]:
    size = abs(value)
    if size > _LONGEST:
        raise ValueError("Protobuf's Duration has at most 10,000 years")
    sign = 1 if value == size else -1
    return {
        "seconds": sign * (size.days * 86_400 + size.seconds),
        "nanos": sign * size.microseconds * 1000,
    }


_SCALARS: dict[tuple[type[mi.Type], str], tuple[Convert | None]] = {
    (mi.BoolType, "bool"): (None,),
    **{(mi.IntType, name): (None,) for name in ("int64", "sint64", "sfixed64", "uint64", "fixed64")},
    **{(mi.IntType, name): (in_32_bits,) for name in ("int32", "sint32", "sfixed32")},
    **{(mi.IntType, name): (None,) for name in ("uint32", "fixed32")},
    **SCALARS,
}
"""The converters from a record's type to a Protobuf type. Protobuf itself refuses an unsigned int below 0."""

_TYPES = (
    "", "double", "float", "int64", "uint64", "int32", "fixed64", "fixed32", "bool", "string", "group", "message",
    "bytes", "uint32", "enum", "sfixed32", "sfixed64", "sint32", "sint64",
)  # fmt: skip
"""Protobuf's types by their numbers."""


def _type_name(field: FieldDescriptor) -> str:
    return _TYPES[field.type]


def _unfit(kind: mi.Type, field: FieldDescriptor, where: str) -> ValueError:
    named = field.message_type or field.enum_type
    name = named.full_name if named is not None else _type_name(field)
    return ValueError(
        f"{where} is {described(kind)}, which the message's {'repeated ' if field.is_repeated else ''}{name} does not"
        " hold; change the message or the record"
    )


# The place of a message in its schema


def _place_bytes(place: tuple[int, ...]) -> bytes:
    """A list of integers in Protobuf's zigzag encoding, after their number; [0] is 0."""
    if place == (0,):
        return b"\0"
    return b"".join(map(_zigzag, (len(place), *place)))


def _zigzag(number: int) -> bytes:
    """The encoding of a number that is not negative."""
    rest, data = number << 1, bytearray()
    while rest > 0x7F:
        data.append(rest & 0x7F | 0x80)
        rest >>= 7
    data.append(rest)
    return bytes(data)
