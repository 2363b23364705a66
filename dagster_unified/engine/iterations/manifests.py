"""The manifests of an iteration: small files that are there whole or not at all, beside the files that they name."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from dagster_unified.connectors import conditional
from dagster_unified.connectors.paths import put, read_whole
from dagster_unified.engine.iterations.places import Place
from dagster_unified.errors import LeaseLostError

M = TypeVar("M")


def read(place: Place, name: str, kind: type[M]) -> M | None:
    """A manifest; None where there is none, or none that can be read."""
    try:
        return msgspec.json.decode(read_whole(place.root / name), type=kind)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def write(place: Place, name: str, manifest: msgspec.Struct) -> None:
    """Writes a manifest, also where there is one."""
    put(place.root / name, msgspec.json.encode(manifest), durable=True)


def create(place: Place, name: str, manifest: msgspec.Struct, number: int) -> None:
    """Writes the manifest of a round of this number; raises `LeaseLostError` where another process has, in a bucket."""
    if place.is_shared:
        write(place, name, manifest)
        return
    try:
        conditional.write(place.root / name, msgspec.json.encode(manifest), None)
    except FileExistsError as error:
        raise LeaseLostError(
            f"epoch {number} of the iteration in {place.folder} was committed by another process meanwhile; this one"
            " stops and writes nothing more"
        ) from error
